"""PrefillService on gRPC: converts, delegates, converts."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from kvrelay.inference.v1 import prefill_service_pb2, prefill_service_pb2_grpc
from services.prefill.prefiller import Prefiller
from services.runtime.rpc.wire import job_from_proto, prefill_event_to_proto


class PrefillServicer(prefill_service_pb2_grpc.PrefillServiceServicer):
    """Thin: all decisions are the prefiller's."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller

    async def Prefill(
        self, request: prefill_service_pb2.PrefillRequest, context: Any
    ) -> AsyncGenerator[prefill_service_pb2.PrefillResponse, None]:
        async with aclosing(self._prefiller.prefill(job_from_proto(request.job))) as events:
            async for event in events:
                yield prefill_event_to_proto(event)
