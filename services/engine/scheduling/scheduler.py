"""Who computes what in the next step: continuous batching over paged KV. Pure, deterministic.

A policy (`policies.py`) says how a step is filled; here is who may take part, and where the pages come from.

- Admission is strictly in order and reserves the pages of the tokens that are known: a request that does not fit yet blocks the
  later ones, and so cannot starve. It leaves a page to everybody who still grows.
- Answers grow page by page. When no page is left, cached blocks are evicted; when none is left either, the newest running request
  is preempted: it waits in front of all others, and computes its tokens again. The oldest never is, so that somebody always
  finishes; if it cannot grow, it waits with its pages until a held or finished request gives up its own.
- Requests that only prefill have all their pages from the start and are never preempted: others read them while they are computed.
  Nor are held ones, into whose pages others write.
- Of more running requests than fit a step the oldest take part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvrelay.errors import ConfigError, OverloadedError
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.policies import Chunk, Filling, make_policy, prefill_order
from services.engine.scheduling.sequence import Phase, SequenceState
from services.engine.scheduling.step_cost import StepCostLearner, StepShape

RETRY_AFTER_S = 1.0
"""Hint for a request that found the waiting queue full."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step and of the queue, and how a step is filled."""

    max_num_batched_tokens: int = 256
    """Tokens of one step, all requests together."""
    max_num_seqs: int = 32
    """Requests that take part in one step. Held ones do not count: they only take pages."""
    max_waiting: int = 128
    """Requests without pages; more are refused."""
    policy: str = "chunked"
    """One of `policies.POLICIES`."""
    tbt_objective_ms: float = 0.0
    """Policy dynamic: how long a step may be expected to take."""
    prefill_order: str = "fcfs"
    """One of `policies.ORDERS`."""

    def __post_init__(self) -> None:
        if not 1 <= self.max_num_seqs <= self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs must be from 1 to max_num_batched_tokens, got {self.max_num_seqs} and {self.max_num_batched_tokens}"
            )
        if self.max_waiting < 1:
            raise ConfigError(f"max_waiting must be 1 or more, got {self.max_waiting}")
        make_policy(self.policy, self.max_num_batched_tokens, self.tbt_objective_ms, None)
        prefill_order(self.prefill_order)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The next step. Without chunks nothing can be computed now."""

    chunks: list[Chunk]
    """Decodes, then prompts; each sequence once."""
    shape: StepShape
    prefill_budget: int
    """Prompt tokens that might have been taken."""
    why: str
    """What set that budget."""
    preempted: list[SequenceState]
    """Lost their pages to older ones."""


class Scheduler:
    """Holds every live sequence that is not finished: waiting, held or running (prefilling and decoding)."""

    def __init__(self, limits: SchedulerLimits, blocks: BlockManager, cost: StepCostLearner | None = None) -> None:
        self._limits = limits
        self._blocks = blocks
        self._policy = make_policy(limits.policy, limits.max_num_batched_tokens, limits.tbt_objective_ms, cost)
        self._order = prefill_order(limits.prefill_order)
        self.waiting: dict[str, SequenceState] = {}
        self.held: dict[str, SequenceState] = {}
        self.running: dict[str, SequenceState] = {}
        self._arrivals = 0
        self._prefill_planned = 0
        """Prompt tokens of all plans so far."""
        self._stuck_at = self._stalled_at = -1
        """Version of the block manager at which the first waiting request did not fit, and at which nothing running could go on."""

    def enqueue(self, sequence: SequenceState) -> None:
        """Raises `OverloadedError` when `max_waiting` requests wait already."""
        if len(self.waiting) >= self._limits.max_waiting:
            raise OverloadedError(f"{len(self.waiting)} requests are waiting", retry_after_s=RETRY_AFTER_S, waiting=len(self.waiting))
        self._arrivals += 1
        sequence.arrival = self._arrivals
        sequence.work_before = self._prefill_planned
        self.waiting[sequence.request_id] = sequence
        self._stuck_at = -1

    def admit(self) -> Iterator[SequenceState]:
        """Reserves pages for waiting requests in order, until one does not fit; yields those admitted, for the first time or again."""
        while self.can_admit:
            sequence = self._first_waiting()
            growing = sum(1 for each in (*self.held.values(), *self.running.values()) if self._grows(each))
            if not self._blocks.reserve(sequence.table, growing + self._grows(sequence) if growing else 0):
                self._stuck_at = self._blocks.version
                return
            del self.waiting[sequence.request_id]
            sequence.computed = sequence.table.shared * self._blocks.block_size
            if not sequence.preemptions:
                sequence.cached_tokens = sequence.computed
            hold = sequence.request.hold and not sequence.preemptions
            sequence.move(Phase.HELD if hold else Phase.PREFILLING)
            (self.held if hold else self.running)[sequence.request_id] = sequence
            yield sequence

    @property
    def can_admit(self) -> bool:
        """Whether trying to admit the first waiting request may change anything."""
        return bool(self.waiting) and self._stuck_at != self._blocks.version and not self._no_turn()

    @property
    def can_run(self) -> bool:
        """Whether a running request may go on."""
        return bool(self.running) and self._stalled_at != self._blocks.version

    def resume(self, sequence: SequenceState, phase: Phase) -> None:
        """Ends a hold: the sequence runs."""
        del self.held[sequence.request_id]
        sequence.move(phase)
        self.running[sequence.request_id] = sequence
        self._stalled_at = -1

    def remove(self, sequence: SequenceState) -> None:
        """Takes a sequence out of the queues, wherever it is; its pages are the caller's business."""
        for queue in (self.waiting, self.held, self.running):
            queue.pop(sequence.request_id, None)
        self._stuck_at = self._stalled_at = -1

    def plan(self) -> StepPlan:
        """The next step: at most `max_num_batched_tokens` tokens of the oldest `max_num_seqs` running sequences.

        Only under policy whole may a step be longer: by its first prompt.
        """
        batch = sorted(self.running.values(), key=lambda sequence: sequence.arrival)[: self._limits.max_num_seqs]
        prompts = any(sequence.phase is Phase.PREFILLING for sequence in batch)
        chunks: list[Chunk] = []
        preempted: list[SequenceState] = []
        if self._policy.takes_decodes(prompts=prompts):
            for sequence in batch:
                # From the oldest on, so that whoever is preempted has no part in the step yet.
                if sequence.phase is Phase.DECODING and self._grow(sequence, preempted):
                    chunks.append(Chunk(sequence, sequence.computed, sequence.computed + 1, draws=True))
        shape = StepShape(decode_seqs=len(chunks), decode_context=sum(chunk.end for chunk in chunks))
        prefills = sorted((sequence for sequence in batch if sequence.phase is Phase.PREFILLING), key=self._order)
        budget, why = self._policy.budget(shape, lambda budget: self._fill(prefills, budget)) if prefills else (0, "no prompts")
        for chunk in self._fill(prefills, budget):
            chunks.append(chunk)
            shape = shape.with_chunk(chunk.start, chunk.end)
        self._prefill_planned += shape.prefill_tokens
        self._stalled_at = -1 if chunks else self._blocks.version
        return StepPlan(chunks, shape, budget, why, preempted)

    def waiting_for(self, plan: StepPlan) -> Iterator[tuple[SequenceState, str]]:
        """Waiting requests in order, each with what it waits for after that plan: for people."""
        for place, sequence in enumerate(sorted(self.waiting.values(), key=self._order)):
            if sequence in plan.preempted:
                yield sequence, "preempted"
            elif place == 0:
                yield sequence, self._no_turn() or "pages"
            else:
                yield sequence, "its turn"

    @property
    def decodes_why(self) -> str:
        """Why decodes take part in a step: for people."""
        return self._policy.decodes_why

    def _no_turn(self) -> str:
        """What keeps the first waiting request from running now, though it may have the pages; '' if nothing does.

        One that is to be computed is admitted no earlier than a step has tokens left for it: by then those before it have
        published their blocks, and a prefix that many requests share is computed once.
        """
        first = self._first_waiting()
        if first.request.hold and not first.preemptions:
            return ""
        rank = self._order(first)
        before = sum(each.prefill_left for each in self.running.values() if each.phase is Phase.PREFILLING and self._order(each) < rank)
        if len(self.running) >= self._limits.max_num_seqs:
            return "max_num_seqs"
        return "budget" if before >= self._limits.max_num_batched_tokens else ""

    def _first_waiting(self) -> SequenceState:
        return min(self.waiting.values(), key=self._order)

    def _grows(self, sequence: SequenceState) -> bool:
        """Whether it may need more pages than those of the tokens it has now."""
        known = len(sequence.table.pages) or self._blocks.blocks_for(len(sequence.token_ids))
        return self._blocks.blocks_for(sequence.kv_tokens) > known

    def _grow(self, sequence: SequenceState, preempted: list[SequenceState]) -> bool:
        """A page for the sequence's next token, if need be somebody else's; False if it cannot have one, or has lost its own."""
        while not self._blocks.grow(sequence.table, sequence.computed + 1):
            able = sorted((each for each in self.running.values() if each.preemptible), key=lambda each: each.arrival)
            if able == [sequence]:
                return False
            self._preempt(able[-1])
            preempted.append(able[-1])
            if able[-1] is sequence:
                return False
        return True

    def _preempt(self, sequence: SequenceState) -> None:
        """Takes its pages; what it had published stays cached, and is found again if nobody else needs the pages before."""
        del self.running[sequence.request_id]
        self._blocks.free(sequence.table)
        sequence.table = self._blocks.open(sequence.token_ids, sequence.request.cache_salt)
        sequence.lost_tokens = max(sequence.lost_tokens, sequence.computed)
        sequence.computed = 0
        sequence.preemptions += 1
        sequence.move(Phase.WAITING)
        self.waiting[sequence.request_id] = sequence

    def _fill(self, prefills: list[SequenceState], budget: int) -> list[Chunk]:
        return Filling(budget, self._policy.cut, self._limits.max_num_batched_tokens, self._blocks.block_size).fill(prefills)
