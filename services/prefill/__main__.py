"""`python -m services.prefill`: one prefill worker, until SIGTERM."""

from __future__ import annotations

from kvrelay.inference.v1 import prefill_service_pb2_grpc
from kvrelay.kv.v1 import transfer_service_pb2_grpc
from services.engine.checks.version import engine_version_text
from services.prefill.prefiller import Prefiller
from services.prefill.service import PrefillServicer
from services.relay.holder import KvHolder
from services.relay.service import SERVICE_NAME as TRANSFER_SERVICE
from services.relay.service import KvTransferServicer
from services.runtime.clock import SystemClock
from services.runtime.processes.entry import run_service
from services.worker.host import worker_host
from services.worker.settings import WorkerSettings


async def serve(settings: WorkerSettings) -> None:
    async with worker_host("prefill", settings) as host:
        clock, engine = SystemClock(), host.engine
        holder = KvHolder(
            engine.identity,
            engine.layout,
            host.incarnation,
            "",
            engine.pages,
            clock,
            settings.lease_ttl_s,
            max_handles=settings.max_handles,
        )
        prefiller = Prefiller(engine, holder, host.prefixes, host.phases, clock, host.tasks)
        host.held_handles = lambda: holder.held_handles
        add_prefill = prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server
        host.server.add(add_prefill, PrefillServicer(prefiller), "kvrelay.inference.v1.PrefillService")
        add_transfer = transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server
        host.server.add(add_transfer, KvTransferServicer(holder), TRANSFER_SERVICE, while_draining=True)
        await host.server.start()
        holder.address = host.address
        host.tasks.create_task(holder.run(), name="lease sweeper")
        await host.serve(settled=prefiller.settled)


if __name__ == "__main__":
    run_service("prefill", WorkerSettings, serve, engine_version_text)
