"""Receives the spans of a whole suite in this process: for the demo's waterfall and for tests that look at traces."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2

from services.runtime.telemetry import names

MAX_TRACES = 4_096
MAX_SPANS_PER_TRACE = 10_000


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment within a span."""

    name: str
    time_ns: int
    attributes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A finished span. Ids are lower-case hex, times nanoseconds since the epoch."""

    name: str
    service: str
    """`service.name` of the process."""
    instance: str
    """`service.instance.id`: the worker id."""
    trace_id: str
    span_id: str
    parent_id: str
    """'' for a root."""
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any]
    events: Sequence[SpanEvent]
    kind: str
    """'INTERNAL', 'SERVER', 'CLIENT', 'PRODUCER' or 'CONSUMER'."""
    status: str
    """'UNSET', 'OK' or 'ERROR'."""
    status_message: str
    links: Sequence[tuple[str, str]] = ()
    """(trace id, span id) of what it was done for."""

    @property
    def duration_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """An OTLP/gRPC endpoint on 127.0.0.1 that keeps spans by trace; the oldest traces go first when it is full."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self._traces: OrderedDict[str, dict[str, ReceivedSpan]] = OrderedDict()
        self._changed = asyncio.Condition()
        self._server: grpc.aio.Server | None = None

    @property
    def endpoint(self) -> str:
        """For `OTEL_EXPORTER_OTLP_ENDPOINT`."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> OtlpReceiver:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)])
        add_servicer: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add_servicer(self, self._server)
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def Export(self, request: Any, context: Any) -> Any:
        for span in received_spans(request.resource_spans):
            trace = self._traces.setdefault(span.trace_id, {})
            if len(trace) < MAX_SPANS_PER_TRACE:
                # By id: an exporter that repeats a batch it thinks lost adds nothing.
                trace[span.span_id] = span
        while len(self._traces) > MAX_TRACES:
            self._traces.popitem(last=False)
        async with self._changed:
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """What has arrived of a trace, by start time."""
        return sorted(self._traces.get(trace_id, {}).values(), key=lambda span: span.start_ns)

    def spans(self) -> list[ReceivedSpan]:
        """Every span kept, by start time."""
        return sorted((span for trace in self._traces.values() for span in trace.values()), key=lambda span: span.start_ns)

    async def wait_for_trace(
        self, trace_id: str, predicate: Callable[[Sequence[ReceivedSpan]], bool], timeout_s: float = 10.0
    ) -> list[ReceivedSpan]:
        """The trace's spans once `predicate` holds for them; TimeoutError, naming those that came, if it does not in time."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(lambda: predicate(self.trace(trace_id)))
        except TimeoutError:
            came = ", ".join(f"{span.service}:{span.name}" for span in self.trace(trace_id)) or "none"
            raise TimeoutError(f"trace {trace_id} is not complete after {timeout_s} s; spans: {came}") from None
        return self.trace(trace_id)


def received_spans(resource_spans: Iterable[trace_pb2.ResourceSpans]) -> Iterable[ReceivedSpan]:
    """OTLP messages as plain values."""
    for group in resource_spans:
        resource = _attributes(group.resource.attributes)
        for scope in group.scope_spans:
            for span in scope.spans:
                yield ReceivedSpan(
                    name=span.name,
                    service=str(resource.get(names.SERVICE_NAME, "")),
                    instance=str(resource.get(names.SERVICE_INSTANCE_ID, "")),
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    events=tuple(SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes)) for event in span.events),
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
                    status=trace_pb2.Status.StatusCode.Name(span.status.code).removeprefix("STATUS_CODE_"),
                    status_message=span.status.message,
                    links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
                )


def _attributes(pairs: Iterable[Any]) -> dict[str, Any]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: Any) -> Any:
    match value.WhichOneof("value"):
        case None:
            return None
        case "array_value":
            return [_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return _attributes(value.kvlist_value.values)
        case kind:
            return getattr(value, kind)
