"""One request inside the engine: its tokens, how much of them is computed, and the phase it is in. Pure."""

from __future__ import annotations

import enum

from kvrelay.values import FinishReason, Usage, WorkerMarks
from services.engine.api import EngineRequest
from services.engine.sampling.detokenizer import AnswerText
from services.engine.scheduling.block_manager import BlockTable


class Phase(enum.Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """No pages: not admitted yet, or preempted."""
    HELD = "held"
    """Pages reserved; somebody imports KV into them."""
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    """Answered, failed or given up; the pages stay until the release."""


_NEXT = {
    Phase.WAITING: {Phase.HELD, Phase.PREFILLING, Phase.FINISHED},
    Phase.HELD: {Phase.PREFILLING, Phase.DECODING, Phase.FINISHED},
    Phase.PREFILLING: {Phase.WAITING, Phase.DECODING, Phase.FINISHED},
    Phase.DECODING: {Phase.WAITING, Phase.FINISHED},
    Phase.FINISHED: set(),
}


class SequenceState:
    """State of one request. Created waiting; only `move` changes the phase."""

    __slots__ = (
        "admitted_ns", "answer", "arrival", "cached_tokens", "computed", "decode_start_ns", "end_ids", "end_ns", "imported_tokens",
        "kv_ready_ns", "lost_tokens", "output_ids", "phase", "preemptions", "prefill_end_ns", "prefill_start_ns", "prompt_tokens",
        "received_ns", "reported_tokens", "request", "request_id", "table", "token_ids", "work_before",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, table: BlockTable, answer: AnswerText, eos_ids: frozenset[int], received_ns: int) -> None:
        self.request = request
        self.request_id = request.request_id
        self.table = table
        self.answer = answer
        self.end_ids = frozenset(request.stop.token_ids) | (frozenset() if request.stop.ignore_eos else eos_ids)
        """Tokens that end the answer, and cannot be drawn before `min_tokens`."""
        self.phase = Phase.WAITING
        self.prompt_tokens = len(request.token_ids)
        self.token_ids = list(request.token_ids)
        """Prompt and answer. While it prefills all of them are to be computed, while it decodes the last one."""
        self.output_ids: list[int] = []
        self.computed = 0
        """KV of tokens [0, computed) is in the pages."""
        self.reported_tokens = 0
        """Prompt tokens that a `PrefillProgress` has told of: what is computed again after a preemption is not told again."""
        self.preemptions = 0
        """How often its pages were taken away."""
        self.lost_tokens = 0
        """Tokens that were computed when its pages were taken away: computing them again is the price."""
        self.arrival = 0
        """Its number in order of arrival, given by the scheduler: the smaller, the older."""
        self.work_before = 0
        """Prompt tokens the scheduler had planned when it arrived."""
        self.cached_tokens = 0
        """Leading prompt tokens found in the own prefix cache."""
        self.imported_tokens = 0
        """Leading prompt tokens whose KV was imported to spare computing them (not handed over with a first token)."""
        self.received_ns = received_ns
        self.admitted_ns = self.prefill_start_ns = self.prefill_end_ns = self.kv_ready_ns = self.decode_start_ns = self.end_ns = 0

    def move(self, phase: Phase) -> None:
        """The one place where the phase changes; an illegal step is a bug."""
        assert phase in _NEXT[self.phase], f"request {self.request_id}: no way from {self.phase.value} to {phase.value}"
        self.phase = phase

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV this request may need in the end: the last token drawn is never fed back."""
        return self.prompt_tokens if self.request.prefill_only else self.prompt_tokens + self.request.stop.max_tokens - 1

    @property
    def preemptible(self) -> bool:
        """Whether its pages may be taken away. Those of a prompt computed for others may be read at any moment."""
        return not self.request.prefill_only and self.phase in (Phase.PREFILLING, Phase.DECODING)

    @property
    def prefill_left(self) -> int:
        """Tokens to compute before the next one can be drawn, unless it decodes; those of a preempted answer among them."""
        return len(self.token_ids) - self.computed if self.phase in (Phase.WAITING, Phase.PREFILLING) else 0

    @property
    def decode_left(self) -> int:
        """Tokens still to draw, at most."""
        if self.phase is Phase.FINISHED:
            return 0
        return (1 if self.request.prefill_only else self.request.stop.max_tokens) - len(self.output_ids)

    @property
    def blocked_ids(self) -> frozenset[int]:
        """Ids that may not be drawn next."""
        return self.end_ids if len(self.output_ids) < self.request.sampling.min_tokens else frozenset()

    def append(self, token_id: int) -> tuple[str, FinishReason | None]:
        """Takes the next token of the answer; returns the text that is final with it and, if it ends the answer, why."""
        self.token_ids.append(token_id)
        self.output_ids.append(token_id)
        if token_id in self.end_ids:
            return self.answer.finish()[0], FinishReason.STOP
        text, stopped = self.answer.push(token_id)
        if stopped:
            return text, FinishReason.STOP
        if len(self.output_ids) < self.request.stop.max_tokens:
            return text, None
        rest, stopped = self.answer.finish()
        return text + rest, FinishReason.STOP if stopped else FinishReason.LENGTH

    def mark_step(self, started_ns: int) -> None:
        """Notes the first step towards the first token, and towards the second; `started_ns` is when the step began."""
        if self.output_ids:
            self.decode_start_ns = self.decode_start_ns or started_ns
        else:
            self.prefill_start_ns = self.prefill_start_ns or started_ns

    def usage(self) -> Usage:
        cached = max(self.cached_tokens, self.imported_tokens)
        return Usage(prompt_tokens=self.prompt_tokens, cached_tokens=cached, completion_tokens=len(self.output_ids))

    def marks(self) -> WorkerMarks:
        return WorkerMarks(
            received=self.received_ns,
            admitted=self.admitted_ns,
            prefill_start=self.prefill_start_ns,
            prefill_end=self.prefill_end_ns,
            kv_ready=self.kv_ready_ns,
            decode_start=self.decode_start_ns,
            end=self.end_ns,
        )
