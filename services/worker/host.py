"""One worker process: engine, server, registry entry, and what prefill and decode have in common."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kvrelay.errors import InternalError
from kvrelay.inference.v1 import worker_service_pb2_grpc
from services.engine.demo.model import resolve_model, served_name
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.relay.store_client import BlockStoreClient
from services.relay.transports.grpc import GrpcStore
from services.runtime.addresses import advertised_host, check_listening, host_port
from services.runtime.offloop import assert_off_loop, run_off_loop
from services.runtime.ports import Topology, WorkerInfo, WorkerLoad
from services.runtime.processes.entry import background
from services.runtime.processes.lifecycle import announce_ready, run_until_stopped
from services.runtime.processes.machine import check_memory
from services.runtime.registry.heartbeat import Heartbeat
from services.runtime.registry.workers import RedisRegistry
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry
from services.worker.phases import PhaseRecorder
from services.worker.prefix import PrefixExchange
from services.worker.service import WorkerServicer
from services.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


@dataclass(slots=True)
class WorkerHost:
    """What a role builds its service on."""

    role: str
    """'prefill' or 'decode'."""
    worker_id: str
    incarnation: int
    settings: WorkerSettings
    engine: Engine
    server: ServiceServer
    channels: ChannelPool
    telemetry: Telemetry
    phases: PhaseRecorder
    prefixes: PrefixExchange
    tasks: asyncio.TaskGroup
    """Background work of this process; cancelled at the end."""
    reached_by: str
    """Host by which others reach this worker."""
    held_handles: Callable[[], int] = field(default=lambda: 0)
    """Handles held for others at this moment."""
    draining: bool = False

    @property
    def address(self) -> str:
        """host:port by which others reach this worker; the server must have started."""
        return host_port(self.reached_by, self.server.port)

    def describe(self) -> WorkerInfo:
        """The registry entry as it is now."""
        load = self.engine.load()
        return WorkerInfo(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            state="draining" if self.draining or not self.engine.healthy else "ready",
            identity=self.engine.identity,
            layout=self.engine.layout,
            max_context_tokens=self.engine.max_context_tokens,
            vocab_size=self.engine.vocab_size,
            topology=Topology(socket.gethostname(), self.settings.rack, self.settings.zone),
            load=WorkerLoad(
                running=load.running,
                waiting=load.waiting,
                prefill_backlog_tokens=load.prefill_backlog_tokens,
                decode_backlog_tokens=load.decode_backlog_tokens,
                total_pages=load.total_pages,
                available_pages=max(0, load.free_pages + load.cached_pages - load.claimed_pages),
                held_handles=self.held_handles(),
            ),
        )

    async def _die_with_engine(self) -> None:
        """A worker without its engine serves nothing: better to end and be started again."""
        await self.engine.wait_ended()
        raise InternalError("the engine thread has died; its log says of what")

    async def serve(self, *, settled: Callable[[], Awaitable[None]] | None = None) -> None:
        """Registers, serves until a signal, drains until `settled()` too has returned. The server must have started."""
        service = f"kvrelay.inference.v1.{self.role.capitalize()}Service"
        for name in (self.role, service, f"model:{self.engine.identity.model}"):
            self.server.set_serving(name, True)
        self.tasks.create_task(self._die_with_engine(), name="engine watch")
        registry = RedisRegistry(self.settings.redis_url, self.settings.namespace, self.settings.registry_ttl_s)
        heartbeat = Heartbeat(registry, self.describe, self.engine.take_block_changes, interval_s=self.settings.heartbeat_s)
        beating = self.tasks.create_task(heartbeat.run(), name="heartbeat")
        announce_ready(self.role, self.address, self.worker_id)

        async def leave() -> None:
            # The heartbeat's last act is to deregister: nothing new is routed here while the rest drains.
            self.draining = True
            beating.cancel()
            await asyncio.wait([beating], timeout=2.0)

        await run_until_stopped(self.server, before_drain=leave, settled=settled)
        log.info("%s drained", self.worker_id)


@asynccontextmanager
async def worker_host(role: str, settings: WorkerSettings) -> AsyncIterator[WorkerHost]:
    """Loads the model and builds everything but the role's own service. Raises `ModelLoadError` and `ConfigError`."""
    settings.check_role(role)
    check_listening(settings.host, settings.port)
    if settings.device == "cpu":
        check_memory(settings.kv_cache_mib << 20, "a KV cache of --kv-cache-mib")
    reached_by = await run_off_loop(advertised_host, settings.host, settings.advertise, settings.redis_url)
    worker_id = settings.worker_id or f"{role}-{secrets.token_hex(4)}"
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start(f"kvrelay-{role}", worker_id, settings.otlp_endpoint)
        stack.push_async_callback(telemetry.shutdown)
        engine = await Engine.start(await run_off_loop(_engine_settings, settings))
        stack.push_async_callback(engine.stop)
        channels = ChannelPool(telemetry, settings.max_message_bytes)
        stack.push_async_callback(channels.close)
        store = None
        if settings.store_address:
            transport = GrpcStore(channels, settings.store_address)
            store = BlockStoreClient(transport, engine.identity, engine.layout, engine.pages)
        server = ServiceServer(
            f"kvrelay-{role}",
            telemetry,
            settings.host,
            settings.port,
            settings.max_message_bytes,
            settings.default_timeout_s,
            settings.drain_grace_s,
        )
        stack.push_async_callback(server.drain)
        tasks = await stack.enter_async_context(background())
        prefixes = PrefixExchange(engine, store, telemetry)
        if prefixes.enabled:
            tasks.create_task(prefixes.run(), name="write-behind")
        host = WorkerHost(
            role=role,
            worker_id=worker_id,
            incarnation=time.time_ns(),
            settings=settings,
            engine=engine,
            server=server,
            channels=channels,
            telemetry=telemetry,
            phases=PhaseRecorder(telemetry, worker_id),
            prefixes=prefixes,
            tasks=tasks,
            reached_by=reached_by,
        )
        servicer = WorkerServicer(host.describe, engine.load, engine.identity.tokenizer_digest, engine.tokenizer_files())
        server.add(worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "kvrelay.inference.v1.WorkerService")
        yield host


def _engine_settings(settings: WorkerSettings) -> EngineSettings:
    """Looks for the model, or makes it; blocks. Raises `ModelLoadError`."""
    assert_off_loop("looking for a model")
    cache_dir = Path(settings.cache_dir).expanduser()
    folder = resolve_model(settings.model, cache_dir, settings.dtype)
    return EngineSettings(
        model_path=folder,
        model_name=settings.model_name or served_name(settings.model, folder),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        quantization=settings.quantization,
        kernels=settings.kernels,
        device=settings.device,
        kv_cache_bytes=settings.kv_cache_mib << 20,
        block_size=settings.block_size,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_waiting=settings.max_waiting,
        policy=settings.policy,
        tbt_objective_ms=settings.tbt_objective_ms,
        prefill_order=settings.prefill_order,
        explain_schedule=settings.explain_schedule,
        profile=settings.profile,
        exactness_check=settings.exactness_check,
        max_context_tokens=settings.max_context_tokens,
        threads=settings.threads,
        cache_dir=cache_dir,
        cpus=settings.pinned_cpus(),
        debug=settings.debug,
    )
