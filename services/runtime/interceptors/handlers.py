"""Puts an async context manager around a servicer's method, whichever of the four kinds it is."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc

Context = Any
"""`grpc.aio.ServicerContext`; the stubs' generic parameters say nothing here."""
Handler = Any
Around = Callable[[Context], AbstractAsyncContextManager[None]]

INFRASTRUCTURE = ("/grpc.health.", "/grpc.reflection.", "/grpc.channelz.")
"""Methods that are neither traced nor given a deadline nor refused while draining: probes and their endless watches."""


class AroundInterceptor(grpc.aio.ServerInterceptor):
    """A server interceptor that is a context manager around the handler's whole run, cancellation and late errors included."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], handler_call_details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(handler_call_details)
        # None: no such method, grpc answers UNIMPLEMENTED.
        if handler is None:
            return None
        return wrap(handler, lambda context: self.around(handler_call_details, context))

    @abstractmethod
    def around(self, details: grpc.HandlerCallDetails, context: Context) -> AbstractAsyncContextManager[None]:
        """Entered in the call's own task before the handler runs; left however it ends."""


def wrap(handler: Handler, around: Around) -> Handler:
    """The same handler inside `around`.

    Streams are written by this wrapper rather than yielded through it: grpc would leave a cancelled generator to the garbage
    collector, whereas here the servicer's generator is closed, and its `finally` has run, before the call is over.
    """
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        behaviour = _write_generated(inner, around) if inspect.isasyncgenfunction(inner) else _run(inner, around)
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        behaviour = _run(inner, around)
    return make(behaviour, request_deserializer=handler.request_deserializer, response_serializer=handler.response_serializer)


def _run(inner: Any, around: Around) -> Any:
    assert inspect.iscoroutinefunction(inner), f"{inner!r} must be async: a blocking servicer would stop the loop"

    async def run(request: Any, context: Context) -> Any:
        async with around(context):
            return await inner(request, context)

    return run


def _write_generated(inner: Any, around: Around) -> Any:
    async def write(request: Any, context: Context) -> None:
        async with around(context), aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write
