"""`kvrelay.kv.v1.KvStoreService`: the store on gRPC. Converts, delegates, converts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from kvrelay import wire
from kvrelay.errors import InvalidRequestError
from kvrelay.handle import KvLayout
from kvrelay.kv.v1 import handle_pb2
from kvrelay.kv.v1 import kv_store_service_pb2 as pb
from kvrelay.kv.v1 import kv_store_service_pb2_grpc as pb_grpc
from kvrelay.kv.v1 import transfer_service_pb2 as transfer_pb
from services.kvstore.keeper import StoreKeeper
from services.relay.transfer import SegmentEvent
from services.relay.transports.grpc import read_event_to_proto, write_event_from_proto

SERVICE_NAME = "kvrelay.kv.v1.KvStoreService"

MAX_RENEWALS = 1024
"""Leases one call may renew."""


class KvStoreServicer(pb_grpc.KvStoreServiceServicer):
    """Thin: all decisions are the keeper's."""

    def __init__(self, keeper: StoreKeeper) -> None:
        self._keeper = keeper

    async def CreateKv(self, request: pb.CreateKvRequest, context: Any) -> pb.CreateKvResponse:
        handle, missing = self._keeper.create(
            wire.identity_from_proto(request.identity), _layout(request.layout), tuple(request.block_hashes)
        )
        return pb.CreateKvResponse(handle=wire.handle_to_proto(handle), missing_blocks=missing)

    async def WriteKv(self, request_iterator: AsyncIterator[pb.WriteKvRequest], context: Any) -> pb.WriteKvResponse:
        messages = aiter(request_iterator)
        start = await anext(messages, None)
        if start is None or not start.HasField("start"):
            raise InvalidRequestError("the first message of a write names its handle", field="start")

        async def events() -> AsyncGenerator[SegmentEvent, None]:
            async for message in messages:
                yield write_event_from_proto(message)

        async with aclosing(events()) as segments:
            blocks, size_bytes = await self._keeper.write(start.start.name, start.start.lease_id, segments)
        return pb.WriteKvResponse(blocks=blocks, size_bytes=size_bytes)

    async def CommitKv(self, request: pb.CommitKvRequest, context: Any) -> pb.CommitKvResponse:
        return pb.CommitKvResponse(blocks=self._keeper.commit(request.name, request.lease_id))

    async def LookupPrefix(self, request: pb.LookupPrefixRequest, context: Any) -> pb.LookupPrefixResponse:
        handle = self._keeper.lookup(wire.identity_from_proto(request.identity), _layout(request.layout), tuple(request.block_hashes))
        if handle is None:
            return pb.LookupPrefixResponse()
        return pb.LookupPrefixResponse(handle=wire.handle_to_proto(handle), blocks=handle.block_count)

    async def ReadKv(self, request: pb.ReadKvRequest, context: Any) -> AsyncGenerator[pb.ReadKvResponse, None]:
        async with aclosing(self._keeper.read(request.name, request.lease_id, request.incarnation, request.first_block)) as events:
            async for event in events:
                yield read_event_to_proto(event)

    async def RenewLeases(self, request: pb.KvStoreServiceRenewLeasesRequest, context: Any) -> pb.KvStoreServiceRenewLeasesResponse:
        if len(request.renewals) > MAX_RENEWALS:
            raise InvalidRequestError(f"{len(request.renewals)} renewals, at most {MAX_RENEWALS}", field="renewals")
        response = pb.KvStoreServiceRenewLeasesResponse()
        for renewal in request.renewals:
            ttl_s = self._keeper.renew(renewal.name, renewal.lease_id)
            ttl = None if ttl_s is None else wire.duration_to_proto(ttl_s)
            response.results.append(transfer_pb.LeaseRenewalResult(renewed=ttl_s is not None, ttl=ttl))
        return response

    async def ReleaseKv(self, request: pb.KvStoreServiceReleaseKvRequest, context: Any) -> pb.KvStoreServiceReleaseKvResponse:
        self._keeper.release(request.name, request.lease_id)
        return pb.KvStoreServiceReleaseKvResponse()

    async def GetStoreInfo(self, request: pb.GetStoreInfoRequest, context: Any) -> pb.GetStoreInfoResponse:
        store = self._keeper.store
        return pb.GetStoreInfoResponse(
            incarnation=self._keeper.incarnation,
            blocks=store.blocks,
            used_bytes=store.used_bytes,
            limit_bytes=store.limit_bytes,
            leases=store.leases,
            hits=store.hits,
            misses=store.misses,
            evicted=store.evicted,
            lease_ttl=wire.duration_to_proto(store.lease_ttl_s),
        )


def _layout(message: handle_pb2.KvLayout) -> KvLayout:
    """Raises `InvalidRequestError` for a layout whose blocks have no size."""
    layout = wire.layout_from_proto(message)
    try:
        size_bytes = layout.block_bytes
    except KeyError:
        raise InvalidRequestError(f"unknown dtype {layout.dtype!r}", field="layout.dtype") from None
    if size_bytes == 0:
        raise InvalidRequestError("a layout of empty blocks", field="layout")
    return layout
