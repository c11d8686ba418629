"""The router's way to workers, over real gRPC, with plain and with traced channels."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from kvrelay import errors, wire
from kvrelay.inference.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from kvrelay.status import STATUS_DETAILS_KEY
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Token, TransferStats, Usage, WorkerMarks
from services.runtime.ports import (
    DecodeAccepted,
    DecodeDone,
    DecodeToken,
    FirstToken,
    Job,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    WorkerInfo,
)
from services.runtime.rpc import adapters
from services.runtime.rpc.adapters import GrpcWorkers
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.wire import decode_event_to_proto, job_from_proto, prefill_event_to_proto
from services.runtime.telemetry.tracing import Telemetry
from tests.contract.test_contract_messages import HANDLE

JOB = Job("r-1", b"f" * 32, (1, 2, 3), SamplingParams(seed=7), StopConditions(max_tokens=4), "salt")
PREFILL = [PrefillAccepted(HANDLE), FirstToken(Token(0, 5, "a")), PrefillDone(None, Usage(3, 0, 1), WorkerMarks(1, 2, 3, 4))]
DECODE = [
    DecodeAccepted(16),
    KvReady(TransferStats(10, 1)),
    DecodeToken(Token(1, 6, "b")),
    DecodeDone(FinishReason.LENGTH, Usage(3, 0, 2), WorkerMarks(1), TransferStats(10, 1)),
]


class ScriptedWorker(
    prefill_service_pb2_grpc.PrefillServiceServicer,
    decode_service_pb2_grpc.DecodeServiceServicer,
    worker_service_pb2_grpc.WorkerServiceServicer,
):
    """Plays `events`, then does `ending`."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.ending: Callable[[grpc.aio.ServicerContext], Any] | None = None
        self.requests: list[Any] = []
        self.time_remaining: list[float] = []
        self.cancelled = asyncio.Event()
        self.files: list[tuple[str, bytes]] = []
        self.info = WorkerInfo("w-0", "decode", "", 1)
        self.stop: Callable[[], Any]

    async def _play(self, request, context, to_proto):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        self.time_remaining.append(context.time_remaining())
        try:
            for event in self.events:
                yield to_proto(event)
            if self.ending is not None:
                await self.ending(context)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Prefill(self, request, context):  # type: ignore[no-untyped-def]
        async with aclosing(self._play(request, context, prefill_event_to_proto)) as responses:
            async for response in responses:
                yield response

    async def Decode(self, request, context):  # type: ignore[no-untyped-def]
        async with aclosing(self._play(request, context, decode_event_to_proto)) as responses:
            async for response in responses:
                yield response

    async def GetTokenizer(self, request, context):  # type: ignore[no-untyped-def]
        self.requests.append(request)
        for name, data in self.files:
            yield worker_service_pb2.GetTokenizerResponse(file_name=name, data=data)


async def silence(context: grpc.aio.ServicerContext) -> None:
    await asyncio.Event().wait()


def failing(error: errors.KvRelayError) -> Callable[[grpc.aio.ServicerContext], Any]:
    async def ending(context: grpc.aio.ServicerContext) -> None:
        context.set_trailing_metadata(((STATUS_DETAILS_KEY, wire.error_to_status(error).SerializeToString()),))
        await context.abort(grpc.StatusCode[error.code], error.message)

    return ending


class PlainChannels:
    def __init__(self) -> None:
        self.channels: dict[str, grpc.aio.Channel] = {}

    def get(self, address: str) -> grpc.aio.Channel:
        if address not in self.channels:
            self.channels[address] = grpc.aio.insecure_channel(address)
        return self.channels[address]

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()


@asynccontextmanager
async def serving(worker: ScriptedWorker) -> AsyncIterator[ScriptedWorker]:
    server = grpc.aio.server()
    prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
    decode_service_pb2_grpc.add_DecodeServiceServicer_to_server(worker, server)
    worker_service_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server)
    worker.info = WorkerInfo("w-0", "decode", f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}", 1)
    worker.stop = lambda: server.stop(grace=0)
    await server.start()
    try:
        yield worker
    finally:
        await server.stop(grace=0)


@pytest.fixture
async def worker() -> AsyncIterator[ScriptedWorker]:
    async with serving(ScriptedWorker()) as running:
        yield running


@pytest.fixture(params=["plain", "traced"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[GrpcWorkers]:
    channels: Any = PlainChannels()
    telemetry = None
    if request.param == "traced":
        telemetry = Telemetry.start("test", "test-0")
        channels = ChannelPool(telemetry)
    yield GrpcWorkers(channels)
    await channels.close()
    if telemetry is not None:
        await telemetry.shutdown()


async def test_a_prefill_gives_its_events_and_sends_job_and_deadline(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.events = PREFILL
    assert [e async for e in workers.prefill(worker.info, JOB, timeout_s=9)] == PREFILL
    (request,) = worker.requests
    assert isinstance(request, prefill_service_pb2.PrefillRequest) and job_from_proto(request.job) == JOB
    assert worker.time_remaining[0] <= 9.5  # gRPC rounds up


@pytest.mark.parametrize("handle", [None, HANDLE], ids=["local", "split"])
async def test_a_decode_gives_its_events_and_sends_the_handle(worker: ScriptedWorker, workers: GrpcWorkers, handle: Any) -> None:
    worker.events = DECODE
    assert [e async for e in workers.decode(worker.info, JOB, handle, timeout_s=9)] == DECODE
    (request,) = worker.requests
    assert isinstance(request, decode_service_pb2.DecodeRequest) and request.HasField("handle") == (handle is not None)
    assert handle is None or wire.handle_from_proto(request.handle) == handle


async def test_closing_the_generator_cancels_on_the_worker(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.events, worker.ending = PREFILL[:1], silence
    async with aclosing(workers.prefill(worker.info, JOB, timeout_s=30)) as events:
        assert await anext(events) == PREFILL[0]
    await asyncio.wait_for(worker.cancelled.wait(), 10)


async def test_cancelling_the_task_cancels_on_the_worker(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.events, worker.ending = DECODE[:1], silence
    first = asyncio.Event()

    async def read() -> None:
        async for _ in workers.decode(worker.info, JOB, None, timeout_s=30):
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(worker.cancelled.wait(), 10)


@pytest.mark.parametrize(
    "error",
    [
        errors.DrainingError("going down"),
        errors.OverloadedError("full", retry_after_s=0.5),
        errors.FingerprintMismatchError("other", rope="a != b"),
        errors.KvTransferError("peer gone"),
        errors.CancelledByClientError("gone"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_named_error_arrives_as_itself(worker: ScriptedWorker, workers: GrpcWorkers, error: errors.KvRelayError) -> None:
    worker.ending = failing(error)
    with pytest.raises(errors.KvRelayError) as caught:
        [e async for e in workers.prefill(worker.info, JOB, timeout_s=9)]
    got = caught.value
    assert type(got) is type(error) and (got.message, got.fields, got.retry_after_s) == (error.message, error.fields, error.retry_after_s)


async def test_a_worker_that_is_not_there_is_lost(workers: GrpcWorkers) -> None:
    async with serving(ScriptedWorker()) as worker:
        info = worker.info
    for call in (workers.prefill(info, JOB, timeout_s=9), workers.decode(info, JOB, None, timeout_s=9)):
        with pytest.raises(errors.WorkerLostError) as caught:
            [e async for e in call]
        assert caught.value.fields == {"worker": "w-0"} and info.address in caught.value.message
    with pytest.raises(errors.WorkerLostError):
        await workers.tokenizer_files(info, "sha256:aa", timeout_s=9)


async def test_a_worker_that_goes_mid_stream_is_lost(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.events, worker.ending = DECODE[:1], silence
    async with aclosing(workers.decode(worker.info, JOB, None, timeout_s=30)) as events:
        await anext(events)
        stopping = asyncio.create_task(worker.stop())
        with pytest.raises(errors.WorkerLostError):
            await anext(events)
        await stopping


async def test_a_passed_deadline_is_typed(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.ending = silence
    with pytest.raises(errors.DeadlineExceededError):
        [e async for e in workers.prefill(worker.info, JOB, timeout_s=1.0)]
    await asyncio.wait_for(worker.cancelled.wait(), 10)


async def test_a_stream_that_ends_before_its_last_event_is_an_error(worker: ScriptedWorker, workers: GrpcWorkers) -> None:
    worker.events = PREFILL[:2]
    with pytest.raises(errors.InternalError, match="PrefillDone"):
        [e async for e in workers.prefill(worker.info, JOB, timeout_s=9)]


async def test_tokenizer_files_come_in_pieces(worker: ScriptedWorker, workers: GrpcWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    worker.files = [("tokenizer.json", b"ab"), ("tokenizer.json", b"cd"), ("chat_template.jinja", b"x"), ("tokenizer_config.json", b"")]
    files = await workers.tokenizer_files(worker.info, "sha256:aa", timeout_s=9)
    assert files == {"tokenizer.json": b"abcd", "chat_template.jinja": b"x", "tokenizer_config.json": b""}
    assert worker.requests[0].tokenizer_digest == "sha256:aa"
    monkeypatch.setattr(adapters, "MAX_TOKENIZER_BYTES", 4)
    with pytest.raises(errors.InternalError, match="tokenizer"):
        await workers.tokenizer_files(worker.info, "sha256:aa", timeout_s=9)
