"""DecodeService on gRPC: converts, delegates, converts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvrelay import wire
from kvrelay.inference.v1 import decode_service_pb2, decode_service_pb2_grpc
from services.decode.decoder import Decoder
from services.runtime.rpc.wire import decode_event_to_proto, job_from_proto


class DecodeServicer(decode_service_pb2_grpc.DecodeServiceServicer):
    """Thin: all decisions are the decoder's."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    async def Decode(
        self, request: decode_service_pb2.DecodeRequest, context: Any
    ) -> AsyncGenerator[decode_service_pb2.DecodeResponse, None]:
        handle = wire.handle_from_proto(request.handle) if request.HasField("handle") else None
        async with aclosing(self._decoder.decode(job_from_proto(request.job), handle)) as events:
            async for event in events:
                yield decode_event_to_proto(event)
