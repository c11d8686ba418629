"""A servicer of raw bytes with one method of each kind, whose behaviour a test hands in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry

SERVICE = "kvrelay.test.Echo"


class Echo:
    """Methods that a test replaces."""

    def __init__(self, parse: Any = None, serialise: Any = None, **methods: Any) -> None:
        self.parse, self.serialise, self.methods = parse, serialise, methods

    def add_to(self, _: Any, server: Any) -> None:
        kinds = {
            "unary": grpc.unary_unary_rpc_method_handler,
            "stream": grpc.unary_stream_rpc_method_handler,
            "collect": grpc.stream_unary_rpc_method_handler,
            "chat": grpc.stream_stream_rpc_method_handler,
        }
        handlers = {name: kinds[name](method, self.parse, self.serialise) for name, method in self.methods.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


class Recorder:
    """Telemetry whose ended spans can be looked at."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.telemetry = Telemetry(provider)

    def named(self, name: str, kind: str | None = None) -> list[Any]:
        return [span for span in self.exporter.get_finished_spans() if span.name == name and kind in (None, span.kind.name)]

    async def ended(self, method: str, kind: str) -> Any:
        """The one span of a method, when it has ended: a call's spans may end a little after the call."""
        async with asyncio.timeout(10):
            while not (spans := self.named(f"{SERVICE}/{method}", kind)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert len(spans) == 1, spans
        return spans[0]


class Served:
    """A running server and a way to it."""

    def __init__(self, server: ServiceServer, channels: ChannelPool, recorder: Recorder) -> None:
        self.server, self.channels, self.recorder = server, channels, recorder
        self.channel: Any = channels.get(f"127.0.0.1:{server.port}")

    def call(self, method: str) -> Any:
        kind = {"unary": "unary_unary", "stream": "unary_stream", "collect": "stream_unary", "chat": "stream_stream"}[method]
        return getattr(self.channel, kind)(f"/{SERVICE}/{method}")


@asynccontextmanager
async def serve(
    recorder: Recorder | None = None, *, while_draining: bool = False, settings: Any = None, **methods: Any
) -> AsyncIterator[Served]:
    recorder = recorder or Recorder()
    server = ServiceServer("echo", recorder.telemetry, **{"drain_grace_s": 5.0, **(settings or {})})
    server.add(lambda servicer, grpc_server: servicer.add_to(None, grpc_server), Echo(**methods), SERVICE, while_draining=while_draining)
    await server.start()
    channels = ChannelPool(recorder.telemetry)
    try:
        yield Served(server, channels, recorder)
    finally:
        await channels.close()
        await server.drain()
