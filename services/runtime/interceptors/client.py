"""The client's half of tracing: a CLIENT span for each call, its context sent along, ended in every ending of the call.

A channel that wraps a channel, not `grpc.aio`'s client interceptors: those run each call in a task of their own, pass each message of a
stream through another generator, and lose the call's ending when the caller leaves early.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Tracer

from services.runtime import names
from services.runtime.interceptors.tracing import finish
from services.runtime.telemetry import inject


class TracedChannel(grpc.aio.Channel):
    """`inner` with a span around each call. Calls are grpc's own objects: cancel them when leaving a stream early."""

    def __init__(self, inner: grpc.aio.Channel, target: str, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer
        host, _, port = target.rpartition(":")
        self._peer: dict[str, str | int] = {names.SERVER_ADDRESS: host or target}
        if port.isdigit():
            self._peer[names.SERVER_PORT] = int(port)

    def unary_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make: Any = self._inner.unary_unary(method, None, response_deserializer, **options)
        return self._traced(method, lambda request, **call: make(request, **call), request_serializer or _as_it_is)

    def unary_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make: Any = self._inner.unary_stream(method, None, response_deserializer, **options)
        return self._traced(method, lambda request, **call: make(request, **call), request_serializer or _as_it_is)

    def stream_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make = self._inner.stream_unary(method, request_serializer, response_deserializer, **options)
        return self._traced(method, lambda requests, **call: make(requests, **call), _as_it_is)

    def stream_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make = self._inner.stream_stream(method, request_serializer, response_deserializer, **options)
        return self._traced(method, lambda requests, **call: make(requests, **call), _as_it_is)

    def _traced(self, method: str, make: Callable[..., Any], prepare: Callable[[Any], Any]) -> Callable[..., Any]:
        """`prepare` serialises a single request before the call exists: grpc would do it in a task whose failure no callback sees."""
        name = method.lstrip("/")
        attributes: Mapping[str, str | int] = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: name, **self._peer}

        def call(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
            headers = inject(trace.set_span_in_context(span))
            try:
                started = make(prepare(request), metadata=(*(metadata or ()), *headers.items()), **options)
            except BaseException as error:
                finish(span, type(error).__qualname__, failed=True)
                raise
            started.add_done_callback(lambda ended: _finish_call(span, ended))
            return started

        return call

    async def close(self, grace: float | None = None) -> None:
        await self._inner.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._inner.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._inner.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._inner.channel_ready()

    async def __aenter__(self) -> TracedChannel:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> bool | None:
        await self.close()
        return None


def _as_it_is(request: Any) -> Any:
    return request


def _finish_call(span: Span, call: Any) -> None:
    code = _code_of(call)
    finish(span, code, failed=code != "OK")


def _code_of(call: Any) -> str:
    """The status of an ended call. `code()` is a coroutine that has nothing left to wait for."""
    coroutine = call.code()
    try:
        coroutine.send(None)
    except StopIteration as ended:
        return ended.value.name if isinstance(ended.value, grpc.StatusCode) else "UNKNOWN"
    finally:
        coroutine.close()
    return "UNKNOWN"
