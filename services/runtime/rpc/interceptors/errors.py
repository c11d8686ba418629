"""Turns exceptions into statuses, the only place that does."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from urllib.parse import quote

import grpc
from google.rpc import status_pb2

from kvrelay import wire
from kvrelay.errors import InternalError, KvRelayError
from services.runtime.rpc.interceptors.handlers import AroundInterceptor, Context
from services.runtime.telemetry.tracing import current_trace_id

log = logging.getLogger(__name__)

STATUS_DETAILS_KEY = "grpc-status-details-bin"
_MAX_TRAILER_BYTES = 6_000
"""grpc gives up on trailers over 8 KiB, and the caller would get another error than the one that was raised."""


class ErrorInterceptor(AroundInterceptor):
    """`KvRelayError` becomes its status with details; anything else INTERNAL, its text kept in the log under the trace id.

    A handler that aborted by itself, and a cancelled one, pass untouched.
    """

    @asynccontextmanager
    async def around(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        try:
            yield
        except grpc.aio.AbortError:
            raise
        except Exception as raised:
            # `done` after an abort of the handler's own that it then replaced by another error: a second abort would be a usage error.
            if context.done():
                log.error("error after the call of %s was over", details.method, exc_info=raised)
                raise
            error = typed_error(raised)
            if error is None:
                log.error("unexpected error in %s", details.method, exc_info=raised)
                error = InternalError(f"internal error, see the log of the service under trace {current_trace_id()}")
            await abort(context, error)


def typed_error(raised: BaseException) -> KvRelayError | None:
    """The error to report: itself, or the first typed one of a task group's; None for a bug."""
    return next((leaf for leaf in _leaves(raised) if isinstance(leaf, KvRelayError)), None)


async def abort(context: Context, error: KvRelayError) -> None:
    """Ends the call with the error's status; raises `grpc.aio.AbortError`, as grpc's own abort does.

    Where the call is over already (its deadline passed in this very moment), there is nobody to tell: raises `CancelledError`.
    """
    status = wire.error_to_status(error)
    if _trailer_bytes(status) > _MAX_TRAILER_BYTES:
        status = wire.error_to_status(type(error)(error.message[:100], retry_after_s=error.retry_after_s))
    try:
        await context.abort(grpc.StatusCode[error.code], status.message, ((STATUS_DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as over:
        raise asyncio.CancelledError from over


def _trailer_bytes(status: status_pb2.Status) -> int:
    # The message travels percent-encoded, the details in base64.
    return len(quote(status.message)) + len(status.SerializeToString()) * 4 // 3


def _leaves(raised: BaseException) -> Iterator[BaseException]:
    if isinstance(raised, BaseExceptionGroup):
        for part in raised.exceptions:
            yield from _leaves(part)
    else:
        yield raised
