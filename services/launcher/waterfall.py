"""Where a request's time went, drawn from the spans its services sent. Pure: spans in, text out."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvrelay.values import Timings
from services.runtime.telemetry import names

NS_PER_MS = 1e6
TOLERANCE_MS = 1.0
TOLERANCE_SHARE = 0.01
PHASES = ("admission", "route", "prefill queue", "prefill", "exposed transfer", "decode queue", "decode")


class SpanLike(Protocol):
    """What is read of a received span."""

    @property
    def name(self) -> str: ...
    @property
    def start_ns(self) -> int: ...
    @property
    def end_ns(self) -> int: ...
    @property
    def attributes(self) -> Mapping[str, Any]: ...
    @property
    def events(self) -> Sequence[Any]: ...


@dataclass(frozen=True, slots=True)
class Bar:
    """A stretch of time within a request, nanoseconds since the epoch."""

    label: str
    start_ns: int
    end_ns: int
    note: str = ""

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_MS


@dataclass(frozen=True, slots=True)
class Waterfall:
    """One request. Its phases follow one another; the transfer overlaps them."""

    start_ns: int
    end_ns: int
    phases: Sequence[Bar]
    transfer: Bar | None = None
    """None when the request stayed on one worker."""
    transfer_attributes: Mapping[str, Any] = field(default_factory=dict)
    path: str = ""
    decision: str = ""
    ttft_ms: float = 0.0
    """Receipt to first token sent, by the router."""
    itl_mean_ms: float | None = None
    """Gaps between tokens as the router sent them; None with fewer than two tokens."""
    itl_p99_ms: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def total_ms(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_MS

    @property
    def early_share(self) -> float:
        """Of the KV bytes, how many arrived before prefill ended; 0 to 1."""
        moved = self.transfer_attributes.get(names.KV_BYTES, 0)
        return self.transfer_attributes.get(names.KV_EARLY_BYTES, 0) / moved if moved else 0.0


def is_complete(spans: Sequence[SpanLike]) -> bool:
    """Whether the spans of every process that took part have arrived: services send theirs independently."""
    root = _last(spans, names.SPAN_GENERATE)
    if root is None or not _of(spans, names.SPAN_PREFILL_COMPUTE):
        return False
    if root.attributes.get(names.GEN_AI_USAGE_OUTPUT_TOKENS, 2) < 2:
        return True  # prefill's token was all, and whoever was to decode may have been told so in the middle of its pull
    if root.attributes.get(names.PATH) == "split" and not _of(spans, names.SPAN_KV_TRANSFER):
        return False
    return bool(_of(spans, names.SPAN_DECODE_COMPUTE))


def build(spans: Sequence[SpanLike]) -> Waterfall:
    """The waterfall of one trace; raises ValueError when a span is missing. After a fallback, it shows the try that succeeded."""
    root, admission = _required(spans, names.SPAN_GENERATE), _required(spans, names.SPAN_ADMISSION)
    _required(spans, names.SPAN_ROUTE)
    # What later tries cost belongs to the wait for prefill.
    route = min(_of(spans, names.SPAN_ROUTE), key=lambda span: span.start_ns)
    compute = _required(spans, names.SPAN_PREFILL_COMPUTE)
    decode = _last(spans, names.SPAN_DECODE_COMPUTE)
    handed_over = decode is not None and root.attributes.get(names.PATH) == "split"
    transfer = _last(spans, names.SPAN_KV_TRANSFER) if handed_over else None
    decode_queue = _last(spans, names.SPAN_DECODE_QUEUE)
    kv_ready = compute.end_ns
    if transfer is not None:
        kv_ready = max(kv_ready, decode_queue.start_ns if decode_queue is not None else transfer.end_ns)
    decode_start = decode.start_ns if decode is not None else kv_ready
    moments = (
        root.start_ns, admission.end_ns, route.end_ns, compute.start_ns, compute.end_ns, kv_ready, decode_start, root.end_ns,
    )  # fmt: skip
    chunks = [event for event in compute.events if event.name == names.EVENT_CHUNK]
    computed = f"{len(chunks)} chunk{'s' if len(chunks) != 1 else ''} on {compute.attributes.get(names.WORKER_ID, '?')}"
    notes = {
        "prefill": computed,
        "decode": f"on {decode.attributes.get(names.WORKER_ID, '?')}" if decode is not None else "none: prefill's token was all",
    }
    bars = [Bar(label, start, end, notes.get(label, "")) for label, (start, end) in zip(PHASES, itertools.pairwise(moments), strict=True)]
    return Waterfall(
        start_ns=root.start_ns,
        end_ns=root.end_ns,
        phases=bars,
        transfer=Bar("kv transfer", transfer.start_ns, transfer.end_ns) if transfer is not None else None,
        transfer_attributes=transfer.attributes if transfer is not None else {},
        path=str(root.attributes.get(names.PATH, "")),
        decision=str(root.attributes.get(names.DECISION, "")),
        ttft_ms=_ms(root, names.TTFT_S) or 0.0,
        itl_mean_ms=_ms(root, names.ITL_MEAN_S),
        itl_p99_ms=_ms(root, names.ITL_P99_S),
        prompt_tokens=int(root.attributes.get(names.GEN_AI_USAGE_INPUT_TOKENS, 0)),
        cached_tokens=int(root.attributes.get(names.GEN_AI_USAGE_CACHED_TOKENS, 0)),
        completion_tokens=int(root.attributes.get(names.GEN_AI_USAGE_OUTPUT_TOKENS, 0)),
    )


def disagreements(waterfall: Waterfall, timings: Timings) -> list[str]:
    """What does not add up, within 1 ms or 1 %: phases that overlap, or differ from the times the answer itself carried.

    The two come from the processes over different ways (spans over OTLP, times over the request's own streams).
    """
    allowed_ms = max(TOLERANCE_MS, TOLERANCE_SHARE * waterfall.total_ms)
    told = (
        timings.admission_s, timings.route_s, timings.prefill_queue_s, timings.prefill_s,
        timings.exposed_transfer_s, timings.decode_queue_s, timings.decode_s,
    )  # fmt: skip
    found = [f"{bar.label} would last {bar.ms:.1f} ms" for bar in waterfall.phases if bar.ms < -allowed_ms]
    for bar, seconds in zip(waterfall.phases, told, strict=True):
        if abs(bar.ms - seconds * 1e3) > allowed_ms:
            found.append(f"{bar.label}: {bar.ms:.1f} ms by its spans, {seconds * 1e3:.1f} ms by the answer")
    if abs(sum(told) * 1e3 - waterfall.total_ms) > allowed_ms:
        found.append(f"phases add up to {sum(told) * 1e3:.1f} ms of {waterfall.total_ms:.1f} ms end to end")
    return found


def render(waterfall: Waterfall, *, disagreements: Sequence[str], width: int = 100) -> str:
    """Bars with milliseconds, then the hand-over and the rates."""
    return "\n".join(_lines(waterfall, disagreements, max(24, width - 58)))


def _lines(waterfall: Waterfall, disagreements: Sequence[str], columns: int) -> Iterator[str]:
    yield f"  path {waterfall.path or '?'}: {waterfall.decision or 'no reason given'}"
    yield (
        f"  {waterfall.prompt_tokens:,} prompt tokens, {waterfall.cached_tokens:,} of them found in a cache;"
        f" {waterfall.completion_tokens:,} generated"
    )
    for bar in waterfall.phases:
        if bar.label == "exposed transfer" and waterfall.transfer is not None:
            yield _row(waterfall, waterfall.transfer, columns, "░", "overlaps prefill")
        yield _row(waterfall, bar, columns, "█", bar.note)
    added = "the phases add up" if not disagreements else "THE PHASES DO NOT ADD UP: " + "; ".join(disagreements)
    yield f"  {'end to end':<17}{waterfall.total_ms:>10,.1f} ms  {added}"
    if waterfall.transfer is not None:
        yield "  " + _hand_over(waterfall)
    rates = [f"TTFT {waterfall.ttft_ms:,.1f} ms"]
    if waterfall.itl_mean_ms is not None and waterfall.itl_p99_ms is not None:
        rates.append(f"ITL mean {waterfall.itl_mean_ms:,.1f} ms, p99 {waterfall.itl_p99_ms:,.1f} ms")
    yield "  " + "; ".join(rates)


def _row(waterfall: Waterfall, bar: Bar, columns: int, block: str, note: str) -> str:
    span = max(1, waterfall.end_ns - waterfall.start_ns)
    first = round(columns * min(max(bar.start_ns - waterfall.start_ns, 0), span) / span)
    last = round(columns * min(max(bar.end_ns - waterfall.start_ns, 0), span) / span)
    drawn = block * (last - first) or "▏"
    bar_text = f"  {bar.label:<17}{max(0.0, bar.ms):>10,.1f} ms  {' ' * min(first, columns - 1)}{drawn}"
    return f"{bar_text:<{columns + 33}} {note}".rstrip()


def _hand_over(waterfall: Waterfall) -> str:
    read = waterfall.transfer_attributes.get
    moved, seconds = int(read(names.KV_BYTES, 0)), float(read(names.KV_TRANSFER_S, 0.0))
    rate = f"{moved / seconds / 1e6:,.0f} MB/s" if seconds > 0 else "no time to speak of"
    return (
        f"KV: {moved / 1e6:,.1f} MB in {int(read(names.KV_BLOCKS, 0)):,} blocks over {read(names.KV_TRANSPORT, '?')} at {rate};"
        f" {waterfall.early_share:.0%} of the bytes arrived before prefill ended"
    )


def _ms(root: SpanLike, name: str) -> float | None:
    return float(root.attributes[name]) * 1e3 if name in root.attributes else None


def _of(spans: Sequence[SpanLike], name: str) -> list[SpanLike]:
    return [span for span in spans if span.name == name]


def _last(spans: Sequence[SpanLike], name: str) -> SpanLike | None:
    return max(_of(spans, name), key=lambda span: span.end_ns, default=None)


def _required(spans: Sequence[SpanLike], name: str) -> SpanLike:
    span = _last(spans, name)
    if span is None:
        raise ValueError(f"the trace has no span {name!r}; it has {sorted({span.name for span in spans})}")
    return span
