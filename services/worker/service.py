"""WorkerService on gRPC: what every worker says of itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from kvrelay.errors import TokenizerNotFoundError
from kvrelay.inference.v1 import worker_service_pb2, worker_service_pb2_grpc
from services.engine.api import EngineLoad
from services.runtime.ports import WorkerInfo
from services.runtime.rpc.wire import worker_details_to_proto

CHUNK_BYTES = 1 << 20


class WorkerServicer(worker_service_pb2_grpc.WorkerServiceServicer):
    """Answers from snapshots; nothing here waits for the engine."""

    def __init__(
        self,
        describe: Callable[[], WorkerInfo],
        load: Callable[[], EngineLoad],
        tokenizer_digest: str,
        tokenizer_files: Mapping[str, bytes],
    ) -> None:
        self._describe = describe
        self._load = load
        self._tokenizer_digest = tokenizer_digest
        self._tokenizer_files = tokenizer_files

    async def GetWorkerInfo(
        self, request: worker_service_pb2.GetWorkerInfoRequest, context: Any
    ) -> worker_service_pb2.GetWorkerInfoResponse:
        load = self._load()
        return worker_details_to_proto(
            self._describe(), free_pages=load.free_pages, cached_pages=load.cached_pages, held_pages=load.held_pages
        )

    async def GetTokenizer(
        self, request: worker_service_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncGenerator[worker_service_pb2.GetTokenizerResponse, None]:
        if request.tokenizer_digest != self._tokenizer_digest:
            raise TokenizerNotFoundError(
                "this worker has another tokenizer", wanted=request.tokenizer_digest, served=self._tokenizer_digest
            )
        for name, content in self._tokenizer_files.items():
            for start in range(0, max(1, len(content)), CHUNK_BYTES):
                yield worker_service_pb2.GetTokenizerResponse(file_name=name, data=content[start : start + CHUNK_BYTES])
