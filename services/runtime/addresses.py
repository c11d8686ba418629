"""Addresses as services write them: host:port, with brackets around an IPv6 host; and which of them others can reach."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from urllib.parse import urlsplit

from kvrelay.errors import ConfigError
from services.runtime.offloop import assert_off_loop

LOOPBACK = "127.0.0.1"
REDIS_PORT = 6379
_HOST_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?\.?")


def host_port(host: str, port: int) -> str:
    """'127.0.0.1:7000', '[::1]:7000'; the host may have its brackets already."""
    bare = bare_host(host)
    return f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}"


def split_address(address: str) -> tuple[str, int]:
    """Host, without brackets, and port; `ConfigError` for what is no address."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65535 or (":" in host and not host.startswith("[")):
        raise ConfigError(f"an address is host:port, or [host]:port for IPv6, got {address!r}")
    check_host(host)
    return bare_host(host), int(port)


def bare_host(host: str) -> str:
    """Without the brackets that an IPv6 host may have."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def check_host(host: str) -> None:
    """`ConfigError` for a text that is neither an IP address nor a host's name; '' is every address of this host."""
    bare = bare_host(host)
    if bare and _ip(bare) is None and not (len(bare) <= 253 and _HOST_NAME.fullmatch(bare)):
        raise ConfigError(f"a host is a name or an IP address, got {host!r}")


def is_wildcard(host: str) -> bool:
    """Whether it stands for every address of a host: '0.0.0.0', '::' and ''. Whoever is told it finds itself."""
    address = _ip(bare_host(host))
    return not host or (address is not None and address.is_unspecified)


def reachable_here(address: str) -> str:
    """Where this host reaches what listens on `address`: a wildcard is reached on loopback."""
    host, port = split_address(address)
    if not is_wildcard(host):
        return address
    return host_port("::1" if ":" in host else LOOPBACK, port)


def redis_address(url: str) -> tuple[str, int]:
    """Host and port of a Redis; of one on a unix socket: this host. Raises `OSError` where there is none."""
    if not url:
        raise OSError(errno.EDESTADDRREQ, "there is no Redis")
    parts = urlsplit(url)
    return parts.hostname or LOOPBACK, parts.port or REDIS_PORT


def advertised_host(host: str, advertise: str, redis_url: str) -> str:
    """By which host others reach what listens on `host`: `advertise` if given, else `host`, else this host's address towards Redis.

    The last for a wildcard, which is never told to anybody. Blocks: it may ask for Redis' name. `ConfigError` where nothing is found.
    """
    assert_off_loop("looking for this host's address")
    if is_wildcard(advertise) and advertise:
        raise ConfigError(f"--advertise must be a host that others reach, got {advertise}", setting="advertise")
    if advertise or not is_wildcard(host):
        return bare_host(advertise or host)
    try:
        return _address_towards(*redis_address(redis_url))
    except OSError as error:
        raise ConfigError(
            f"--host {host} is every address of this host, and the one towards Redis cannot be found ({error.strerror or error}):"
            " name with --advertise the host that others reach",
            setting="advertise",
        ) from None


def check_listening(host: str, port: int) -> None:
    """`ConfigError` when nothing can listen on host:port: said before a model is loaded for nothing. A free port, 0, is always there."""
    try:
        infos = socket.getaddrinfo(bare_host(host) or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            # Beside a listener that lets others share its port, binding goes well and listening does not.
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        about_port = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        hint = "--port chooses another (0: any free one)" if about_port else "--host must be an address of this machine"
        text = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host_port(host, port)}: {text}; {hint}", setting="port" if about_port else "host") from None


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _address_towards(host: str, port: int) -> str:
    """This host's own address on the way there; sends nothing. Raises `OSError`."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found = str(probe.getsockname()[0])
    if is_wildcard(found):
        raise OSError(errno.ENETUNREACH, "no route")
    return found.partition("%")[0]
