"""Errors to `google.rpc.Status` and back: how the error tree crosses a process boundary."""

from __future__ import annotations

import re

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from kvrelay.errors import (
    ERROR_DOMAIN,
    CancelledByClientError,
    DeadlineExceededError,
    InternalError,
    KvRelayError,
    RequestTooLargeError,
    UnavailableError,
    error_from_reason,
)

STATUS_DETAILS_KEY = "grpc-status-details-bin"

# Trailers share grpc's 8 KiB soft limit on metadata: a longer error would arrive as another error.
_MAX_MESSAGE_BYTES = 400
_MAX_FIELDS_BYTES = 2000
_CUT = "…".encode()

_CODE_NAMES = {
    "OK": 0, "CANCELLED": 1, "UNKNOWN": 2, "INVALID_ARGUMENT": 3, "DEADLINE_EXCEEDED": 4, "NOT_FOUND": 5, "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7, "RESOURCE_EXHAUSTED": 8, "FAILED_PRECONDITION": 9, "ABORTED": 10, "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12, "INTERNAL": 13, "UNAVAILABLE": 14, "DATA_LOSS": 15, "UNAUTHENTICATED": 16,
}  # fmt: skip


def _sendable(text: str, limit_bytes: int) -> str:
    """Text that protobuf and a trailer accept: no lone surrogates, not too long."""
    raw = text.encode("utf-8", "replace")
    if len(raw) > limit_bytes:
        raw = raw[: max(0, limit_bytes - len(_CUT))] + _CUT
    return raw.decode("utf-8", "ignore")


def error_to_status(error: KvRelayError) -> status_pb2.Status:
    """ErrorInfo with reason and fields, RetryInfo for `retry_after_s`, BadRequest for a named request field."""
    message = _sendable(error.message, _MAX_MESSAGE_BYTES)
    status = status_pb2.Status(code=_CODE_NAMES[error.code], message=message)
    info = error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)
    room = _MAX_FIELDS_BYTES
    for name, text in error.fields.items():
        value = _sendable(text, room - len(name.encode()))
        room -= len(name.encode()) + len(value.encode())
        if room < 0:
            break
        info.metadata[name] = value
    status.details.add().Pack(info)
    if error.retry_after_s is not None:
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=_duration(error.retry_after_s)))
    if "field" in error.fields:
        violation = error_details_pb2.BadRequest.FieldViolation(field=_sendable(error.fields["field"], 200), description=message)
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    return status


def error_from_status(code_name: str, details: str, status_bin: bytes | None) -> KvRelayError:
    """The error that was raised on the other side; without our details, the class its code stands for."""
    if status_bin:
        error = _error_from_details(status_bin)
        if error is not None:
            return error
    match code_name:
        case "DEADLINE_EXCEEDED":
            return DeadlineExceededError(details)
        case "CANCELLED":
            return CancelledByClientError(details)
        case "UNAVAILABLE":
            return UnavailableError(details)
        case "RESOURCE_EXHAUSTED":
            return _too_large(details)
        case _:
            return InternalError(f"{code_name}: {details}", code=code_name)


def error_from_rpc(error: grpc.aio.AioRpcError) -> KvRelayError:
    """`error_from_status` of a failed call, details taken from its trailers."""
    return error_from_status(error.code().name, error.details() or "", _details_of(error))


def names_kvrelay_reason(error: grpc.aio.AioRpcError) -> bool:
    """Whether a failed call carries one of our own errors, rather than one of the transport's."""
    status_bin = _details_of(error)
    return status_bin is not None and _error_from_details(status_bin) is not None


def _details_of(error: grpc.aio.AioRpcError) -> bytes | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_KEY and isinstance(value, bytes):
            return value
    return None


def _error_from_details(status_bin: bytes) -> KvRelayError | None:
    try:
        status = status_pb2.Status.FromString(status_bin)
    except DecodeError:
        return None
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s = None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if info.domain != ERROR_DOMAIN:
        return None
    return error_from_reason(info.reason, status.message, dict(info.metadata), retry_after_s=retry_after_s)


def _too_large(details: str) -> RequestTooLargeError:
    error = RequestTooLargeError(details)
    # grpc names both sizes in its text only: '... message larger than max (20 vs. 10)'.
    if found := re.search(r"\((\d+) vs\. (\d+)\)", details):
        error.fields = {"size_bytes": found[1], "limit_bytes": found[2]}
    return error


def _duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message
