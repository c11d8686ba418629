"""Who computes what in the next step: continuous batching with chunked prefill (Sarathi-Serve, 2024). Pure, deterministic.

Decodes go first, one token each; what is left of the token budget goes to prompts, first come first served. Pages are reserved
for a request's whole life when it is admitted, so nothing is ever preempted. Admission is strictly in order: a request that
does not fit yet blocks the later ones, and so cannot starve.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.errors import ConfigError, OverloadedError
from services.engine.block_manager import BlockManager
from services.engine.sequence import Phase, SequenceState

RETRY_AFTER_S = 1.0
"""Hint for a request that found the waiting queue full."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue."""

    max_num_batched_tokens: int = 256
    """Tokens of one step, all requests together."""
    max_num_seqs: int = 32
    """Requests that take part in one step. Held ones do not count: they only take pages."""
    max_waiting: int = 128
    """Requests without pages; more are refused."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs must be from 1 to max_num_batched_tokens, got {self.max_num_seqs} and {self.max_num_batched_tokens}"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be 1 or more, got {self.max_waiting}")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in the next step."""

    sequence: SequenceState
    start: int
    end: int
    draws: bool
    """The chunk ends with the newest token: the next one is drawn from it."""


class Scheduler:
    """Holds every live sequence that is not finished: waiting, held or running (prefilling and decoding)."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager) -> None:
        self._limits = limits
        self._blocks = blocks
        self.waiting: OrderedDict[str, SequenceState] = OrderedDict()
        self.held: dict[str, SequenceState] = {}
        self.running: OrderedDict[str, SequenceState] = OrderedDict()
        """In order of readiness."""
        self._stuck_at = -1
        """Version of the block manager at which the first waiting request did not fit."""

    def enqueue(self, sequence: SequenceState) -> None:
        """Raises `OverloadedError` when `max_waiting` requests wait already."""
        if len(self.waiting) >= self._limits.max_waiting:
            raise OverloadedError(f"{len(self.waiting)} requests are waiting", retry_after_s=RETRY_AFTER_S, waiting=len(self.waiting))
        self.waiting[sequence.request_id] = sequence

    def admit(self) -> Iterator[SequenceState]:
        """Reserves pages for waiting requests in order, until one does not fit; yields those admitted."""
        while self.can_admit:
            request_id, sequence = next(iter(self.waiting.items()))
            if not self._blocks.reserve(sequence.table, sequence.reserved_tokens):
                self._stuck_at = self._blocks.version
                return
            del self.waiting[request_id]
            sequence.computed = sequence.cached_tokens = sequence.table.shared * self._blocks.block_size
            sequence.move(Phase.HELD if sequence.request.hold else Phase.PREFILLING)
            (self.held if sequence.request.hold else self.running)[request_id] = sequence
            yield sequence

    @property
    def can_admit(self) -> bool:
        """Whether trying to admit the first waiting request may change anything.

        One that is to be computed is admitted no earlier than a step has tokens left for it: by then those before it have
        published their blocks, and a prefix that many requests share is computed once.
        """
        if not self.waiting or self._stuck_at == self._blocks.version:
            return False
        if next(iter(self.waiting.values())).request.hold:
            return True
        prefill_left = sum(sequence.prefill_left for sequence in self.running.values())
        return len(self.running) < self._limits.max_num_seqs and prefill_left < self._limits.max_num_batched_tokens

    def resume(self, sequence: SequenceState, phase: Phase) -> None:
        """Ends a hold: the sequence queues behind those that run."""
        del self.held[sequence.request_id]
        sequence.move(phase)
        self.running[sequence.request_id] = sequence

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out of the queues, wherever it is; its pages are the caller's business."""
        if self.waiting.pop(sequence.request_id, None):
            self._stuck_at = -1
        self.held.pop(sequence.request_id, None)
        self.running.pop(sequence.request_id, None)

    def plan(self) -> list[Chunk]:
        """The next step: at most `max_num_batched_tokens` tokens of the first `max_num_seqs` running sequences."""
        batch = list(itertools.islice(self.running.values(), self._limits.max_num_seqs))
        chunks = [Chunk(each, each.computed, each.computed + 1, draws=True) for each in batch if each.phase is Phase.DECODING]
        budget = self._limits.max_num_batched_tokens - len(chunks)
        for sequence in batch:
            if sequence.phase is Phase.PREFILLING and budget:
                end = self._chunk_end(sequence, budget)
                chunks.append(Chunk(sequence, sequence.computed, end, draws=end == sequence.prompt_tokens))
                budget -= end - sequence.computed
        return chunks

    def _chunk_end(self, sequence: SequenceState, budget: int) -> int:
        """Whole blocks where possible: a block that a chunk finishes can be handed over at once."""
        end = sequence.computed + budget
        if end >= sequence.prompt_tokens:
            return sequence.prompt_tokens
        aligned = end - end % self._blocks.block_size
        return aligned if aligned > sequence.computed else end
