"""Spans within one process."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvrelay.errors import OverloadedError
from services.runtime.telemetry.export import SpanCount, WatchedExporter
from services.runtime.telemetry.logs import setup_logging
from services.runtime.telemetry.tracing import Telemetry, current_span_id, current_trace_id, current_traceparent


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def telemetry(exporter: InMemorySpanExporter) -> Telemetry:
    provider = TracerProvider(resource=Resource({}), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Telemetry(provider)


def spans(exporter: InMemorySpanExporter) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_spans_nest_and_put_back_what_was_current(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    assert (current_trace_id(), current_span_id(), current_traceparent()) == ("", "", "")
    with telemetry.span("outer", {"kvrelay.kv.bytes": 3}, blocks=2) as outer:
        with telemetry.span("inner"):
            assert current_trace_id() == f"{outer.get_span_context().trace_id:032x}"
        assert current_span_id() == f"{outer.get_span_context().span_id:016x}"
    assert current_trace_id() == ""
    found = spans(exporter)
    assert found["inner"].parent.span_id == found["outer"].context.span_id
    assert dict(found["outer"].attributes) == {"kvrelay.kv.bytes": 3, "blocks": 2}


@pytest.mark.parametrize(
    ("error", "status", "attributes"),
    [
        (OverloadedError("queue full"), StatusCode.ERROR, {"error.type": "RESOURCE_EXHAUSTED", "kvrelay.reason": "OVERLOADED"}),
        (ValueError("secret"), StatusCode.ERROR, {"error.type": "ValueError"}),
        (asyncio.CancelledError(), StatusCode.UNSET, {"error.type": "CANCELLED"}),
    ],
)
def test_how_a_block_ended_is_on_its_span(
    telemetry: Telemetry, exporter: InMemorySpanExporter, error: BaseException, status: StatusCode, attributes: dict[str, str]
) -> None:
    with pytest.raises(type(error)), telemetry.span("work"):
        raise error
    span = spans(exporter)["work"]
    assert span.status.status_code is status and dict(span.attributes) == attributes
    assert not span.events and "secret" not in str(span.status.description)


def test_measured_spans_keep_their_times_parent_and_events(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    with telemetry.span("request") as request:
        traceparent = current_traceparent()
    telemetry.record_span(
        "prefill.compute", 1_000, 5_000, {"kvrelay.chunk.tokens": 256}, parent=traceparent, events=[("prefill.chunk", 2_000, {"n": 1})]
    )
    span = spans(exporter)["prefill.compute"]
    assert (span.start_time, span.end_time, span.kind) == (1_000, 5_000, SpanKind.INTERNAL)
    assert span.parent.span_id == request.get_span_context().span_id
    assert [(event.name, event.timestamp) for event in span.events] == [("prefill.chunk", 2_000)]


def test_a_measured_span_never_ends_before_it_starts(telemetry: Telemetry, exporter: InMemorySpanExporter) -> None:
    telemetry.record_span("odd", 5_000, 4_000)
    assert spans(exporter)["odd"].end_time == 5_000


async def test_a_span_in_a_generator_closed_by_another_task_ends_quietly(
    telemetry: Telemetry, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        with telemetry.span("numbers"):
            yield 1
            yield 2

    generator = numbers()
    assert await asyncio.create_task(anext(generator)) == 1  # type: ignore[arg-type]
    await asyncio.create_task(generator.aclose())  # type: ignore[arg-type]
    assert "numbers" in spans(exporter) and caplog.text == "" and current_trace_id() == ""


async def test_without_an_endpoint_spans_have_ids_and_shutdown_is_immediate() -> None:
    for telemetry in (Telemetry.disabled(), Telemetry.start("kvrelay-test", "id")):
        with telemetry.span("work"):
            assert len(current_trace_id()) == 32
        await telemetry.shutdown()


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = io.StringIO()
    setup_logging("info", service="kvrelay-test", worker_id="w0", stream=stream)
    yield stream
    root.handlers[:], root.level = handlers, level


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_log_lines_are_json_with_the_current_trace(telemetry: Telemetry, logged: io.StringIO) -> None:
    log = logging.getLogger("kvrelay.test")
    log.debug("not this")
    log.info("plain %d", 1)
    with telemetry.span("work"):
        log.warning("in a trace", extra={"blocks": 3})
        trace_id = current_trace_id()
    plain, traced = lines(logged)
    assert (plain["level"], plain["message"], plain["service"], plain["worker_id"]) == ("info", "plain 1", "kvrelay-test", "w0")
    assert "trace_id" not in plain
    assert (traced["trace_id"], traced["blocks"]) == (trace_id, 3)


def test_a_traceback_is_one_member_of_one_line(logged: io.StringIO) -> None:
    try:
        raise ValueError("multi\nline")
    except ValueError:
        logging.getLogger("kvrelay.test").exception("failed")
    (line,) = lines(logged)
    assert "Traceback" in line["exception"] and "multi\nline" in line["exception"]


def test_a_dead_collector_is_mentioned_once_and_not_for_every_batch(logged: io.StringIO) -> None:
    log = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    for _ in range(5):
        log.error("Failed to export")
    assert len(lines(logged)) == 1


class Collector(SpanExporter):
    """Takes spans, refuses them, or (`hangs`) never answers until it is shut down."""

    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS, *, hangs: bool = False) -> None:
        self.result = result
        self.hangs = hangs
        self.asked, self.over = threading.Event(), threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.asked.set()
        if self.hangs:
            self.over.wait()
            return SpanExportResult.FAILURE
        return self.result

    def shutdown(self) -> None:
        self.over.set()


def exporting_to(collector: Collector, clock: Callable[[], float]) -> tuple[Telemetry, WatchedExporter]:
    provider, watched, count = TracerProvider(shutdown_on_exit=False), WatchedExporter(collector, clock), SpanCount()
    provider.add_span_processor(count)
    provider.add_span_processor(BatchSpanProcessor(watched, schedule_delay_millis=1))
    return Telemetry(provider, watched, count), watched


async def test_spans_that_a_collector_took_are_not_lost(caplog: pytest.LogCaptureFixture) -> None:
    telemetry, watched = exporting_to(Collector(), lambda: 0.0)
    for _ in range(3):
        with telemetry.span("kept"):
            pass
    await telemetry.shutdown(timeout_s=60)
    assert watched.exported == 3 and watched.answers
    assert "lost" not in caplog.text


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_collector_that_takes_nothing_is_not_waited_for_and_the_loss_is_counted(
    hangs: bool, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    collector = Collector(SpanExportResult.FAILURE, hangs=hangs)
    telemetry, watched = exporting_to(collector, lambda: now[0])
    with telemetry.span("lost"):
        pass
    assert await asyncio.to_thread(collector.asked.wait, 60)
    now[0] += 1.0
    async with asyncio.timeout(60):
        while watched.answers:  # noqa: ASYNC110 - the exporter's thread changes it
            await asyncio.sleep(0.01)
        # An hour is what one that answers would be given.
        await telemetry.shutdown(timeout_s=3600)
    assert "1 of 1 spans were lost" in caplog.text
