"""`python -m services.decode`: one decode worker, until SIGTERM."""

from __future__ import annotations

from kvrelay.inference.v1 import decode_service_pb2_grpc
from services.decode.decoder import Decoder
from services.decode.service import DecodeServicer
from services.engine.checks.version import engine_version_text
from services.relay.puller import KvPuller
from services.relay.transports.grpc import GrpcTransfer
from services.runtime.clock import SystemClock
from services.runtime.processes.entry import run_service
from services.worker.host import worker_host
from services.worker.settings import WorkerSettings


async def serve(settings: WorkerSettings) -> None:
    async with worker_host("decode", settings) as host:
        engine = host.engine
        puller = KvPuller(GrpcTransfer(host.channels), engine.identity, engine.layout, engine.pages)
        decoder = Decoder(engine, puller, host.prefixes, host.phases, SystemClock())
        add_decode = decode_service_pb2_grpc.add_DecodeServiceServicer_to_server
        host.server.add(add_decode, DecodeServicer(decoder), "kvrelay.inference.v1.DecodeService")
        await host.server.start()
        await host.serve()


if __name__ == "__main__":
    run_service("decode", WorkerSettings, serve, engine_version_text)
