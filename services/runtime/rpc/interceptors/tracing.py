"""The server's half of tracing: a SERVER span around each call, child of the caller's, current inside the handler.

Written by hand: `opentelemetry-instrumentation-grpc` (0.66b2) keeps cancellation of unary calls from the server, reports cancelled
calls as successes and uses attribute names of before the conventions' 1.38.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer

from services.runtime.rpc.interceptors.handlers import INFRASTRUCTURE, SERVES_OTHERS, AroundInterceptor, Context
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import current, extract

SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})
"""Codes that mark a SERVER span as failed; the others are the caller's doing."""

DEADLINE_SLACK_S = 0.05


class TraceServerInterceptor(AroundInterceptor):
    """Outermost of the server's interceptors, so that it sees the status that is sent."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    @asynccontextmanager
    async def around(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        if details.method.startswith(INFRASTRUCTURE):
            yield
            return
        headers = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        context_sent = extract(headers)
        if details.method.startswith(SERVES_OTHERS) and not trace.get_current_span(context_sent).get_span_context().is_valid:
            yield
            return
        method = details.method.lstrip("/")
        span = self._tracer.start_span(
            method,
            context=context_sent,
            kind=SpanKind.SERVER,
            attributes={names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: method},
        )
        code = "UNKNOWN"
        try:
            with current(span):
                yield
            code = _sent_code(context, "OK")
        except asyncio.CancelledError:
            # grpc cancels the handler both when the caller goes away and when its deadline passes; only the clock tells them apart, and
            # not exactly: the caller's deadline is nearer than ours by the time its request took to come here.
            left_s = context.time_remaining()
            code = "DEADLINE_EXCEEDED" if left_s is not None and left_s <= DEADLINE_SLACK_S else "CANCELLED"
            raise
        except Exception:
            code = _sent_code(context, "UNKNOWN")
            raise
        finally:
            finish(span, code, failed=code in SERVER_FAULTS)


def finish(span: Span, code: str, *, failed: bool, end_ns: int | None = None) -> None:
    """Puts a call's status on its span and ends it, now or at `end_ns`."""
    span.set_attribute(names.RPC_STATUS_CODE, code)
    if code != "OK":
        span.set_attribute(names.ERROR_TYPE, code)
    if failed:
        span.set_status(Status(StatusCode.ERROR))
    span.end(end_time=end_ns)


def _sent_code(context: Context, default: str) -> str:
    code = context.code()
    return code.name if isinstance(code, grpc.StatusCode) else default
