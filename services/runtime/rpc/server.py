"""One grpc.aio server as every service runs it: health, reflection, interceptors, a bounded drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvrelay.errors import ConfigError
from services.runtime.addresses import host_port
from services.runtime.rpc import health
from services.runtime.rpc.channels import DEFAULT_MAX_MESSAGE_BYTES
from services.runtime.rpc.interceptors.deadline import DeadlineInterceptor
from services.runtime.rpc.interceptors.errors import ErrorInterceptor
from services.runtime.rpc.interceptors.gate import GateInterceptor
from services.runtime.rpc.interceptors.tracing import TraceServerInterceptor
from services.runtime.telemetry.tracing import Telemetry

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_DRAIN_GRACE_S = 10.0
STOP_TIMEOUT_S = 2.0
"""What handlers get to clean up after they were cancelled."""

AddServicer = Callable[[Any, Any], None]


class ServiceServer:
    """Add servicers, `await start()`, serve, `await drain()`. Belongs to the loop it was started on."""

    def __init__(
        self,
        name: str,
        telemetry: Telemetry,
        host: str = "127.0.0.1",
        port: int = 0,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        default_timeout_s: float = DEFAULT_TIMEOUT_S,
        drain_grace_s: float = DEFAULT_DRAIN_GRACE_S,
    ) -> None:
        """`port` 0 takes a free one. `default_timeout_s` bounds calls whose client set no deadline."""
        self.name = name
        self._telemetry = telemetry
        self._host = host
        self._port = port
        self._max_message_bytes = max_message_bytes
        self._default_timeout_s = default_timeout_s
        self._drain_grace_s = drain_grace_s
        self._health = health.HealthServicer()
        self._servicers: list[tuple[AddServicer, Any, str]] = []
        self._open_while_draining: list[str] = []
        self._gate = GateInterceptor()
        self._server: grpc.aio.Server | None = None
        self._drained = False

    def add(self, add_servicer_fn: AddServicer, servicer: Any, full_service_name: str, *, while_draining: bool = False) -> None:
        """Before `start`. `while_draining`: new calls are taken until the end, because they finish what runs elsewhere (KV pulls)."""
        assert self._server is None, "servicers are added before the start"
        self._servicers.append((add_servicer_fn, servicer, full_service_name))
        if while_draining:
            self._open_while_draining.append(full_service_name)

    def set_serving(self, health_name: str, serving: bool) -> None:
        """Health of one name ('' is the process, then each role and model); ignored once draining."""
        self._health.set(health_name, serving)

    @property
    def port(self) -> int:
        """The port in use, after `start`."""
        assert self._server is not None, "not started"
        return self._port

    @property
    def running(self) -> int:
        """Calls being served, probes not counted."""
        return self._gate.running

    async def start(self) -> int:
        """Listens and returns the port; `ConfigError` if it is taken. The process as a whole is SERVING from here on."""
        self._gate = GateInterceptor(self._open_while_draining)
        tracer = self._telemetry.tracer
        server = grpc.aio.server(
            interceptors=(TraceServerInterceptor(tracer), ErrorInterceptor(), self._gate, DeadlineInterceptor(self._default_timeout_s)),
            options=[
                ("grpc.max_send_message_length", self._max_message_bytes),
                ("grpc.max_receive_message_length", self._max_message_bytes),
                # Two processes on one port would share its calls without a word.
                ("grpc.so_reuseport", 0),
                # Lets the suite's own clients ping (every 10 s) without being thrown out.
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
            ],
        )
        for add_servicer, servicer, _ in self._servicers:
            add_servicer(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [name for _, _, name in self._servicers]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        address = host_port(self._host, self._port)
        try:
            self._port = server.add_insecure_port(address)
        except RuntimeError as error:
            await server.stop(None)
            raise ConfigError(f"cannot listen on {address}: taken, or not an address of this host", setting="port") from error
        self._server = server
        await server.start()
        self._health.set(health.OVERALL, True)
        return self._port

    async def drain(self, settled: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stops serving, in this order: health NOT_SERVING, new calls refused with `DrainingError`, running calls and `settled()` (what
        else must end first, such as handles held for others) waited for within the grace, the rest cancelled, the port closed.

        Bounded by the grace and a little more, whatever handlers do; safe to call twice.
        """
        if self._server is None or self._drained:
            return
        self._drained = True
        self._health.shut_down()
        self._gate.close()
        try:
            async with asyncio.timeout(self._drain_grace_s):
                await self._gate.wait_idle()
                if settled is not None:
                    await settled()
                await self._gate.wait_idle()
        except TimeoutError:
            log.warning(
                "%s still serves %d calls after %.1f s of draining: cancelling them", self.name, self._gate.running, self._drain_grace_s
            )
        # A short grace of its own lets the last answers out; then grpc cancels.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._server.stop(0.2 if self._gate.running == 0 else 0)
                await self._gate.wait_idle()
