"""What a setting's text must be like; each raises `ConfigError` in words that go behind the setting's name."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from kvrelay.errors import ConfigError
from services.runtime.addresses import check_host, split_address

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_OTLP_SCHEMES = ("http", "https")
_REDIS_SCHEMES = ("redis", "rediss", "unix")


def host(text: str) -> None:
    """A host to listen on or to be reached by."""
    check_host(text)


def address(text: str) -> None:
    """host:port of something that is there."""
    split_address(text)


def namespace(text: str) -> None:
    """Part of every key in Redis: nothing in it may end the key's hash tag or mean something in a pattern."""
    if not _NAMESPACE.fullmatch(text):
        raise ConfigError(f"a namespace has 1 to 64 letters, digits, '.', '_' and '-', got {text!r}")


def otlp_endpoint(text: str) -> None:
    """host:port, or a URL with scheme http or https."""
    scheme, found, _ = text.partition("://")
    try:
        parts = urlsplit(text if found else f"http://{text}")
        right = (not found or scheme in _OTLP_SCHEMES) and bool(parts.hostname) and (bool(found) or parts.port is not None)
        check_host(parts.hostname or "")
    except (ValueError, ConfigError):
        right = False
    if not right or any(letter.isspace() for letter in text):
        raise ConfigError(f"an OTLP endpoint is host:port or http(s)://host:port, got {text!r}")


def redis_url(text: str) -> None:
    """As redis-py takes it. The text itself is not repeated: it may hold a password."""
    try:
        parts = urlsplit(text)
        right = parts.scheme in _REDIS_SCHEMES and (parts.scheme == "unix" or parts.port != 0)
        if parts.scheme != "unix":
            check_host(parts.hostname or "")
    except (ValueError, ConfigError):
        right = False
    if not right:
        raise ConfigError("not the address of a Redis (redis://, rediss://, unix://), such as redis://host:6379/0 or redis://[::1]:6379/0")
