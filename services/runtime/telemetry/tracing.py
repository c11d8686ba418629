"""Traces of one process: OpenTelemetry's SDK, built once and handed on; no global provider, nothing read from the environment here."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvrelay.errors import KvRelayError
from kvrelay.values import TransferStats
from services.runtime.telemetry import names
from services.runtime.telemetry.export import SpanCount, WatchedExporter

log = logging.getLogger(__name__)

EXPORT_EVERY_MS = 200
EXPORT_TIMEOUT_S = 5.0
FLUSH_TIMEOUT_S = 1.0
"""What a collector that answers gets for the last spans."""
GIVE_UP_S = 0.1
"""What one that does not gets: a suite's services stop one after the other."""

AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, AttributeValue]

_PROPAGATOR = TraceContextTextMapPropagator()


class Telemetry:
    """The tracer of this process and its way out. Make with `start` or `disabled`; `await shutdown()` at the end."""

    def __init__(self, provider: TracerProvider, exporter: WatchedExporter | None = None, count: SpanCount | None = None) -> None:
        self._provider = provider
        self._exporter = exporter
        self._count = count or SpanCount()
        self.tracer: Tracer = provider.get_tracer("kvrelay")

    @classmethod
    def start(cls, service_name: str, instance_id: str, otlp_endpoint: str | None = None) -> Telemetry:
        """Exports over OTLP/gRPC to `otlp_endpoint`; without one nothing is exported, but spans and trace ids exist all the same.

        A dead collector costs spans, never a request.
        """
        resource = {names.SERVICE_NAME: service_name, names.SERVICE_NAMESPACE: "kvrelay", names.SERVICE_INSTANCE_ID: instance_id}
        provider = TracerProvider(resource=Resource(resource), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False)
        watched, count = None, SpanCount()
        if otlp_endpoint:
            # Imported here: a process that exports nothing need not load the exporter.
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

            # Without a scheme the exporter would take host:port for a TLS endpoint.
            url = otlp_endpoint if "://" in otlp_endpoint else f"http://{otlp_endpoint}"
            watched = WatchedExporter(OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S))
            provider.add_span_processor(count)
            provider.add_span_processor(BatchSpanProcessor(watched, schedule_delay_millis=EXPORT_EVERY_MS))
        return cls(provider, watched, count)

    @classmethod
    def disabled(cls) -> Telemetry:
        """Spans and trace ids without any export, for tests."""
        return cls(TracerProvider(resource=Resource({}), sampler=ParentBased(ALWAYS_ON), shutdown_on_exit=False))

    async def shutdown(self, timeout_s: float = FLUSH_TIMEOUT_S) -> None:
        """Sends what is left and stops; gives up after `timeout_s`, or at once on a collector that does not answer. Logs how many spans
        were lost. The loop is never blocked.
        """
        answers = self._exporter is None or self._exporter.answers
        await self._stop(timeout_s if answers else min(timeout_s, GIVE_UP_S), answers=answers)
        lost = self._count.ended - self._exporter.exported if self._exporter is not None else 0
        if lost:
            log.warning("%d of %d spans were lost: the collector did not take them", lost, self._count.ended)

    async def _stop(self, timeout_s: float, *, answers: bool) -> None:
        loop = asyncio.get_running_loop()
        stopped = asyncio.Event()

        def stop() -> None:
            if self._exporter is not None and not answers:
                self._exporter.shutdown()
            self._provider.shutdown()
            if not loop.is_closed():
                loop.call_soon_threadsafe(stopped.set)

        # A thread of its own: a stuck exporter in the loop's pool would hold up the end of the process.
        threading.Thread(target=stop, name="telemetry-shutdown", daemon=True).start()
        try:
            async with asyncio.timeout(timeout_s):
                await stopped.wait()
        except TimeoutError:
            return

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Attributes | None = None,
        /,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        follows: str = "",
        **more: AttributeValue,
    ) -> Iterator[Span]:
        """A span around a block of code, current inside it. Whatever is raised passes on; an error marks the span as failed.

        `follows`: the traceparent of work that is over and that this is done for; it becomes a link.
        """
        cause = trace.get_current_span(context_from_traceparent(follows)).get_span_context()
        links = [trace.Link(cause)] if cause.is_valid else []
        span = self.tracer.start_span(name, kind=kind, links=links, attributes={**(attributes or {}), **more})
        with current(span), ending(span):
            yield span

    def record_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Attributes | None = None,
        *,
        parent: str | otel_context.Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[tuple[str, int, Attributes]] = (),
    ) -> Span:
        """A span that was measured elsewhere (the engine's thread), ended on return. Nanoseconds since the epoch.

        `parent` is a traceparent, an OpenTelemetry context, or None for the current span. `events` are (name, time in ns, attributes).
        """
        context = context_from_traceparent(parent) if isinstance(parent, str) else parent
        span = self.tracer.start_span(name, context=context, kind=kind, attributes=attributes, start_time=start_ns)
        for event, at_ns, event_attributes in events:
            span.add_event(event, event_attributes, timestamp=at_ns)
        span.end(end_time=max(start_ns, end_ns))
        return span


@contextmanager
def current(span: Span) -> Iterator[None]:
    """Makes `span` the current one; neither ends it nor marks it.

    Puts back the context that was before by value, not by token: an async generator may be closed from another task, where a token is void.
    """
    before = otel_context.get_current()
    otel_context.attach(trace.set_span_in_context(span, before))
    try:
        yield
    finally:
        if trace.get_current_span() is span:
            otel_context.attach(before)


@contextmanager
def ending(span: Span) -> Iterator[None]:
    """Marks the span of a block that fails, and ends it unless the block has."""
    try:
        yield
    except BaseException as error:
        mark_failed(span, error)
        raise
    finally:
        if span.is_recording():
            span.end()


def mark_failed(span: Span, error: BaseException) -> None:
    """Puts how a block ended onto its span: a typed error with its text, any other with its class, a cancellation as an attribute."""
    if isinstance(error, KvRelayError):
        span.set_attribute(names.ERROR_TYPE, error.code)
        span.set_attribute(names.REASON, error.reason)
        span.set_status(Status(StatusCode.ERROR, error.message))
    elif isinstance(error, asyncio.CancelledError | GeneratorExit):
        span.set_attribute(names.ERROR_TYPE, "CANCELLED")
    else:
        span.set_attribute(names.ERROR_TYPE, type(error).__qualname__)
        span.set_status(Status(StatusCode.ERROR))


def transfer_attributes(stats: TransferStats) -> dict[str, AttributeValue]:
    """What a pull's end has to tell of it."""
    return {
        names.KV_BYTES: stats.kv_bytes,
        names.KV_BLOCKS: stats.blocks,
        names.KV_EARLY_BYTES: stats.early_bytes,
        names.KV_WAIT_S: stats.wait_s,
        names.KV_TRANSFER_S: stats.transfer_s,
        names.KV_BANDWIDTH: stats.bandwidth_bytes_per_s,
        names.KV_RETRIES: stats.retries,
        names.KV_TRANSPORT: stats.transport,
    }


def current_trace_id() -> str:
    """32 hex digits, or '' where no span is current."""
    context = trace.get_current_span().get_span_context()
    return trace.format_trace_id(context.trace_id) if context.is_valid else ""


def current_span_id() -> str:
    """16 hex digits, or '' where no span is current."""
    context = trace.get_current_span().get_span_context()
    return trace.format_span_id(context.span_id) if context.is_valid else ""


def current_traceparent() -> str:
    """The W3C `traceparent` of the current span, to carry over a thread or a process; '' where no span is current."""
    return inject().get("traceparent", "")


def inject(context: otel_context.Context | None = None) -> dict[str, str]:
    """The W3C headers of `context` (None: the current one)."""
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context)
    return headers


def extract(headers: Mapping[str, str]) -> otel_context.Context:
    """The context that W3C headers name; malformed ones are ignored and a new trace begins."""
    return _PROPAGATOR.extract(dict(headers), context=otel_context.Context())


def context_from_traceparent(traceparent: str) -> otel_context.Context:
    """The context of one `traceparent`."""
    return extract({"traceparent": traceparent})
