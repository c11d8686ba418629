"""The router's ports put on gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

import grpc

from kvrelay import wire
from kvrelay.errors import InternalError, KvRelayError, WorkerLostError
from kvrelay.handle import KvHandle
from kvrelay.inference.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from services.runtime.ports import DecodeDone, DecodeEvent, Job, PrefillDone, PrefillEvent, WorkerInfo
from services.runtime.rpc.wire import decode_event_from_proto, job_to_proto, prefill_event_from_proto

MAX_TOKENIZER_BYTES = 256 << 20
"""A worker that sends more is not believed."""

Response = TypeVar("Response")
Event = TypeVar("Event")


class Channels(Protocol):
    """Kept channels by address."""

    def get(self, address: str) -> grpc.aio.Channel: ...


class GrpcWorkers:
    """`WorkersPort` over the workers' stubs."""

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    async def prefill(self, worker: WorkerInfo, job: Job, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        stub: Any = prefill_service_pb2_grpc.PrefillServiceStub(self._channels.get(worker.address))
        request = prefill_service_pb2.PrefillRequest(job=job_to_proto(job))
        call = stub.Prefill(request, timeout=timeout_s)
        async with aclosing(_events(call, worker, prefill_event_from_proto, PrefillDone)) as events:
            async for event in events:
                yield event

    async def decode(self, worker: WorkerInfo, job: Job, handle: KvHandle | None, *, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        stub: Any = decode_service_pb2_grpc.DecodeServiceStub(self._channels.get(worker.address))
        request = decode_service_pb2.DecodeRequest(job=job_to_proto(job), handle=None if handle is None else wire.handle_to_proto(handle))
        call = stub.Decode(request, timeout=timeout_s)
        async with aclosing(_events(call, worker, decode_event_from_proto, DecodeDone)) as events:
            async for event in events:
                yield event

    async def tokenizer_files(self, worker: WorkerInfo, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        stub: Any = worker_service_pb2_grpc.WorkerServiceStub(self._channels.get(worker.address))
        call = stub.GetTokenizer(worker_service_pb2.GetTokenizerRequest(tokenizer_digest=digest), timeout=timeout_s)
        pieces: dict[str, list[bytes]] = {}
        size_bytes = 0
        async with aclosing(_responses(call, worker)) as responses:
            async for response in responses:
                size_bytes += len(response.data)
                if size_bytes > MAX_TOKENIZER_BYTES:
                    raise InternalError(f"worker {worker.worker_id} sends a tokenizer of over {MAX_TOKENIZER_BYTES} bytes")
                pieces.setdefault(response.file_name, []).append(response.data)
        return {name: b"".join(parts) for name, parts in pieces.items()}


async def _events(
    call: AsyncIterator[Response], worker: WorkerInfo, from_proto: Callable[[Response], Event], last: type[object]
) -> AsyncGenerator[Event, None]:
    """The call's events; one that ends well has ended with `last`."""
    event: Event | None = None
    async with aclosing(_responses(call, worker)) as responses:
        async for response in responses:
            event = from_proto(response)
            yield event
    if not isinstance(event, last):
        raise InternalError(f"worker {worker.worker_id} ended a stream without {last.__name__}")


async def _responses(call: Any, worker: WorkerInfo) -> AsyncGenerator[Any, None]:
    """Reads a server stream; however it is left, the call is over when this generator is."""
    try:
        async for response in call:
            yield response
    except grpc.aio.AioRpcError as failure:
        raise _worker_error(failure, worker) from failure
    finally:
        call.cancel()


def _worker_error(failure: grpc.aio.AioRpcError, worker: WorkerInfo) -> KvRelayError:
    """CANCELLED counts as lost too: a cancel of ours never comes here, so the worker was stopped."""
    lost = failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    if lost and not wire.names_kvrelay_reason(failure):
        text = f"worker {worker.worker_id} at {worker.address} is lost: {failure.details()}"
        return WorkerLostError(text, worker=worker.worker_id)
    return wire.error_from_rpc(failure)
