"""The client's half of tracing: a CLIENT span for each call, its context sent along, ended in every ending of the call.

A channel that wraps a channel, not `grpc.aio`'s client interceptors: those run each call in a task of their own, pass each message of a
stream through another generator, and lose the call's ending when the caller leaves early.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.trace import SpanKind, Tracer

from services.runtime.addresses import split_address
from services.runtime.rpc.interceptors.handlers import SERVES_OTHERS
from services.runtime.rpc.interceptors.tracing import finish
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import inject

_CODES = {code.value[0]: code.name for code in grpc.StatusCode}
_UNSENT_DETAILS = "Internal error from Core"
"""grpc.aio's first word on a call whose server answered before it had taken all requests; the server's status replaces it."""
_SETTLE_S = 0.1


class TracedChannel(grpc.aio.Channel):
    """`inner` with a span around each call. Cancel a call that is not read to its end; iterating and leaving the loop does so too."""

    def __init__(self, inner: grpc.aio.Channel, target: str, tracer: Tracer) -> None:
        self._inner = inner
        self._tracer = tracer
        host, port = split_address(target)
        self._peer: dict[str, str | int] = {names.SERVER_ADDRESS: host, names.SERVER_PORT: port}

    def unary_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make: Any = self._inner.unary_unary(method, None, response_deserializer, **options)
        return self._traced(method, lambda request, **call: make(request, **call), request_serializer or _as_it_is, streams=False)

    def unary_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make: Any = self._inner.unary_stream(method, None, response_deserializer, **options)
        return self._traced(method, lambda request, **call: make(request, **call), request_serializer or _as_it_is, streams=True)

    def stream_unary(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make = self._inner.stream_unary(method, request_serializer, response_deserializer, **options)
        return self._traced(method, lambda requests, **call: make(requests, **call), _as_it_is, streams=False)

    def stream_stream(self, method: str, request_serializer: Any = None, response_deserializer: Any = None, **options: Any) -> Any:
        make = self._inner.stream_stream(method, request_serializer, response_deserializer, **options)
        return self._traced(method, lambda requests, **call: make(requests, **call), _as_it_is, streams=True)

    def _traced(self, method: str, make: Callable[..., Any], prepare: Callable[[Any], Any], *, streams: bool) -> Callable[..., Any]:
        """`prepare` serialises a single request before the call exists: grpc would do it in a task whose failure no callback sees."""
        name = method.lstrip("/")
        attributes: Mapping[str, str | int] = {names.RPC_SYSTEM_NAME: "grpc", names.RPC_METHOD: name, **self._peer}

        def call(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            # The name under which grpc's own stream methods take it.
            request = options.pop("request_iterator", request)
            if method.startswith(SERVES_OTHERS) and not trace.get_current_span().get_span_context().is_valid:
                started = make(prepare(request), metadata=metadata, **options)
                return _Stream(started) if streams else started
            span = self._tracer.start_span(name, kind=SpanKind.CLIENT, attributes=attributes)
            headers = inject(trace.set_span_in_context(span))
            try:
                started = make(prepare(request), metadata=(*(metadata or ()), *headers.items()), **options)
            except BaseException as error:
                finish(span, type(error).__qualname__, failed=True)
                raise
            _when_done(started, lambda code, ended_ns: finish(span, code, failed=code != "OK", end_ns=ended_ns))
            return _Stream(started) if streams else started

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


class _Stream:
    """A call with a stream of responses that ends when its iteration is given up.

    grpc's own keeps itself alive, and the server at work, when the caller breaks out of the loop and forgets it. Iterating again goes on
    where the last loop stopped, as with grpc's, for as long as the call is kept.
    """

    __slots__ = ("_call", "_messages")

    def __init__(self, call: Any) -> None:
        self._call = call
        self._messages: AsyncGenerator[Any, None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __aiter__(self) -> AsyncGenerator[Any, None]:
        if self._messages is None:
            self._messages = _messages(self._call)
        return self._messages


async def _messages(call: Any) -> AsyncGenerator[Any, None]:
    try:
        async for message in call:
            yield message
    finally:
        call.cancel()


def _when_done(call: Any, callback: Callable[[str, int], None]) -> None:
    """Calls back with the status and the time in nanoseconds, once the call is over.

    The public `add_done_callback` makes the pending call refer to itself: one that its caller dropped would never be collected, so never
    cancelled. The core call beneath it lives and ends by itself.
    """
    core = call._cython_call

    def done() -> None:
        ended_ns = time.time_ns()
        code, details = _ended(core.status())
        if details == _UNSENT_DETAILS:
            asyncio.get_running_loop().call_later(_SETTLE_S, lambda: callback(_ended(core.status())[0], ended_ns))
        else:
            callback(code, ended_ns)

    core.add_done_callback(done)


def _ended(reading: Coroutine[Any, Any, Any]) -> tuple[str, str]:
    """Code and details of an ended call, from a coroutine that has nothing left to wait for."""
    try:
        reading.send(None)
    except StopIteration as ended:
        return _CODES.get(ended.value.code(), "UNKNOWN"), ended.value.details() or ""
    finally:
        reading.close()
    return "UNKNOWN", ""
