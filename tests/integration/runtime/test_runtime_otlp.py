"""Spans out over OTLP and in again."""

from __future__ import annotations

import asyncio
import time

import pytest
from opentelemetry.trace import SpanKind

from services.runtime.telemetry.otlp_receiver import OtlpReceiver
from services.runtime.telemetry.tracing import Telemetry, current_trace_id, current_traceparent
from tests.integration.runtime.grpc_echo import SERVICE, Recorder, serve


async def test_exported_spans_arrive_with_everything_on_them() -> None:
    async with OtlpReceiver() as receiver:
        telemetry = Telemetry.start("kvrelay-prefill", "prefill-0", receiver.endpoint)
        with telemetry.span("root", {"n": 1, "ratio": 0.5, "flag": True, "names": ["a", "b"]}, kind=SpanKind.SERVER) as root:
            root.add_event("first_token", {"index": 0})
            trace_id, traceparent = current_trace_id(), current_traceparent()
        telemetry.record_span("child", 1_000, 2_000, parent=traceparent)
        spans = await receiver.wait_for_trace(trace_id, lambda spans: len(spans) == 2, 10)
        await telemetry.shutdown()
    child, parent = spans
    assert (parent.service, parent.instance, parent.kind, parent.status) == ("kvrelay-prefill", "prefill-0", "SERVER", "UNSET")
    assert parent.attributes == {"n": 1, "ratio": 0.5, "flag": True, "names": ["a", "b"]}
    assert [(event.name, event.attributes) for event in parent.events] == [("first_token", {"index": 0})]
    assert (child.parent_id, child.start_ns, child.end_ns, child.duration_s) == (parent.span_id, 1_000, 2_000, 1e-6)
    assert parent.parent_id == ""


async def test_shutdown_sends_what_is_left() -> None:
    async with OtlpReceiver() as receiver:
        telemetry = Telemetry.start("kvrelay-x", "x", receiver.endpoint.removeprefix("http://"))
        with telemetry.span("last"):
            trace_id = current_trace_id()
        await telemetry.shutdown()
        assert [span.name for span in receiver.trace(trace_id)] == ["last"]


async def test_a_dead_collector_holds_up_neither_spans_nor_shutdown() -> None:
    telemetry = Telemetry.start("kvrelay-x", "x", "http://127.0.0.1:1")
    with telemetry.span("lost"):
        pass
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    ticking = asyncio.create_task(tick())
    async with asyncio.timeout(5):
        await telemetry.shutdown(timeout_s=0.5)
    ticking.cancel()
    assert ticks >= 3


async def test_a_trace_over_two_services_is_one_tree() -> None:
    """Router and worker each export for themselves; client and server spans pair up across them."""
    async with OtlpReceiver() as receiver:
        router, worker = (Telemetry.start(f"kvrelay-{name}", name, receiver.endpoint) for name in ("router", "worker"))
        recorders = [Recorder(), Recorder()]
        recorders[0].telemetry, recorders[1].telemetry = router, worker

        async def leaf(request: bytes, context: object) -> bytes:
            with worker.span("compute"):
                return current_trace_id().encode()

        async with serve(recorders[1], unary=leaf) as behind:
            front_channel = type(behind.channels)(router)
            with router.span("kvrelay.generate"):
                channel = front_channel.get(f"127.0.0.1:{behind.server.port}")
                trace_id = (await channel.unary_unary(f"/{SERVICE}/unary")(b"", timeout=10)).decode()
            await front_channel.close()
        spans = {(span.service, span.name): span for span in await receiver.wait_for_trace(trace_id, lambda spans: len(spans) == 4, 10)}
        await asyncio.gather(router.shutdown(), worker.shutdown())
    rpc = f"{SERVICE}/unary"
    chain = [("kvrelay-router", "kvrelay.generate"), ("kvrelay-router", rpc), ("kvrelay-worker", rpc), ("kvrelay-worker", "compute")]
    assert [spans[key].parent_id for key in chain] == ["", *(spans[key].span_id for key in chain[:-1])]


async def test_waiting_for_a_trace_that_stays_incomplete_names_what_came() -> None:
    async with OtlpReceiver() as receiver:
        telemetry = Telemetry.start("kvrelay-x", "x", receiver.endpoint)
        with telemetry.span("lonely"):
            trace_id = current_trace_id()
        await telemetry.shutdown()
        started = time.monotonic()
        with pytest.raises(TimeoutError, match="kvrelay-x:lonely"):
            await receiver.wait_for_trace(trace_id, lambda spans: len(spans) == 2, 0.2)
        assert time.monotonic() - started < 10
