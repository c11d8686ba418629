"""`TransferPort` and `StorePort` over gRPC (`kvrelay.kv.v1`): protobuf bytes, chunks of at most 1 MiB."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

import grpc

from kvrelay import wire
from kvrelay.errors import HandleError, KvRelayError, KvTransferError, UnavailableError
from kvrelay.handle import KvHandle, KvLayout, Location, ModelIdentity, PeerLocation
from kvrelay.kv.v1 import kv_store_service_pb2 as store_pb
from kvrelay.kv.v1 import kv_store_service_pb2_grpc as store_pb_grpc
from kvrelay.kv.v1 import transfer_service_pb2 as pb
from kvrelay.kv.v1 import transfer_service_pb2_grpc as pb_grpc
from services.relay.transfer import (
    PullEnd,
    PullEvent,
    PullRequest,
    ReadEnd,
    ReadEvent,
    SegmentChunk,
    SegmentEvent,
    SegmentStart,
    StoreWrite,
)
from services.runtime.rpc.adapters import Channels


def pull_request_to_proto(value: PullRequest) -> pb.PullKvRequest:
    return pb.PullKvRequest(
        name=value.name,
        lease_id=value.lease_id,
        incarnation=value.incarnation,
        identity=wire.identity_to_proto(value.identity),
        layout=wire.layout_to_proto(value.layout),
        prompt_digest=value.prompt_digest,
        first_block=value.first_block,
    )


def pull_request_from_proto(message: pb.PullKvRequest) -> PullRequest:
    """Raises `FingerprintMismatchError` for an identity whose fingerprint isn't that of its fields."""
    return PullRequest(
        name=message.name,
        lease_id=message.lease_id,
        incarnation=message.incarnation,
        identity=wire.identity_from_proto(message.identity),
        layout=wire.layout_from_proto(message.layout),
        prompt_digest=message.prompt_digest,
        first_block=message.first_block,
    )


def start_to_proto(value: SegmentStart) -> pb.SegmentHeader:
    return pb.SegmentHeader(segment=wire.segment_to_proto(value.segment), wait=wire.duration_to_proto(value.wait_s), early=value.early)


def start_from_proto(message: pb.SegmentHeader) -> SegmentStart:
    return SegmentStart(wire.segment_from_proto(message.segment), wire.duration_from_proto(message.wait), message.early)


def chunk_to_proto(value: SegmentChunk) -> pb.KvChunk:
    return pb.KvChunk(offset=value.offset, data=value.data)


def chunk_from_proto(message: pb.KvChunk) -> SegmentChunk:
    return SegmentChunk(message.offset, message.data)


def pull_event_to_proto(value: PullEvent) -> pb.PullKvResponse:
    match value:
        case SegmentStart():
            return pb.PullKvResponse(segment=start_to_proto(value))
        case SegmentChunk():
            return pb.PullKvResponse(chunk=chunk_to_proto(value))
        case PullEnd():
            end = pb.KvEnd(first_token_id=value.first_token_id, finished=value.finished, prefill_end_unix_nanos=value.prefill_end_ns)
            return pb.PullKvResponse(end=end)


def pull_event_from_proto(message: pb.PullKvResponse) -> PullEvent:
    """Raises `KvTransferError` for an event of no known kind."""
    match message.WhichOneof("event"):
        case "segment":
            return start_from_proto(message.segment)
        case "chunk":
            return chunk_from_proto(message.chunk)
        case "end":
            return PullEnd(message.end.first_token_id, message.end.finished, message.end.prefill_end_unix_nanos)
        case _:
            raise KvTransferError("the holder sent an event of no known kind")


def transfer_error(error: grpc.aio.AioRpcError) -> KvRelayError:
    """A refusal as the holder raised it; everything else that breaks a call is a `KvTransferError`."""
    typed = wire.error_from_rpc(error)
    if isinstance(typed, HandleError | KvTransferError) or (isinstance(typed, UnavailableError) and type(typed) is not UnavailableError):
        return typed
    return KvTransferError(f"{error.code().name}: {typed.message}", cause=typed.reason)


def grpc_timeout(timeout_s: float) -> float | None:
    """grpc has no infinite timeout."""
    return None if math.isinf(timeout_s) else timeout_s


class GrpcTransfer:
    """Pulls from any worker that its channels reach."""

    name = "grpc"

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def reaches(self, location: Location) -> bool:
        return isinstance(location, PeerLocation) and bool(location.address)

    async def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]:
        call = self._stub(location).PullKv(pull_request_to_proto(request), timeout=grpc_timeout(timeout_s))
        try:
            async for message in call:
                yield pull_event_from_proto(message)
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error
        finally:
            call.cancel()

    async def renew(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> bool:
        request = pb.RenewLeasesRequest(renewals=[pb.LeaseRenewal(name=name, lease_id=lease_id)])
        try:
            response = await self._stub(location).RenewLeases(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error
        return len(response.results) == 1 and bool(response.results[0].renewed)

    async def release(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> None:
        try:
            await self._stub(location).ReleaseKv(pb.ReleaseKvRequest(name=name, lease_id=lease_id), timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error

    def _stub(self, location: Location) -> Any:
        return pb_grpc.KvTransferServiceStub(self._channels.get(location.address))


# --- block store ----------------------------------------------------------------------------------------------------


def write_event_to_proto(value: SegmentEvent) -> store_pb.WriteKvRequest:
    if isinstance(value, SegmentStart):
        return store_pb.WriteKvRequest(segment=wire.segment_to_proto(value.segment))
    return store_pb.WriteKvRequest(chunk=chunk_to_proto(value))


def write_event_from_proto(message: store_pb.WriteKvRequest) -> SegmentEvent:
    """Raises `KvTransferError` for a message that is neither a segment nor a chunk."""
    match message.WhichOneof("event"):
        case "segment":
            return SegmentStart(wire.segment_from_proto(message.segment))
        case "chunk":
            return chunk_from_proto(message.chunk)
        case _:
            raise KvTransferError("neither a segment nor a chunk")


def read_event_to_proto(value: ReadEvent) -> store_pb.ReadKvResponse:
    match value:
        case SegmentStart():
            return store_pb.ReadKvResponse(segment=start_to_proto(value))
        case ReadEnd():
            return store_pb.ReadKvResponse(end=store_pb.ReadKvEnd(blocks=value.blocks))
        case _:
            return store_pb.ReadKvResponse(chunk=chunk_to_proto(value))


def read_event_from_proto(message: store_pb.ReadKvResponse) -> ReadEvent:
    """Raises `KvTransferError` for an event of no known kind."""
    match message.WhichOneof("event"):
        case "segment":
            return start_from_proto(message.segment)
        case "chunk":
            return chunk_from_proto(message.chunk)
        case "end":
            return ReadEnd(message.end.blocks)
        case _:
            raise KvTransferError("the store sent an event of no known kind")


class GrpcStore:
    """One store, by its address."""

    def __init__(self, channels: Channels, address: str) -> None:
        self._channels = channels
        self._address = address

    async def lookup(
        self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float
    ) -> KvHandle | None:
        request = store_pb.LookupPrefixRequest(
            identity=wire.identity_to_proto(identity), layout=wire.layout_to_proto(layout), block_hashes=block_hashes
        )
        response = await self._call("LookupPrefix", request, timeout_s)
        return wire.handle_from_proto(response.handle) if response.HasField("handle") else None

    async def read(self, handle: KvHandle, first_block: int, *, timeout_s: float) -> AsyncGenerator[ReadEvent, None]:
        request = store_pb.ReadKvRequest(
            name=handle.name, lease_id=handle.lease.lease_id, incarnation=handle.incarnation, first_block=first_block
        )
        call = self._stub().ReadKv(request, timeout=grpc_timeout(timeout_s))
        try:
            async for message in call:
                yield read_event_from_proto(message)
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error
        finally:
            call.cancel()

    async def create(self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float) -> StoreWrite:
        request = store_pb.CreateKvRequest(
            identity=wire.identity_to_proto(identity), layout=wire.layout_to_proto(layout), block_hashes=block_hashes
        )
        response = await self._call("CreateKv", request, timeout_s)
        return StoreWrite(response.handle.name, response.handle.lease.lease_id, tuple(response.missing_blocks))

    async def write(self, write: StoreWrite, segments: AsyncIterator[SegmentEvent], *, timeout_s: float) -> int:
        # Written one by one: grpc would iterate a request generator in a task of its own, which may outlive the call.
        call = self._stub().WriteKv(timeout=grpc_timeout(timeout_s))
        try:
            # A call that is over already takes nothing more; awaiting it says why.
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(store_pb.WriteKvRequest(start=store_pb.WriteKvStart(name=write.name, lease_id=write.lease_id)))
                async for event in segments:
                    await call.write(write_event_to_proto(event))
                await call.done_writing()
            return int((await call).blocks)
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error
        finally:
            call.cancel()

    async def commit(self, write: StoreWrite, *, timeout_s: float) -> int:
        response = await self._call("CommitKv", store_pb.CommitKvRequest(name=write.name, lease_id=write.lease_id), timeout_s)
        return int(response.blocks)

    async def release(self, name: str, lease_id: str, *, timeout_s: float) -> None:
        await self._call("ReleaseKv", store_pb.KvStoreServiceReleaseKvRequest(name=name, lease_id=lease_id), timeout_s)

    async def _call(self, method: str, request: Any, timeout_s: float) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=grpc_timeout(timeout_s))
        except grpc.aio.AioRpcError as error:
            raise transfer_error(error) from error

    def _stub(self) -> Any:
        return store_pb_grpc.KvStoreServiceStub(self._channels.get(self._address))
