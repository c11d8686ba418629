"""Puts an async context manager around a servicer's method, whichever of the four kinds it is."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import grpc

from kvrelay.errors import InvalidRequestError

Context = Any
"""`grpc.aio.ServicerContext`; the stubs' generic parameters say nothing here."""
Handler = Any
Around = Callable[[Context], AbstractAsyncContextManager[None]]
Convert = Callable[[Any], Any]

INFRASTRUCTURE = ("/grpc.health.", "/grpc.reflection.", "/grpc.channelz.")
SERVES_OTHERS = (
    "/kvrelay.kv.v1.",
    "/kvrelay.inference.v1.WorkerService/",
    "/kvrelay.inference.v1.RouterService/ListModels",
    "/kvrelay.inference.v1.RouterService/GetFleet",
)
"""Calls that are made for a request or by nobody's wish: they are part of a trace, or of none, and begin no trace of their own."""
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
    """The same handler inside `around`, with messages parsed and serialised inside it too where that can be: outside, grpc would answer
    a malformed message with UNKNOWN and the exception's text.

    Streams are written by this wrapper rather than yielded through it: grpc would leave a cancelled generator to the garbage
    collector, whereas here the servicer's generator is closed, and its `finally` has run, before the call is over.
    """
    parse, serialise = handler.request_deserializer, handler.response_serializer
    # A streaming request may be read through the context, which needs grpc's own parser.
    parse_here = None if handler.request_streaming else parse
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream
        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        if inspect.isasyncgenfunction(inner):
            behaviour = _write_generated(inner, around, parse_here, serialise)
        else:
            # It writes through the context, which needs grpc's own serialiser.
            return make(_run(inner, around, parse_here, None), parse if parse_here is None else None, serialise)
    else:
        inner = handler.stream_unary if handler.request_streaming else handler.unary_unary
        make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
        behaviour = _run(inner, around, parse_here, serialise)
    return make(behaviour, parse if parse_here is None else None, None)


def _run(inner: Any, around: Around, parse: Convert | None, serialise: Convert | None) -> Any:
    assert inspect.iscoroutinefunction(inner), f"{inner!r} must be async: a blocking servicer would stop the loop"

    async def run(request: Any, context: Context) -> Any:
        async with around(context):
            response = await inner(_parsed(request, parse), context)
            return response if serialise is None else serialise(response)

    return run


def _write_generated(inner: Any, around: Around, parse: Convert | None, serialise: Convert | None) -> Any:
    async def write(request: Any, context: Context) -> None:
        async with around(context), aclosing(inner(_parsed(request, parse), context)) as responses:
            async for response in responses:
                await context.write(response if serialise is None else serialise(response))

    return write


def _parsed(request: Any, parse: Convert | None) -> Any:
    if parse is None:
        return request
    try:
        return parse(request)
    except Exception as error:
        raise InvalidRequestError("the request is not a message of this method's type") from error
