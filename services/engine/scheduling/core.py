"""The engine without threads and clocks: scheduler, block manager and model, driven one step at a time.

A step: admit -> plan -> one forward over the whole ragged batch -> draw -> publish finished blocks -> events.
Publishing after the step (as nano-vllm does) is what keeps the prefix cache from ever holding KV that is not written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvrelay.errors import InternalError, InvalidRequestError, InvalidTokenIdError, KvRelayError
from kvrelay.values import FinishReason, SamplingParams, Token, TokenLogprob
from services.engine.api import (
    Admitted,
    BlockChanges,
    EngineEvent,
    EngineLoad,
    EngineRequest,
    Failed,
    Finished,
    PrefillProgress,
    TokenDrawn,
)
from services.engine.sampling.detokenizer import AnswerText, TokenBytes
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.schedule_log import ScheduleLog
from services.engine.scheduling.scheduler import Scheduler, SchedulerLimits, StepPlan
from services.engine.scheduling.sequence import Phase, SequenceState
from services.engine.scheduling.step_cost import StepCostLearner
from services.engine.scheduling.validation import RequestLimits
from services.runtime.offloop import assert_off_loop

log = logging.getLogger(__name__)

Clock = Callable[[], int]
"""Nanoseconds since the epoch."""


@dataclass(frozen=True, slots=True)
class StepEntry:
    """The next tokens of one sequence in a step."""

    token_ids: Sequence[int]
    start: int
    """Absolute position of the first; KV of all earlier positions is in `pages`."""
    pages: Sequence[int]
    sample: bool
    """Whether the logits of the last token are wanted."""


class Drawn(Protocol):
    """A drawn token, as the sampler describes it."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class ModelPort(Protocol):
    """The model and the pool behind it. What a row of logits is, only the model knows."""

    def forward(self, entries: Sequence[StepEntry]) -> Iterable[Any]:
        """Writes the KV of all tokens into the pages; one row of logits for each entry with `sample`, in order. Blocks."""
        ...

    def sample(
        self,
        row: Any,
        params: SamplingParams,
        *,
        index: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        blocked_ids: Collection[int],
    ) -> Drawn:
        """Draws token `index` of the answer, never one of `blocked_ids`."""
        ...


class EngineCore:
    """All live requests of one engine. Synchronous; owned by one thread; the clock is handed in."""

    def __init__(
        self,
        model: ModelPort,
        token_bytes: TokenBytes,
        blocks: BlockManager,
        scheduling: SchedulerLimits,
        limits: RequestLimits,
        eos_ids: Collection[int],
        cost: StepCostLearner | None = None,
        schedule_log: ScheduleLog | None = None,
    ) -> None:
        self._model = model
        self._token_bytes = token_bytes
        self._blocks = blocks
        self._scheduler = Scheduler(scheduling, blocks, cost)
        self._cost = cost
        self._schedule_log = schedule_log
        self._limits = limits
        self._eos_ids = frozenset(eos_ids)
        self.preemptions = 0
        """How often a request has lost its pages to an older one, so far."""
        self._live: dict[str, SequenceState] = {}
        self._pending: list[tuple[str, EngineEvent]] = []

    def add(self, request: EngineRequest, now_ns: int) -> None:
        """Queues a request. Raises the `InvalidRequestError`s of `RequestLimits.check`, and `OverloadedError`."""
        assert_off_loop("hashing a prompt")
        if request.request_id in self._live:
            raise InvalidRequestError(f"request {request.request_id} is already here", field="request_id")
        self._limits.check(request)
        table = self._blocks.open(request.token_ids, request.cache_salt)
        answer = AnswerText(self._token_bytes, request.stop.strings)
        sequence = SequenceState(request, table, answer, self._eos_ids, now_ns)
        self._scheduler.enqueue(sequence)
        self._live[request.request_id] = sequence

    def resume(self, request_id: str, imported_tokens: int, first_token: int | None, now_ns: int) -> None:
        """Ends a hold: KV of tokens [0, imported_tokens) was written into the pages and verified. See `EngineStream.resume`.

        With `first_token` the sequence goes on exactly as if it had drawn that token itself.
        """
        sequence = self._live[request_id]
        assert sequence.phase is Phase.HELD and 0 <= imported_tokens <= sequence.prompt_tokens
        sequence.computed = max(sequence.computed, imported_tokens)
        if first_token is None:
            # The first token is drawn from the last prompt token's logits, so that token is computed in any case.
            sequence.computed = min(sequence.computed, sequence.prompt_tokens - 1)
            sequence.imported_tokens = sequence.computed
            self._publish(sequence)
            self._scheduler.resume(sequence, Phase.PREFILLING)
            return
        assert imported_tokens == sequence.prompt_tokens and not sequence.request.prefill_only
        self._publish(sequence)
        self._scheduler.resume(sequence, Phase.DECODING)
        sequence.kv_ready_ns = now_ns
        if not 0 <= first_token < self._limits.vocab_size:
            error = InvalidTokenIdError(
                f"first token {first_token} is not in the vocabulary", token_id=first_token, vocab_size=self._limits.vocab_size
            )
            self._fail(sequence, error, self._pending)
            return
        _, reason = sequence.append(first_token)
        if reason is not None:
            sequence.end_ns = now_ns
            self._finish(sequence, reason, self._pending)

    def release(self, request_id: str) -> None:
        """Frees a request's pages, whatever it is doing; unknown ids are ignored. It has no events afterwards."""
        sequence = self._live.pop(request_id, None)
        if sequence is None:
            return
        self._end(sequence)
        self._blocks.free(sequence.table)
        self._pending = [pending for pending in self._pending if pending[0] != request_id]

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self._pending or self._scheduler.can_run or self._scheduler.can_admit)

    def step(self, clock: Clock, tell: Callable[[list[tuple[str, EngineEvent]]], None] | None = None) -> list[tuple[str, EngineEvent]]:
        """One step; the events it caused, in order. Errors of a request are its `Failed` event; nothing is raised for them.

        `tell` is given the events of admission before anything is computed: others prepare for the KV meanwhile.
        """
        events, self._pending = self._pending, []
        admitted = []
        for sequence in self._scheduler.admit():
            admitted.append(sequence)
            if not sequence.preemptions:
                sequence.admitted_ns = clock()
                events.append((sequence.request_id, Admitted(tuple(sequence.table.pages), sequence.cached_tokens)))
        if admitted and tell is not None:
            tell(events)
            events = []
        plan = self._scheduler.plan()
        self.preemptions += len(plan.preempted)
        if self._schedule_log is not None and (plan.chunks or plan.preempted or admitted or self._scheduler.running):
            expected_s = self._cost.predict_s(plan.shape) if self._cost is not None else None
            line = self._schedule_log.describe(self._scheduler, plan, admitted, expected_s)
            started = clock()
            self._compute(plan, clock, events)
            self._schedule_log.write(line, started, (clock() - started) / 1e9)
        else:
            self._compute(plan, clock, events)
        return events

    def close(self) -> None:
        """Ends the schedule's file; no step follows."""
        if self._schedule_log is not None:
            self._schedule_log.close()

    def load(self) -> EngineLoad:
        """A snapshot of the work and of the pool."""
        scheduler, blocks = self._scheduler, self._blocks
        admitted = [*scheduler.held.values(), *scheduler.running.values()]
        return EngineLoad(
            running=len(admitted),
            waiting=len(scheduler.waiting),
            prefill_backlog_tokens=sum(each.prefill_left for each in (*scheduler.waiting.values(), *admitted)),
            decode_backlog_tokens=sum(each.decode_left for each in admitted),
            total_pages=blocks.num_pages,
            free_pages=blocks.free_pages,
            cached_pages=blocks.cached_pages,
            held_pages=blocks.held_pages,
            claimed_pages=sum(max(0, blocks.blocks_for(each.kv_tokens) - len(each.table.pages)) for each in admitted),
        )

    def take_block_changes(self) -> BlockChanges:
        """Net changes of the prefix cache since the last call."""
        return self._blocks.changes.take()

    def check_integrity(self) -> None:
        """Raises AssertionError unless every page and every reference is explained by the live requests."""
        self._blocks.check_integrity(sequence.table for sequence in self._live.values())
        for sequence in self._live.values():
            if sequence.phase is not Phase.FINISHED:
                assert bool(sequence.table.pages) != (sequence.phase is Phase.WAITING), "pages without a turn, or a turn without pages"
            assert sequence.computed <= len(sequence.table.pages) * self._blocks.block_size, "more KV than pages"

    def _compute(self, plan: StepPlan, clock: Clock, events: list[tuple[str, EngineEvent]]) -> None:
        if not plan.chunks:
            return
        started, chunks = clock(), plan.chunks
        for chunk in chunks:
            chunk.sequence.mark_step(started)
        entries = [StepEntry(c.sequence.token_ids[c.start : c.end], c.start, c.sequence.table.pages, c.draws) for c in chunks]
        try:
            rows = iter(self._model.forward(entries))
        except Exception:
            log.exception("a step of %d requests failed", len(chunks))
            for chunk in chunks:
                self._fail(chunk.sequence, InternalError("the model failed in a step of this request"), events)
            return
        ended = clock()
        batch_tokens = sum(chunk.end - chunk.start for chunk in chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed = chunk.end
            if not sequence.output_ids and chunk.end > sequence.reported_tokens:
                sequence.reported_tokens = chunk.end
                events.append((sequence.request_id, PrefillProgress(chunk.end, started, ended, batch_tokens)))
            if not chunk.draws or self._draw(sequence, next(rows), clock, events):
                self._publish(sequence)
        if self._cost is not None:
            self._cost.observe(plan.shape, (clock() - started) / 1e9)

    def _draw(self, sequence: SequenceState, row: Any, clock: Clock, events: list[tuple[str, EngineEvent]]) -> bool:
        """Draws the next token; False if that failed (then the KV behind it is not trusted either)."""
        index = len(sequence.output_ids)
        try:
            drawn = self._model.sample(
                row,
                sequence.request.sampling,
                index=index,
                prompt_ids=sequence.request.token_ids,
                output_ids=sequence.output_ids,
                blocked_ids=sequence.blocked_ids,
            )
            text, reason = sequence.append(drawn.token_id)
        except KvRelayError as error:
            self._fail(sequence, error, events)
            return False
        except Exception:
            log.exception("drawing token %d failed", index, extra={"request_id": sequence.request_id})
            self._fail(sequence, InternalError("drawing a token failed"), events)
            return False
        now = sequence.end_ns = clock()
        if index == 0:
            sequence.prefill_end_ns = now
        if sequence.phase is Phase.PREFILLING:
            sequence.move(Phase.DECODING)
        top = tuple(TokenLogprob(token_id, logprob) for token_id, logprob in drawn.top)
        token = Token(index, drawn.token_id, text, drawn.logprob, top)
        events.append((sequence.request_id, TokenDrawn(token, now, reason)))
        if reason is not None or sequence.request.prefill_only:
            self._finish(sequence, reason, events)
        return True

    def _publish(self, sequence: SequenceState) -> None:
        self._blocks.publish(sequence.table, sequence.token_ids, sequence.computed)

    def _finish(self, sequence: SequenceState, reason: FinishReason | None, events: list[tuple[str, EngineEvent]]) -> None:
        self._end(sequence)
        events.append((sequence.request_id, Finished(reason, sequence.usage(), sequence.marks())))

    def _fail(self, sequence: SequenceState, error: KvRelayError, events: list[tuple[str, EngineEvent]]) -> None:
        self._end(sequence)
        events.append((sequence.request_id, Failed(error)))

    def _end(self, sequence: SequenceState) -> None:
        """No more computing for this one; its pages stay until the release."""
        self._scheduler.remove(sequence)
        if sequence.phase is not Phase.FINISHED:
            sequence.move(Phase.FINISHED)
