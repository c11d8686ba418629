"""`python -m services.kvstore`: one block store, until SIGTERM."""

from __future__ import annotations

import asyncio
import secrets
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass

from kvrelay.kv.v1 import kv_store_service_pb2_grpc
from services.kvstore.keeper import StoreKeeper
from services.kvstore.service import SERVICE_NAME, KvStoreServicer
from services.kvstore.store import BlockStore
from services.runtime.addresses import advertised_host, host_port
from services.runtime.clock import SystemClock
from services.runtime.offloop import run_off_loop
from services.runtime.ports import WorkerInfo, WorkerLoad
from services.runtime.processes import checks
from services.runtime.processes.entry import background, run_service
from services.runtime.processes.lifecycle import announce_ready, run_until_stopped
from services.runtime.processes.machine import check_memory
from services.runtime.processes.settings import setting
from services.runtime.registry.heartbeat import Heartbeat
from services.runtime.registry.workers import RedisRegistry
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A shared store of finished KV blocks, in memory."""

    host: str = setting("127.0.0.1", "address to listen on", check=checks.host)
    port: int = setting(0, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    advertise: str = setting(
        "",
        "host that others reach this store by; empty: the listening address, or for 0.0.0.0 and :: the one towards Redis",
        check=checks.host,
    )
    limit_mib: int = setting(512, "memory for blocks; the least recently used go first", unit="MiB", minimum=1)
    lease_ttl_s: float = setting(10.0, "life of a read or write that does not move", unit="s", minimum=0.1)
    max_leases: int = setting(1024, "reads and writes open at once; more are refused", unit="leases", minimum=1)
    max_streams: int = setting(64, "transfers under way at once; more are refused", unit="streams", minimum=1)
    max_chain_blocks: int = setting(16384, "longest chain of blocks in one request", unit="blocks", minimum=1)
    redis_url: str = setting("redis://127.0.0.1:6379/0", "registry; empty: register nowhere", check=checks.redis_url)
    namespace: str = setting("kvrelay", "prefix of every key in Redis", check=checks.namespace)
    worker_id: str = setting("", "name in the registry, kept over restarts; empty: a random one")
    heartbeat_s: float = setting(1.0, "time between registry renewals", unit="s", minimum=0.05)
    registry_ttl_s: float = setting(6.0, "life of a registry entry that is not renewed", unit="s", minimum=0.1)
    max_message_bytes: int = setting(16 << 20, "largest message accepted", unit="bytes", minimum=2 << 20)
    default_timeout_s: float = setting(600.0, "deadline of requests that bring none", unit="s", minimum=0.1)
    drain_grace_s: float = setting(20.0, "how long running requests may go on at SIGTERM", unit="s", minimum=0)
    otlp_endpoint: str = setting("", "where spans go (OTLP over gRPC); empty: nowhere", check=checks.otlp_endpoint)
    log_level: str = setting("INFO", "least severe level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    exit_with_parent: bool = setting(False, "die when the process that started this one does")
    debug: bool = setting(False, "check the store's invariants after every sweep")


async def serve(settings: StoreSettings) -> None:
    """Serves until a signal. Raises `ConfigError` when it cannot listen."""
    worker_id = settings.worker_id or f"kvstore-{secrets.token_hex(4)}"
    incarnation = time.time_ns()
    check_memory(settings.limit_mib << 20, "a store of --limit-mib")
    reached_by = await run_off_loop(advertised_host, settings.host, settings.advertise, settings.redis_url)
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start("kvrelay-kvstore", worker_id, settings.otlp_endpoint)
        stack.push_async_callback(telemetry.shutdown)
        store = BlockStore(
            settings.limit_mib << 20, settings.lease_ttl_s, max_leases=settings.max_leases, max_chain_blocks=settings.max_chain_blocks
        )
        keeper = StoreKeeper(store, incarnation, "", SystemClock(), max_streams=settings.max_streams, debug=settings.debug)
        server = ServiceServer(
            "kvrelay-kvstore",
            telemetry,
            settings.host,
            settings.port,
            settings.max_message_bytes,
            settings.default_timeout_s,
            settings.drain_grace_s,
        )
        server.add(kv_store_service_pb2_grpc.add_KvStoreServiceServicer_to_server, KvStoreServicer(keeper), SERVICE_NAME)
        await server.start()
        stack.push_async_callback(server.drain)
        keeper.address = host_port(reached_by, server.port)
        server.set_serving("kvstore", True)

        def describe() -> WorkerInfo:
            return WorkerInfo(
                worker_id=worker_id,
                role="kvstore",
                address=keeper.address,
                incarnation=incarnation,
                load=WorkerLoad(running=server.running, held_handles=store.leases),
            )

        async with background() as tasks:
            tasks.create_task(keeper.run(), name="lease sweeper")
            beating: asyncio.Task[None] | None = None
            if settings.redis_url:
                registry = RedisRegistry(settings.redis_url, settings.namespace, settings.registry_ttl_s)
                heartbeat = Heartbeat(registry, describe, None, interval_s=settings.heartbeat_s)
                beating = tasks.create_task(heartbeat.run(), name="heartbeat")

            async def leave() -> None:
                if beating is not None:
                    beating.cancel()
                    await asyncio.wait([beating], timeout=2.0)

            announce_ready("kvstore", keeper.address, worker_id)
            await run_until_stopped(server, before_drain=leave)


if __name__ == "__main__":
    run_service("kvstore", StoreSettings, serve)
