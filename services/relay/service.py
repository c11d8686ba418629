"""`kvrelay.kv.v1.KvTransferService`: the holder on gRPC."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvrelay import wire
from kvrelay.errors import InvalidRequestError
from kvrelay.kv.v1 import transfer_service_pb2 as pb
from kvrelay.kv.v1 import transfer_service_pb2_grpc as pb_grpc
from services.relay.holder import KvHolder
from services.relay.transports.grpc import pull_event_to_proto, pull_request_from_proto

SERVICE_NAME = "kvrelay.kv.v1.KvTransferService"

MAX_RENEWALS = 1024
"""Leases one call may renew."""


class KvTransferServicer(pb_grpc.KvTransferServiceServicer):
    """Converts, delegates, converts."""

    def __init__(self, holder: KvHolder) -> None:
        self._holder = holder

    async def PullKv(self, request: pb.PullKvRequest, context: Any) -> AsyncGenerator[pb.PullKvResponse, None]:
        async with aclosing(self._holder.pull(pull_request_from_proto(request))) as events:
            async for event in events:
                yield pull_event_to_proto(event)

    async def RenewLeases(self, request: pb.RenewLeasesRequest, context: Any) -> pb.RenewLeasesResponse:
        if len(request.renewals) > MAX_RENEWALS:
            raise InvalidRequestError(f"{len(request.renewals)} renewals, at most {MAX_RENEWALS}", field="renewals")
        response = pb.RenewLeasesResponse()
        for renewal in request.renewals:
            ttl_s = self._holder.renew(renewal.name, renewal.lease_id)
            response.results.append(
                pb.LeaseRenewalResult(renewed=ttl_s is not None, ttl=None if ttl_s is None else wire.duration_to_proto(ttl_s))
            )
        return response

    async def ReleaseKv(self, request: pb.ReleaseKvRequest, context: Any) -> pb.ReleaseKvResponse:
        self._holder.release(request.name, request.lease_id)
        return pb.ReleaseKvResponse()
