"""Addresses: IPv6 has brackets, a wildcard is never told to others, a port that is taken is said early."""

from __future__ import annotations

import socket

import pytest

from kvrelay.errors import ConfigError
from services.runtime import addresses
from services.runtime.addresses import (
    advertised_host,
    check_host,
    check_listening,
    host_port,
    is_wildcard,
    reachable_here,
    redis_address,
    split_address,
)
from services.runtime.processes import checks

ADDRESSES = [("127.0.0.1", 7000, "127.0.0.1:7000"), ("::1", 7000, "[::1]:7000"), ("a.example", 1, "a.example:1")]
NO_REDIS = "redis://127.0.0.1:1/0"


@pytest.mark.parametrize(("host", "port", "text"), ADDRESSES)
def test_an_address_is_put_together_and_taken_apart(host: str, port: int, text: str) -> None:
    assert host_port(host, port) == host_port(text.rpartition(":")[0], port) == text
    assert split_address(text) == (host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "::1:7000", ":::0", "a b:1", "http://x:1", "[::1]"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        split_address(text)


@pytest.mark.parametrize(
    ("host", "is_one"), [("0.0.0.0", True), ("::", True), ("[::]", True), ("", True), ("::1", False), ("0.0.0.1", False)]
)
def test_wildcards_are_known_in_every_form(host: str, is_one: bool) -> None:
    assert is_wildcard(host) is is_one


@pytest.mark.parametrize(("listens", "reached"), [("0.0.0.0:7", "127.0.0.1:7"), ("[::]:7", "[::1]:7"), ("10.0.0.1:7", "10.0.0.1:7")])
def test_a_wildcard_is_reached_on_loopback(listens: str, reached: str) -> None:
    assert reachable_here(listens) == reached


@pytest.mark.parametrize(
    ("host", "advertise", "redis", "told"),
    [
        ("127.0.0.1", "", NO_REDIS, "127.0.0.1"),
        ("[::1]", "", NO_REDIS, "::1"),
        ("0.0.0.0", "worker.example", NO_REDIS, "worker.example"),
        ("0.0.0.0", "", NO_REDIS, "127.0.0.1"),
        ("::", "", "redis://[::1]:6379/0", "::1"),
        ("::", "", "unix:///run/redis.sock", "127.0.0.1"),
    ],
)
def test_others_are_told_an_address_they_can_reach(host: str, advertise: str, redis: str, told: str) -> None:
    assert advertised_host(host, advertise, redis) == told


@pytest.mark.parametrize(
    ("advertise", "redis"), [("0.0.0.0", NO_REDIS), ("::", NO_REDIS), ("", "redis://no-such-host.invalid/0"), ("", "")]
)
def test_where_nothing_can_be_told_advertise_is_asked_for_by_name(advertise: str, redis: str) -> None:
    with pytest.raises(ConfigError, match="--advertise") as refused:
        advertised_host("0.0.0.0", advertise, redis)
    assert refused.value.fields["setting"] == "advertise"


def test_no_route_towards_redis_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_address_towards", lambda *_: (_ for _ in ()).throw(OSError(101, "Network is unreachable")))
    with pytest.raises(ConfigError, match=r"Network is unreachable.*--advertise"):
        advertised_host("::", "", NO_REDIS)


@pytest.mark.parametrize(
    ("url", "place"), [("redis://a:1/0", ("a", 1)), ("redis://[::1]", ("::1", 6379)), ("rediss://u:p@b/3", ("b", 6379))]
)
def test_the_place_of_a_redis(url: str, place: tuple[str, int]) -> None:
    assert redis_address(url) == place


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_taken_port_is_said_and_a_free_one_passes(host: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as taken:
        taken.bind((host, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=r"cannot listen on .*; --port chooses another") as refused:
            check_listening(host, port)
        assert host_port(host, port) in str(refused.value)
    check_listening(host, port)
    check_listening(host, 0)


@pytest.mark.parametrize("port", [0, 50051])
def test_a_host_that_is_not_ours_is_said_of_the_host(port: int) -> None:
    with pytest.raises(ConfigError, match=f"cannot listen on 192.0.2.1:{port}: .*; --host must be an address of this machine"):
        check_listening("192.0.2.1", port)


RIGHT = {
    checks.host: ["", "0.0.0.0", "::", "[::1]", "a-b.example", "worker_1"],
    checks.namespace: ["kvrelay", "a.b_c-D9"],
    checks.otlp_endpoint: ["collector:4317", "http://collector", "https://[::1]:4317", "[::1]:4317", "http://c:4317/"],
    checks.redis_url: ["redis://h", "rediss://u:p@h:1/2", "redis://[::1]:6379/0", "unix:///run/redis.sock"],
    check_host: ["10.0.0.1"],
}
WRONG = {
    checks.host: ["a b", "http://a", "a:1", "-", "x" * 300],
    checks.namespace: ["", "a b:c*{", "a:b", "{a}", "n" * 65, "é"],
    checks.otlp_endpoint: ["not a url", "collector", "ftp://c:1", "http://", "c:99999", "http://a b:1"],
    checks.redis_url: ["", "http://h", "redis://h:99999", "redis://a b"],
}


def test_each_kind_of_text_is_taken_or_refused() -> None:
    for check, texts in RIGHT.items():
        for text in texts:
            check(text)
    for check, texts in WRONG.items():
        for text in texts:
            with pytest.raises(ConfigError):
                check(text)
                pytest.fail(f"{check.__name__} took {text!r}")
