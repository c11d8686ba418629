"""The demo's waterfall: spans in, text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kvrelay.values import Timings
from services.launcher import waterfall
from services.runtime.telemetry import names

MS = 1_000_000
T0 = 1_700_000_000 * 1_000 * MS


@dataclass(frozen=True, slots=True)
class Event:
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    events: Sequence[Any] = ()


def span(name: str, start_ms: float, end_ms: float, events: Sequence[Any] = (), **attributes: Any) -> Span:
    values = {getattr(names, key.upper()): value for key, value in attributes.items()}
    return Span(name, T0 + int(start_ms * MS), T0 + int(end_ms * MS), values, events)


def split_trace() -> list[Span]:
    return [
        span(names.SPAN_GENERATE, 0, 1000, path="split", decision="1179 uncached tokens", ttft_s=0.61, itl_mean_s=0.0248, itl_p99_s=0.09,
             gen_ai_usage_input_tokens=1179, gen_ai_usage_cached_tokens=16, gen_ai_usage_output_tokens=14),
        span(names.SPAN_ADMISSION, 0, 10),
        span(names.SPAN_ROUTE, 10, 12),
        span(names.SPAN_PREFILL_QUEUE, 15, 20),
        span(names.SPAN_PREFILL_COMPUTE, 20, 600, [Event(names.EVENT_CHUNK)] * 5, worker_id="prefill-0"),
        span(names.SPAN_KV_TRANSFER, 30, 640, kv_bytes=27_000_000, kv_blocks=74, kv_early_bytes=21_600_000, kv_transfer_s=0.05,
             kv_transport="grpc"),
        span(names.SPAN_EXPOSED_TRANSFER, 600, 640),
        span(names.SPAN_DECODE_QUEUE, 640, 650),
        span(names.SPAN_DECODE_COMPUTE, 650, 995, worker_id="decode-0"),
    ]  # fmt: skip


TIMINGS = Timings(0.010, 0.002, 0.008, 0.580, 0.040, 0.010, 0.350, 1.0, 0.61)


def test_the_phases_follow_one_another_and_fill_the_request() -> None:
    drawn = waterfall.build(split_trace())
    assert [bar.label for bar in drawn.phases] == list(waterfall.PHASES)
    assert [bar.ms for bar in drawn.phases] == pytest.approx([10, 2, 8, 580, 40, 10, 350])
    assert sum(bar.ms for bar in drawn.phases) == pytest.approx(drawn.total_ms)
    assert drawn.early_share == pytest.approx(0.8)


def test_a_local_request_has_no_transfer() -> None:
    local = [s for s in split_trace() if s.name not in (names.SPAN_KV_TRANSFER, names.SPAN_EXPOSED_TRANSFER)]
    local[0] = replace(local[0], attributes={names.PATH: "local"})
    drawn = waterfall.build(local)
    assert drawn.transfer is None
    assert drawn.phases[4].ms == 0
    assert "KV:" not in waterfall.render(drawn, disagreements=[])


def test_spans_and_answer_that_agree_have_no_disagreement() -> None:
    assert waterfall.disagreements(waterfall.build(split_trace()), TIMINGS) == []


@pytest.mark.parametrize(("phase", "off_s", "noticed"), [("prefill_s", 0.005, False), ("prefill_s", 0.02, True), ("decode_s", -0.02, True)])
def test_a_phase_that_differs_by_more_than_a_hundredth_is_noticed(phase: str, off_s: float, noticed: bool) -> None:
    timings = replace(TIMINGS, **{phase: getattr(TIMINGS, phase) + off_s})
    assert bool(waterfall.disagreements(waterfall.build(split_trace()), timings)) is noticed


def test_overlapping_phases_are_noticed() -> None:
    spans = split_trace()
    spans[-1] = span(names.SPAN_DECODE_COMPUTE, 500, 995)
    assert any("decode queue would last -140.0 ms" in text for text in waterfall.disagreements(waterfall.build(spans), TIMINGS))


def test_a_trace_is_complete_only_with_every_process_spans() -> None:
    spans = split_trace()
    assert waterfall.is_complete(spans)
    for missing in (names.SPAN_GENERATE, names.SPAN_PREFILL_COMPUTE, names.SPAN_KV_TRANSFER, names.SPAN_DECODE_COMPUTE):
        assert not waterfall.is_complete([s for s in spans if s.name != missing]), missing


def test_a_missing_span_is_named() -> None:
    with pytest.raises(ValueError, match="no span 'route'"):
        waterfall.build([s for s in split_trace() if s.name != names.SPAN_ROUTE])


def test_after_a_fallback_the_try_that_succeeded_is_drawn() -> None:
    spans = [*split_trace(), span(names.SPAN_PREFILL_COMPUTE, 2, 8, worker_id="prefill-9")]
    assert "on prefill-0" in waterfall.build(spans).phases[3].note


def test_an_answer_of_one_token_needs_no_decode() -> None:
    spans = [s for s in split_trace() if s.name not in (names.SPAN_KV_TRANSFER, names.SPAN_DECODE_QUEUE, names.SPAN_DECODE_COMPUTE)]
    spans[0] = replace(spans[0], attributes={**spans[0].attributes, names.GEN_AI_USAGE_OUTPUT_TOKENS: 1})
    assert waterfall.is_complete(spans)
    timings = replace(TIMINGS, exposed_transfer_s=0.0, decode_queue_s=0.0, decode_s=0.4)
    assert waterfall.disagreements(waterfall.build(spans), timings) == []


def test_what_a_second_try_costs_is_the_wait_for_prefill() -> None:
    spans = [*split_trace(), span(names.SPAN_ROUTE, 16, 17)]
    assert waterfall.disagreements(waterfall.build(spans), TIMINGS) == []


def test_the_drawing_tells_times_bytes_and_rates() -> None:
    text = waterfall.render(waterfall.build(split_trace()), disagreements=[], width=110)
    for expected in (
        "path split: 1179 uncached tokens", "1,179 prompt tokens, 16 of them found in a cache; 14 generated",
        "580.0 ms", "5 chunks on prefill-0",
        "27.0 MB in 74 blocks over grpc at 540 MB/s", "80% of the bytes arrived before prefill ended", "TTFT 610.0 ms",
        "ITL mean 24.8 ms, p99 90.0 ms", "the phases add up",
    ):  # fmt: skip
        assert expected in text
    assert all(len(line) <= 125 and line == line.rstrip() for line in text.splitlines())


def test_a_waterfall_that_does_not_add_up_says_so() -> None:
    assert "DO NOT ADD UP: prefill" in waterfall.render(waterfall.build(split_trace()), disagreements=["prefill: off"])
