"""Every error kvrelay raises on purpose, in one tree.

    KvRelayError
    ├── InvalidRequestError          the caller must change the request
    │   ├── PromptTooLongError, UnknownModelError
    ├── UnavailableError             try again, elsewhere or later
    │   ├── OverloadedError, NoWorkerError, DrainingError, WorkerLostError
    ├── DeadlineExceededError, CancelledByClientError
    ├── HandleError                  a KV handle was refused; never answered with other KV
    │   ├── KvNotFoundError, LeaseExpiredError, HandleConsumedError, HandleForgedError,
    │   │   StaleIncarnationError, PromptMismatchError, FingerprintMismatchError, LayoutMismatchError,
    │   │   ChecksumMismatchError, KvAbortedError
    ├── KvTransferError              the bytes could not be moved
    ├── TokenizerNotFoundError       a worker has another tokenizer
    ├── ModelLoadError               a model folder cannot be served
    ├── ConfigError                  a setting is wrong
    └── InternalError                a bug; the text stays on the server

Each class names its wire `reason` (google.rpc.ErrorInfo) and its gRPC status code by name; `fields` travel as the
ErrorInfo metadata. `error_from_reason` rebuilds the class on the other side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

ERROR_DOMAIN = "kvrelay"
"""The `domain` of every ErrorInfo this suite sends."""


class KvRelayError(Exception):
    """Root of the tree: a message for people, a reason and fields for programs."""

    reason: ClassVar[str] = "INTERNAL"
    """Wire name, UPPER_SNAKE_CASE."""
    code: ClassVar[str] = "INTERNAL"
    """gRPC status code by name."""
    retryable: ClassVar[bool] = False
    """Whether the same request may succeed on another worker or later."""

    def __init__(self, message: str, /, *, retry_after_s: float | None = None, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = retry_after_s
        self.fields: Mapping[str, str] = {name: str(value) for name, value in fields.items()}


class InvalidRequestError(KvRelayError):
    """The request breaks a rule; `fields["field"]` names the request field."""

    reason = "INVALID_REQUEST"
    code = "INVALID_ARGUMENT"


class EmptyPromptError(InvalidRequestError):
    """The prompt holds no token."""

    reason = "EMPTY_PROMPT"


class PromptTooLongError(InvalidRequestError):
    """Prompt plus one token does not fit the model's context; fields `prompt_tokens`, `limit_tokens`."""

    reason = "PROMPT_TOO_LONG"


class InvalidMaxTokensError(InvalidRequestError):
    """max_tokens is below 1, or prompt plus max_tokens is over the context; fields `max_tokens`, `limit_tokens`."""

    reason = "INVALID_MAX_TOKENS"


class InvalidSamplingError(InvalidRequestError):
    """A sampling parameter is out of range or not a number."""

    reason = "INVALID_SAMPLING"


class InvalidPromptError(InvalidRequestError):
    """Not exactly one of text, chat messages and token ids was given."""

    reason = "INVALID_PROMPT"


class InvalidTokenIdError(InvalidRequestError):
    """A token id lies outside the vocabulary; fields `token_id`, `vocab_size`."""

    reason = "INVALID_TOKEN_ID"


class InvalidStopError(InvalidRequestError):
    """The stop list is too long, or holds an empty or over-long string."""

    reason = "INVALID_STOP"


class InvalidChatError(InvalidRequestError):
    """A conversation is empty, a role is no name, or the model's chat template refuses it; then in the template's words."""

    reason = "INVALID_CHAT"


class RequestTooLargeError(InvalidRequestError):
    """The serialised request is over the message cap; fields `size_bytes`, `limit_bytes`."""

    reason = "REQUEST_TOO_LARGE"
    code = "RESOURCE_EXHAUSTED"


class UnknownModelError(InvalidRequestError):
    """No worker serves a model of that name; field `model`."""

    reason = "UNKNOWN_MODEL"
    code = "NOT_FOUND"


class TokenizerNotFoundError(KvRelayError):
    """A worker was asked for a tokenizer that is not its own; fields `wanted`, `served`."""

    reason = "TOKENIZER_NOT_FOUND"
    code = "NOT_FOUND"


class UnavailableError(KvRelayError):
    """The service cannot take the request now."""

    reason = "UNAVAILABLE"
    code = "UNAVAILABLE"
    retryable = True


class OverloadedError(UnavailableError):
    """A bounded queue is full; `retry_after_s` is the hint."""

    reason = "OVERLOADED"
    code = "RESOURCE_EXHAUSTED"


class NoWorkerError(UnavailableError):
    """No worker of a needed role is ready; field `role`."""

    reason = "NO_WORKER"


class DrainingError(UnavailableError):
    """The service is shutting down and takes nothing new."""

    reason = "DRAINING"


class WorkerLostError(UnavailableError):
    """A worker died or became unreachable while it held the request; field `worker`."""

    reason = "WORKER_LOST"


class DeadlineExceededError(KvRelayError):
    """The request's deadline passed."""

    reason = "DEADLINE_EXCEEDED"
    code = "DEADLINE_EXCEEDED"


class CancelledByClientError(KvRelayError):
    """The client went away."""

    reason = "CANCELLED"
    code = "CANCELLED"


class HandleError(KvRelayError):
    """A KV handle was refused; field `handle`."""

    reason = "HANDLE_REFUSED"
    code = "FAILED_PRECONDITION"


class KvNotFoundError(HandleError):
    """No handle of that name was ever given out by this life of the holder."""

    reason = "KV_NOT_FOUND"
    code = "NOT_FOUND"


class LeaseExpiredError(HandleError):
    """The lease ran out before the KV was taken."""

    reason = "LEASE_EXPIRED"
    code = "NOT_FOUND"


class HandleConsumedError(HandleError):
    """The handle was already pulled once: handles are single-use."""

    reason = "HANDLE_CONSUMED"


class HandleForgedError(HandleError):
    """The name is known but the lease secret or the content binding is not the one given out."""

    reason = "HANDLE_FORGED"
    code = "PERMISSION_DENIED"


class StaleIncarnationError(HandleError):
    """The handle was made in another life of the holder; fields `handle_incarnation`, `holder_incarnation`."""

    reason = "STALE_INCARNATION"
    code = "ABORTED"
    retryable = True


class PromptMismatchError(HandleError):
    """The handle holds the KV of another prompt than the taker's."""

    reason = "PROMPT_MISMATCH"


class FingerprintMismatchError(HandleError):
    """Holder and taker run different models, or compute differently; fields name what differs, with both values."""

    reason = "FINGERPRINT_MISMATCH"


class LayoutMismatchError(HandleError):
    """Holder and taker arrange KV differently; fields name what differs, with both values."""

    reason = "LAYOUT_MISMATCH"


class ChecksumMismatchError(HandleError):
    """Bytes arrived that are not the bytes that were sent; fields `segment`, `expected`, `actual`."""

    reason = "CHECKSUM_MISMATCH"
    code = "DATA_LOSS"
    retryable = True


class KvAbortedError(HandleError):
    """The producer gave up before the KV was complete."""

    reason = "KV_ABORTED"
    code = "ABORTED"
    retryable = True


class KvTransferError(KvRelayError):
    """The transfer broke off: peer gone, stream cut short, or too slow."""

    reason = "KV_TRANSFER_FAILED"
    code = "UNAVAILABLE"
    retryable = True


class ModelLoadError(KvRelayError):
    """A model folder is missing, incomplete or of an unsupported kind."""

    reason = "MODEL_LOAD_FAILED"
    code = "FAILED_PRECONDITION"


class ConfigError(KvRelayError):
    """A setting has no such value; the message names the setting, its unit and its range."""

    reason = "INVALID_CONFIG"
    code = "INVALID_ARGUMENT"


class InternalError(KvRelayError):
    """A bug on the server; the text is in its log under the trace id."""


def _tree(root: type[KvRelayError]) -> Iterator[type[KvRelayError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


def error_from_reason(
    reason: str, message: str, fields: Mapping[str, str] | None = None, *, retry_after_s: float | None = None
) -> KvRelayError:
    """The error that `reason` names, rebuilt; an unknown reason becomes `InternalError` with a `reason` field."""
    for cls in _tree(KvRelayError):
        if cls is not KvRelayError and cls.reason == reason:
            break
    else:
        cls, fields = InternalError, {**(fields or {}), "reason": reason}
    error = cls(message, retry_after_s=retry_after_s)
    error.fields = dict(fields or {})
    return error
