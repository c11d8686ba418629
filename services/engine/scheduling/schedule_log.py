"""`--explain-schedule`: a line of JSON for each step, saying who computed what, who did not, and why. `kvrelay schedule` draws it.

The first line of each start describes the engine. A step's line is written when it is over, at once, and costs as much as the step
has requests. A file stops growing at `MAX_BYTES`; one that cannot be written to any more is given up, never the engine.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from kvrelay.errors import ConfigError
from kvrelay.schedule_report import FORMAT
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.policies import Chunk
from services.engine.scheduling.scheduler import Scheduler, SchedulerLimits, StepPlan
from services.engine.scheduling.sequence import Phase, SequenceState

log = logging.getLogger(__name__)

MAX_BYTES = 256 << 20
MAX_NAMED = 16
"""Waiting requests named in a line; the others are counted."""


class ScheduleLog:
    """Owned by the thread that steps the engine."""

    def __init__(self, path: Path, limits: SchedulerLimits, blocks: BlockManager) -> None:
        """Appends to `path`, whose folder is made if need be. Raises `ConfigError` when it cannot be written."""
        self._path = path
        self._limits = limits
        self._blocks = blocks
        self._step = 0
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO | None = path.open("a", encoding="ascii", buffering=1)
            self._size_bytes = self._file.tell()
            if self._size_bytes:
                # The last life may have ended in the middle of a line.
                self._file.write("\n")
        except OSError as error:
            raise ConfigError(f"explain_schedule: {path} cannot be written: {error.strerror}") from error
        self._write(
            {
                "kvrelay_schedule": FORMAT,
                "policy": limits.policy,
                "max_num_batched_tokens": limits.max_num_batched_tokens,
                "max_num_seqs": limits.max_num_seqs,
                "tbt_objective_ms": limits.tbt_objective_ms,
                "prefill_order": limits.prefill_order,
                "block_size": blocks.block_size,
                "pages": blocks.num_pages,
            }
        )

    def describe(self, scheduler: Scheduler, plan: StepPlan, admitted: Sequence[SequenceState], expected_s: float | None) -> dict[str, Any]:
        """The line of a step that is planned and not computed yet."""
        self._step += 1
        return {
            "step": self._step,
            "expected_s": expected_s,
            "prefill_budget": plan.prefill_budget,
            "budget_why": plan.why,
            "chunks": [_chunk(chunk, scheduler.decodes_why) for chunk in plan.chunks],
            "left_out": self._left_out(scheduler, plan),
            "waiting": len(scheduler.waiting),
            "waiting_for": [[sequence.request_id, why] for sequence, why in itertools.islice(scheduler.waiting_for(plan), MAX_NAMED)],
            "admitted": [[sequence.request_id, sequence.table.shared * self._blocks.block_size] for sequence in admitted],
            "preempted": [[sequence.request_id, sequence.lost_tokens] for sequence in plan.preempted],
            "held": len(scheduler.held),
            "free_pages": self._blocks.free_pages,
            "cached_pages": self._blocks.cached_pages,
            "held_pages": self._blocks.held_pages,
        }

    def write(self, line: dict[str, Any], started_ns: int, seconds: float) -> None:
        """Ends a step's line: when it began, and how long it took."""
        self._write({"t_ns": started_ns, "seconds": seconds, **line})

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()

    def _left_out(self, scheduler: Scheduler, plan: StepPlan) -> list[list[str]]:
        """Running requests without a part in the step."""
        taken = {chunk.sequence.request_id for chunk in plan.chunks}
        found = []
        for place, sequence in enumerate(sorted(scheduler.running.values(), key=lambda each: each.arrival)):
            if sequence.request_id in taken:
                continue
            if place >= self._limits.max_num_seqs:
                why = "max_num_seqs"
            elif sequence.phase is Phase.PREFILLING:
                why = plan.why
            else:
                why = "no pages" if plan.shape.decode_seqs or not plan.chunks else plan.why
            found.append([sequence.request_id, why])
        return found

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return
        text = json.dumps(line, separators=(",", ":")) + "\n"
        self._size_bytes += len(text)
        try:
            self._file.write(text)
        except OSError as error:
            log.warning("%s is written no more: %s", self._path, error)
            self.close()
        if self._size_bytes >= MAX_BYTES:
            log.warning("%s is written no more: it has grown to %d bytes", self._path, self._size_bytes)
            self.close()


def _chunk(chunk: Chunk, decodes_why: str) -> dict[str, Any]:
    sequence = chunk.sequence
    line: dict[str, Any] = {"id": sequence.request_id, "start": chunk.start, "end": chunk.end}
    if sequence.phase is Phase.DECODING:
        return line | {"kind": "decode", "why": decodes_why}
    recomputed = max(0, min(chunk.end, sequence.lost_tokens) - chunk.start)
    why = "recompute after preemption" if recomputed else "completes its tokens" if chunk.draws else "fills the budget"
    return line | {"kind": "prefill", "of": len(sequence.token_ids), "recomputed": recomputed, "why": why}
