"""`TransferPort` over `kvrelay.kv.v1.KvTransferService`: protobuf bytes, chunks of at most 1 MiB."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from kvrelay import wire
from kvrelay.errors import HandleError, KvRelayError, KvTransferError, UnavailableError
from kvrelay.handle import Location, PeerLocation
from kvrelay.kv.v1 import transfer_service_pb2 as pb
from kvrelay.kv.v1 import transfer_service_pb2_grpc as pb_grpc
from services.relay.transfer import PullEnd, PullEvent, PullRequest, SegmentChunk, SegmentStart
from services.runtime.adapters import Channels


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


class GrpcTransfer:
    """Pulls from any worker that its channels reach."""

    name = "grpc"

    def __init__(self, channels: Channels) -> None:
        self._channels = channels

    def reaches(self, location: Location) -> bool:
        return isinstance(location, PeerLocation)

    async def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]:
        call = self._stub(location).PullKv(pull_request_to_proto(request), timeout=timeout_s)
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
