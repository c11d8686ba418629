"""What each keyword of a request may be: one table, so that a value of a wrong kind is refused by name before anything is sent."""

from __future__ import annotations

import math
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Set
from typing import Any, NamedTuple

from kvrelay.errors import (
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidStopError,
)

MAX_TIMEOUT_S = 365 * 86400.0
"""A longer wait is cut to this: gRPC's clock overflows somewhere above and would call the deadline passed."""

_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")
_METADATA_VALUE = re.compile(r"[ -~]*")


def checked(name: str, value: Any) -> Any:
    """`value` in the form the request uses. Raises the `InvalidRequestError` that belongs to the keyword, with its `field`."""
    kind = _KINDS[name]
    try:
        return kind.convert(value)
    except (TypeError, ValueError, OverflowError):
        got = type(value).__name__ if kind.private else reprlib.repr(value)
        raise kind.error(f"{name} must be {kind.wanted}, got {got}", field=kind.field or name) from None


def integer(value: Any) -> int:
    """Any integer type, numpy's too; True and False are none."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def number(value: Any) -> float:
    """Any number type; not a string that reads like one."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise TypeError
    return float(value)


def string(value: Any) -> str:
    """Text that a message can carry: no lone surrogates."""
    if not isinstance(value, str):
        raise TypeError
    value.encode()
    return value


def _items(value: Any) -> list[Any]:
    """Of a list or anything like one (tuple, range, array, tensor); not of a set, whose order is undefined, nor of an iterator."""
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not hasattr(value, "__getitem__"):
        raise TypeError
    return list(value)


def _prompt(value: Any) -> str | list[Any]:
    return string(value) if isinstance(value, str) else _items(value)


def _biases(value: Any) -> dict[int, float]:
    if not isinstance(value, Mapping):
        raise TypeError
    return {integer(token_id): number(bias) for token_id, bias in value.items()}


def _strings(value: Any) -> tuple[str, ...]:
    return (string(value),) if isinstance(value, str) else tuple(string(item) for item in _items(value))


def _integers(value: Any) -> tuple[int, ...]:
    return tuple(integer(item) for item in _items(value))


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _timeout_s(value: Any) -> float | None:
    seconds = number(value)
    if not seconds > 0:
        raise ValueError
    return None if math.isinf(seconds) else min(seconds, MAX_TIMEOUT_S)


def _header(value: Any) -> str:
    if not (isinstance(value, str) and _METADATA_VALUE.fullmatch(value)):
        raise TypeError
    return value


def _metadata(value: Any) -> dict[str, str | bytes]:
    if not isinstance(value, Mapping):
        raise TypeError
    for key, item in value.items():
        if not (isinstance(key, str) and _METADATA_KEY.fullmatch(key)):
            raise TypeError
        if key.endswith("-bin"):
            if not isinstance(item, bytes):
                raise TypeError
        else:
            _header(item)
    return dict(value)


class _Kind(NamedTuple):
    convert: Callable[[Any], Any]
    """Raises TypeError, ValueError or OverflowError for what the keyword cannot be."""
    wanted: str
    error: type[InvalidRequestError] = InvalidRequestError
    field: str = ""
    """The request's field, where it is called otherwise than the keyword."""
    private: bool = False
    """Errors get into logs: this one names the type of what was given, not the value."""


_INTEGER = _Kind(integer, "an integer", InvalidSamplingError)
_NUMBER = _Kind(number, "a number", InvalidSamplingError)
_STRING = _Kind(string, "a string of valid Unicode")

_KINDS: Mapping[str, _Kind] = {
    "prompt": _Kind(_prompt, "a string of valid Unicode or a list of messages or of token ids", InvalidPromptError, private=True),
    "text": _Kind(string, "a string of valid Unicode", InvalidPromptError, private=True),
    "messages": _Kind(_items, "a list of messages", InvalidChatError, private=True),
    "token_ids": _Kind(_items, "a list of integers", InvalidPromptError, private=True),
    "model": _STRING,
    "max_tokens": _Kind(integer, "an integer", InvalidMaxTokensError),
    "temperature": _NUMBER,
    "top_k": _INTEGER,
    "top_p": _NUMBER,
    "min_p": _NUMBER,
    "seed": _INTEGER,
    "repetition_penalty": _NUMBER,
    "presence_penalty": _NUMBER,
    "frequency_penalty": _NUMBER,
    "logit_bias": _Kind(_biases, "a mapping of token ids to numbers", InvalidSamplingError),
    "min_tokens": _INTEGER,
    "logprobs": _INTEGER,
    "stop": _Kind(_strings, "a string or a list of strings, of valid Unicode", InvalidStopError, "stop.strings"),
    "stop_token_ids": _Kind(_integers, "a list of integers", InvalidStopError, "stop.token_ids"),
    "ignore_eos": _Kind(_flag, "True or False"),
    "request_id": _STRING,
    "cache_salt": _STRING._replace(private=True),
    "timeout": _Kind(_timeout_s, "a number of seconds over 0"),
    "traceparent": _Kind(_header, "a string of printable ASCII"),
    "metadata": _Kind(_metadata, "a mapping of lower-case keys to printable ASCII (to bytes where a key ends in -bin)", private=True),
}
