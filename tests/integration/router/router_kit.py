"""A real router on gRPC over scripted workers on gRPC, all in this process; no Redis and no model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import kvrelay
from kvrelay import wire
from kvrelay.inference.v1 import (
    decode_service_pb2,
    decode_service_pb2_grpc,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from services.router.admission import Admission, AdmissionLimits
from services.router.feed import FleetFollower
from services.router.fleet import Fleet
from services.router.orchestrator import Orchestrator
from services.router.placement import Mode, Policy
from services.router.service import SERVICE_NAME, RouterServicer
from services.router.tokenization import Tokenizers
from services.runtime.clock import SystemClock
from services.runtime.ports import FleetEvent, FleetSnapshot, WorkerInfo
from services.runtime.processes.entry import background
from services.runtime.rpc.adapters import GrpcWorkers
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.rpc.wire import decode_event_to_proto, job_from_proto, prefill_event_to_proto
from services.runtime.telemetry.tracing import Telemetry
from tests.simulation.router_world import Call, Fault, ScriptedWorkers


class Servicer(
    prefill_service_pb2_grpc.PrefillServiceServicer,
    decode_service_pb2_grpc.DecodeServiceServicer,
    worker_service_pb2_grpc.WorkerServiceServicer,
):
    """One scripted worker on the wire."""

    def __init__(self, info: WorkerInfo, script: ScriptedWorkers) -> None:
        self._info = info
        self._script = script

    async def Prefill(self, request: Any, context: Any) -> AsyncGenerator[prefill_service_pb2.PrefillResponse, None]:
        async with aclosing(self._script.prefill(self._info, job_from_proto(request.job), timeout_s=context.time_remaining())) as events:
            async for event in events:
                yield prefill_event_to_proto(event)

    async def Decode(self, request: Any, context: Any) -> AsyncGenerator[decode_service_pb2.DecodeResponse, None]:
        handle = wire.handle_from_proto(request.handle) if request.HasField("handle") else None
        async with aclosing(
            self._script.decode(self._info, job_from_proto(request.job), handle, timeout_s=context.time_remaining())
        ) as events:
            async for event in events:
                yield decode_event_to_proto(event)

    async def GetTokenizer(self, request: Any, context: Any) -> AsyncGenerator[worker_service_pb2.GetTokenizerResponse, None]:
        files = await self._script.tokenizer_files(self._info, request.tokenizer_digest, timeout_s=5)
        for name, content in files.items():
            yield worker_service_pb2.GetTokenizerResponse(file_name=name, data=content)


class QueueFeed:
    """`FleetFeedPort` that says what the test puts into it."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[FleetEvent] = asyncio.Queue()

    async def events(self) -> AsyncIterator[FleetEvent]:
        while True:
            yield await self.queue.get()


@dataclass(slots=True)
class Scene:
    """A running router and its workers."""

    address: str
    client: kvrelay.AsyncClient
    script: ScriptedWorkers
    fleet: Fleet
    admission: Admission
    feed: QueueFeed
    router: ServiceServer
    servers: Mapping[str, ServiceServer]
    infos: Sequence[WorkerInfo]
    exporter: InMemorySpanExporter

    def spans(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Ends once `condition()` holds; fails after ten seconds."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110 - any condition whatever
                await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        await self.until(lambda: self.script.open_calls == 0 and self.admission.in_flight == 0)


@asynccontextmanager
async def scene(
    workers: Sequence[WorkerInfo],
    *,
    mode: Mode = Mode.SPLIT,
    fault: Callable[[Call], Fault | None] = lambda call: None,
    pause: Callable[[Call], float] = lambda call: 0.002,
    files: Mapping[str, bytes] | None = None,
    announce: bool = True,
    drain_grace_s: float = 5.0,
    limits: AdmissionLimits | None = None,
) -> AsyncIterator[Scene]:
    clock = SystemClock()
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource({}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider)
    script = ScriptedWorkers(clock, fault, pause, files)
    async with AsyncExitStack() as stack:
        stack.callback(provider.shutdown)
        servers: dict[str, ServiceServer] = {}
        infos: list[WorkerInfo] = []
        for info in workers:
            server = ServiceServer(info.worker_id, telemetry, drain_grace_s=0.0)
            servicer = Servicer(info, script)
            server.add(prefill_service_pb2_grpc.add_PrefillServiceServicer_to_server, servicer, "kvrelay.inference.v1.PrefillService")
            server.add(decode_service_pb2_grpc.add_DecodeServiceServicer_to_server, servicer, "kvrelay.inference.v1.DecodeService")
            server.add(worker_service_pb2_grpc.add_WorkerServiceServicer_to_server, servicer, "kvrelay.inference.v1.WorkerService")
            infos.append(replace(info, address=f"127.0.0.1:{await server.start()}"))
            stack.push_async_callback(server.drain)
            servers[info.worker_id] = server
        channels = ChannelPool(telemetry)
        stack.push_async_callback(channels.close)
        fleet, admission, port = Fleet(), Admission(limits or AdmissionLimits(), clock), GrpcWorkers(channels)
        orchestrator = Orchestrator(
            fleet=fleet,
            workers=port,
            tokenizers=Tokenizers(port),
            admission=admission,
            policy=Policy(mode),
            clock=clock,
            telemetry=telemetry,
        )
        router = ServiceServer("router", telemetry, max_message_bytes=4 << 20, drain_grace_s=drain_grace_s)
        servicer_of_router = RouterServicer(orchestrator, fleet, admission, mode, clock, max_timeout_s=60.0)
        router.add(router_service_pb2_grpc.add_RouterServiceServicer_to_server, servicer_of_router, SERVICE_NAME)
        address = f"127.0.0.1:{await router.start()}"
        stack.push_async_callback(router.drain)
        feed = QueueFeed()
        follower = FleetFollower(fleet, feed, clock, mode, router.set_serving, SERVICE_NAME)
        follower.tell_health()
        tasks = await stack.enter_async_context(background())
        tasks.create_task(follower.run())
        client = await stack.enter_async_context(kvrelay.AsyncClient(address))
        found = Scene(address, client, script, fleet, admission, feed, router, servers, infos, exporter)
        if announce:
            feed.queue.put_nowait(FleetSnapshot(infos, {}))
            await found.until(lambda: fleet.has_snapshot)
        yield found
