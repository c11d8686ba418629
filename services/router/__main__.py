"""`python -m services.router`: one router, until SIGTERM."""

from __future__ import annotations

import secrets
from contextlib import AsyncExitStack

from kvrelay.inference.v1 import router_service_pb2_grpc
from services.router.admission import Admission, AdmissionLimits
from services.router.feed import FleetFollower
from services.router.fleet import Fleet, FleetTimes
from services.router.live_request import Patience
from services.router.orchestrator import Orchestrator
from services.router.placement import Mode, Policy
from services.router.service import SERVICE_NAME, RouterServicer
from services.router.settings import RouterSettings
from services.router.tokenization import Tokenizers
from services.runtime.addresses import host_port
from services.runtime.clock import SystemClock
from services.runtime.processes.entry import background, run_service
from services.runtime.processes.lifecycle import announce_ready, run_until_stopped
from services.runtime.registry.feed import RedisFleetFeed
from services.runtime.rpc.adapters import GrpcWorkers
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry


async def serve(settings: RouterSettings) -> None:
    """Serves until a signal. Raises `ConfigError` when it cannot listen."""
    router_id = settings.worker_id or f"router-{secrets.token_hex(4)}"
    clock, mode = SystemClock(), Mode(settings.mode)
    async with AsyncExitStack() as stack:
        telemetry = Telemetry.start("kvrelay-router", router_id, settings.otlp_endpoint)
        stack.push_async_callback(telemetry.shutdown)
        channels = ChannelPool(telemetry)
        stack.push_async_callback(channels.close)
        workers = GrpcWorkers(channels)
        fleet = Fleet(FleetTimes(down_s=settings.worker_down_s))
        admission = Admission(AdmissionLimits(settings.max_in_flight, settings.max_waiting, settings.max_wait_s), clock)
        tokenizers = Tokenizers(workers, fetch_timeout_s=settings.tokenizer_timeout_s)
        orchestrator = Orchestrator(
            fleet=fleet,
            workers=workers,
            tokenizers=tokenizers,
            admission=admission,
            policy=Policy(mode, settings.split_threshold_tokens, settings.prefill_backlog_limit_tokens),
            clock=clock,
            telemetry=telemetry,
            patience=Patience(max_tries=settings.max_tries, accept_timeout_s=settings.accept_timeout_s),
        )
        server = ServiceServer(
            "kvrelay-router",
            telemetry,
            settings.host,
            settings.port,
            settings.max_message_bytes,
            settings.default_timeout_s,
            settings.drain_grace_s,
        )
        servicer = RouterServicer(orchestrator, fleet, admission, mode, clock, max_timeout_s=settings.default_timeout_s)
        server.add(router_service_pb2_grpc.add_RouterServiceServicer_to_server, servicer, SERVICE_NAME)
        await server.start()
        stack.push_async_callback(server.drain)
        feed = RedisFleetFeed(settings.redis_url, settings.namespace)
        follower = FleetFollower(fleet, feed, clock, mode, server.set_serving, SERVICE_NAME)
        follower.tell_health()

        async def turn_away() -> None:
            admission.drain()

        async with background() as tasks:
            tasks.create_task(follower.run(), name="fleet feed")
            tasks.create_task(follower.warm(tokenizers), name="tokenizers")
            announce_ready("router", host_port(settings.advertise or settings.host, server.port), router_id)
            await run_until_stopped(server, before_drain=turn_away)


if __name__ == "__main__":
    run_service("router", RouterSettings, serve)
