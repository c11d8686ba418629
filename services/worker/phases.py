"""Spans of the phases a request goes through on one worker, recorded when they are over from the engine's own marks."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvrelay.values import TransferStats, Usage, WorkerMarks
from services.engine.api import PrefillProgress
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import Attributes, Telemetry, current_traceparent, transfer_attributes


class PhaseRecorder:
    """Makes one `PhaseTrace` a request; its spans are children of the RPC's span that was current then."""

    def __init__(self, telemetry: Telemetry, worker_id: str) -> None:
        self._telemetry = telemetry
        self._worker_id = worker_id

    def begin(self, request_id: str) -> PhaseTrace:
        return PhaseTrace(self._telemetry, current_traceparent(), {names.REQUEST_ID: request_id, names.WORKER_ID: self._worker_id})


@dataclass(slots=True)
class PhaseTrace:
    """One request's spans on this worker. Marks that did not happen make no span."""

    _telemetry: Telemetry
    _parent: str
    _attributes: Attributes
    _chunks: list[PrefillProgress] = field(default_factory=list)

    def chunk(self, progress: PrefillProgress) -> None:
        """A step computed a part of the prompt."""
        self._chunks.append(progress)

    def prefill(self, marks: WorkerMarks, usage: Usage) -> None:
        """`prefill.queue`: receipt to the first step; `prefill.compute`: to the first token, an event for each chunk."""
        if not marks.prefill_end:
            return
        self._record(names.SPAN_PREFILL_QUEUE, marks.received, marks.prefill_start, {})
        self._record(
            names.SPAN_PREFILL_COMPUTE,
            marks.prefill_start,
            marks.prefill_end,
            {names.GEN_AI_USAGE_INPUT_TOKENS: usage.prompt_tokens, names.CACHED_TOKENS: usage.cached_tokens},
            [
                (
                    names.EVENT_CHUNK,
                    chunk.ended_ns,
                    {
                        names.COMPUTED_TOKENS: chunk.computed_tokens,
                        names.CHUNK_TOKENS: chunk.batch_tokens,
                        names.CHUNK_S: (chunk.ended_ns - chunk.started_ns) / 1e9,
                    },
                )
                for chunk in self._chunks
            ],
        )

    def decode(self, marks: WorkerMarks, usage: Usage) -> None:
        """`decode.queue`: KV ready (local: first token drawn) to the first decode step; `decode.compute`: to the last token."""
        if not marks.decode_start:
            return
        self._record(names.SPAN_DECODE_QUEUE, marks.kv_ready or marks.prefill_end, marks.decode_start, {})
        tokens = {names.GEN_AI_USAGE_OUTPUT_TOKENS: usage.completion_tokens}
        self._record(names.SPAN_DECODE_COMPUTE, marks.decode_start, marks.end, tokens)

    def transfer(self, start_ns: int, end_ns: int, stats: TransferStats, prefill_end_ns: int, cached_tokens: int) -> None:
        """`kv.transfer`: from the pull's start to the last verified byte; what of it came after prefill's end is exposed."""
        self._record(
            names.SPAN_KV_TRANSFER,
            start_ns,
            end_ns,
            {**transfer_attributes(stats), names.CACHED_TOKENS: cached_tokens},
        )
        if end_ns > prefill_end_ns:
            self._record(names.SPAN_EXPOSED_TRANSFER, max(start_ns, prefill_end_ns), end_ns, {})

    def fetched(self, start_ns: int, end_ns: int, tokens: int) -> None:
        """`kv.fetch`: a prefix of `tokens` tokens taken from the block store. Nothing was taken: no span."""
        if tokens:
            self._record(names.SPAN_KV_FETCH, start_ns, end_ns, {names.CACHED_TOKENS: tokens})

    def held(self, start_ns: int, end_ns: int, stats: TransferStats, why: str) -> None:
        """`kv.hold`: the holder's end of a hand-over, from the handle's first block to its end."""
        self._record(
            names.SPAN_KV_HOLD,
            start_ns,
            end_ns,
            {
                names.KV_BYTES: stats.kv_bytes,
                names.KV_BLOCKS: stats.blocks,
                names.KV_EARLY_BYTES: stats.early_bytes,
                names.KV_WAIT_S: stats.wait_s,
                names.KV_TRANSFER_S: stats.transfer_s,
                names.KV_END: why,
            },
        )

    def _record(
        self, name: str, start_ns: int, end_ns: int, more: Attributes, events: list[tuple[str, int, Attributes]] | None = None
    ) -> None:
        self._telemetry.record_span(name, start_ns, end_ns, {**self._attributes, **more}, parent=self._parent, events=events or ())
