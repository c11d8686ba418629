"""A scripted router on a real grpc.aio server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from kvrelay import wire
from kvrelay.errors import KvRelayError
from kvrelay.inference.v1 import router_service_pb2 as pb
from kvrelay.inference.v1 import router_service_pb2_grpc as pb_grpc
from kvrelay.status import STATUS_DETAILS_KEY
from kvrelay.values import Completion, FinishReason, Timings, Token, TransferStats, Usage

Script = Callable[[pb.GenerateRequest, grpc.aio.ServicerContext], AsyncIterator[pb.GenerateResponse]]


def started(prompt_tokens: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerateStarted(request_id="r-1", model="tiny", prompt_tokens=prompt_tokens, trace_id="0af7651916cd43dd8448eb211c80319c")
    )


def token(index: int, text: str | None = None) -> pb.GenerateResponse:
    text = f"w{index} " if text is None else text
    return pb.GenerateResponse(token=wire.token_to_proto(Token(index, 100 + index, text)))


def done(completion_tokens: int = 3, path: str = "split") -> pb.GenerateResponse:
    completion = Completion(
        finish_reason=FinishReason.LENGTH,
        usage=Usage(3, 0, completion_tokens),
        timings=Timings(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.028, 0.01),
        transfer=TransferStats(4096, 2, 0.001, 0.002, 2048, 0, "grpc") if path == "split" else None,
        path=path,
    )
    return pb.GenerateResponse(done=wire.completion_to_proto(completion, decision="long prompt"))


async def abort(context: grpc.aio.ServicerContext, error: KvRelayError) -> None:
    """What the services' error interceptor does."""
    status = wire.error_to_status(error)
    context.set_trailing_metadata(((STATUS_DETAILS_KEY, status.SerializeToString()),))
    await context.abort(grpc.StatusCode[error.code], error.message)


class ScriptedRouter(pb_grpc.RouterServiceServicer):
    """Answers with `script`; keeps what it was asked and whether the call was cancelled."""

    def __init__(self) -> None:
        self.script: Script = three_tokens
        self.requests: list[pb.GenerateRequest] = []
        self.metadata: list[dict[str, Any]] = []
        self.time_remaining: list[float] = []
        self.cancelled = asyncio.Event()
        self.fleet = pb.GetFleetResponse()
        self.model_pages: list[pb.ListModelsResponse] = [pb.ListModelsResponse()]
        self.silent = False
        self.asked = asyncio.Event()
        self.target = ""
        self.stop: Callable[[], Awaitable[None]]

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        self.time_remaining.append(context.time_remaining())
        try:
            async for response in self.script(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter where grpc was about to send
            self.cancelled.set()
            raise

    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        return self.model_pages[int(request.page_token or 0)]

    async def GetFleet(self, request, context):  # type: ignore[no-untyped-def]
        self.asked.set()
        if self.silent:
            await asyncio.Event().wait()
        return self.fleet


async def three_tokens(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
    yield started()
    for index in range(3):
        yield token(index)
    yield done()


async def one_token_then_silence(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
    yield started()
    yield token(0)
    await asyncio.Event().wait()


def failing(error: KvRelayError, *before: pb.GenerateResponse) -> Script:
    async def script(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        for response in before:
            yield response
        await abort(context, error)

    return script


def playing(*responses: pb.GenerateResponse) -> Script:
    async def script(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        for response in responses:
            yield response

    return script


@asynccontextmanager
async def serving(router: ScriptedRouter, options: Sequence[tuple[str, int]] = ()) -> AsyncIterator[ScriptedRouter]:
    server = grpc.aio.server(options=options)
    pb_grpc.add_RouterServiceServicer_to_server(router, server)
    router.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    router.stop = partial(server.stop, grace=0)
    await server.start()
    try:
        yield router
    finally:
        await router.stop()
