"""A model without torch whose answers prove that its KV is right, and the small things a core needs around it."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from kvrelay.values import SamplingParams
from services.engine.api import EngineEvent, EngineRequest
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.core import EngineCore, StepEntry
from services.engine.scheduling.schedule_log import ScheduleLog
from services.engine.scheduling.scheduler import SchedulerLimits, StepPlan
from services.engine.scheduling.step_cost import StepCostLearner, StepShape
from services.engine.scheduling.validation import RequestLimits

FINGERPRINT = b"f" * 32
EOS = 0
VOCAB_SIZE = 257


@cache
def byte_tokens() -> TokenBytes:
    """Token 0 is special and has no text; token n is the byte n - 1."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + index) for index, byte in enumerate(others)}
    vocab = {"<eos>": EOS} | {letters[byte]: byte + 1 for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True, normalized=False)])
    return TokenBytes(tokenizer)


def ids_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


@dataclass(frozen=True, slots=True)
class FakeDrawn:
    token_id: int
    logprob: float | None = None
    top: Sequence[tuple[int, float]] = ()


class FakeModel:
    """ "KV" is the token id itself, kept by (page, slot): a row is a hash of what the pages say the sequence is.

    One wrong, stale or shared-too-early page and the answer differs from `expected_answer`.
    """

    def __init__(self, num_pages: int, block_size: int) -> None:
        self.block_size = block_size
        self.cells: list[list[int | None]] = [[None] * block_size for _ in range(num_pages)]
        self.steps: list[list[StepEntry]] = []
        self.broken = False
        self.poisoned: set[int] = set()
        """Last tokens for which drawing raises."""
        self.script: dict[tuple[int, ...], list[int]] = {}
        """Answers set by hand, by prompt."""

    def forward(self, entries: Sequence[StepEntry]) -> list[tuple[int, ...]]:
        if self.broken:
            raise RuntimeError("the device is gone")
        self.steps.append([StepEntry(tuple(e.token_ids), e.start, tuple(e.pages), e.sample) for e in entries])
        rows = []
        for entry in entries:
            for offset, token_id in enumerate(entry.token_ids):
                page, slot = divmod(entry.start + offset, self.block_size)
                self.cells[entry.pages[page]][slot] = token_id
        for entry in entries:
            if entry.sample:
                end = entry.start + len(entry.token_ids)
                rows.append(self.read(entry.pages, end))
        return rows

    def read(self, pages: Sequence[int], tokens: int) -> tuple[int, ...]:
        """The tokens whose KV the pages hold."""
        found = [self.cells[pages[at // self.block_size]][at % self.block_size] for at in range(tokens)]
        assert None not in found, "KV that nobody wrote was read"
        return tuple(cell for cell in found if cell is not None)

    def sample(
        self,
        row: tuple[int, ...],
        params: SamplingParams,
        *,
        index: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        blocked_ids: Collection[int],
    ) -> FakeDrawn:
        assert row == (*prompt_ids, *output_ids), "the pages hold another sequence's KV"
        assert index == len(output_ids)
        if row[-1] in self.poisoned:
            raise ValueError("no finite logit")
        scripted = self.script.get(tuple(prompt_ids))
        token_id = scripted[index] if scripted is not None else draw(row, params.seed)
        while token_id in blocked_ids:
            token_id = (token_id + 1) % VOCAB_SIZE
        return FakeDrawn(token_id, *(((-0.5, ((token_id, -0.5),))) if params.logprobs else ()))


def draw(tokens: Sequence[int], seed: int) -> int:
    """The token after `tokens`: ends one answer in about thirty tokens."""
    value = int.from_bytes(hashlib.sha256(repr((tuple(tokens), seed)).encode()).digest()[:4], "little")
    return EOS if value % 31 == 0 else 1 + value % (VOCAB_SIZE - 1)


@dataclass
class LinearCost:
    """Milliseconds: a token costs 1, a position seen 0.05. Notes what it is told."""

    known: bool = True
    observed: list[tuple[StepShape, float]] = field(default_factory=list)

    def predict_s(self, shape: StepShape) -> float | None:
        positions = shape.prefill_context + shape.decode_context
        return (shape.prefill_tokens + shape.decode_seqs + 0.05 * positions) / 1e3 if self.known else None

    def observe(self, shape: StepShape, seconds: float) -> None:
        self.observed.append((shape, seconds))


def expected_answer(request: EngineRequest) -> list[int]:
    """The answer a request must get, whoever else is there: ids up to its end (stop strings not considered)."""
    ends = {*request.stop.token_ids} | (set() if request.stop.ignore_eos else {EOS})
    output: list[int] = []
    while len(output) < (1 if request.prefill_only else request.stop.max_tokens):
        token_id = draw((*request.token_ids, *output), request.sampling.seed)
        while len(output) < request.sampling.min_tokens and token_id in ends:
            token_id = (token_id + 1) % VOCAB_SIZE
        output.append(token_id)
        if token_id in ends:
            break
    return output


@dataclass
class Bench:
    """A core over the fake model, with a clock that counts, and every event it gave, by request."""

    num_pages: int = 128
    block_size: int = 4
    max_num_batched_tokens: int = 32
    max_num_seqs: int = 8
    max_waiting: int = 16
    max_context_tokens: int = 512
    policy: str = "chunked"
    tbt_objective_ms: float = 0.0
    prefill_order: str = "fcfs"
    cost: StepCostLearner | None = None
    explain_schedule: Path | None = None
    plans: list[StepPlan] = field(default_factory=list)
    events: dict[str, list[EngineEvent]] = field(default_factory=dict)
    order: list[tuple[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = FakeModel(self.num_pages, self.block_size)
        self.blocks = BlockManager(self.num_pages, self.block_size, FINGERPRINT)
        limits = SchedulerLimits(
            self.max_num_batched_tokens, self.max_num_seqs, self.max_waiting, self.policy, self.tbt_objective_ms, self.prefill_order
        )
        self.core = EngineCore(
            self.model,
            byte_tokens(),
            self.blocks,
            limits,
            RequestLimits(VOCAB_SIZE, self.max_context_tokens, self.num_pages * self.block_size),
            [EOS],
            self.cost,
            ScheduleLog(self.explain_schedule, limits, self.blocks) if self.explain_schedule else None,
        )
        self.scheduler = self.core._scheduler
        self._plan = self.scheduler.plan
        self.scheduler.plan = self._noted_plan  # type: ignore[method-assign]
        self._now = 0

    def _noted_plan(self) -> StepPlan:
        self.plans.append(self._plan())
        return self.plans[-1]

    def clock(self) -> int:
        self._now += 1
        return self._now

    def add(self, request: EngineRequest) -> str:
        self.core.add(request, self.clock())
        return request.request_id

    def resume(self, request_id: str, imported_tokens: int, first_token: int | None = None) -> None:
        self.core.resume(request_id, imported_tokens, first_token, self.clock())

    def step(self) -> list[tuple[str, EngineEvent]]:
        events = self.core.step(self.clock)
        for request_id, event in events:
            self.events.setdefault(request_id, []).append(event)
            self.order.append((request_id, type(event).__name__))
        self.core.check_integrity()
        return events

    def run(self, limit: int = 10_000) -> None:
        """Steps until there is nothing to do."""
        for _ in range(limit):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the core never came to rest")

    def of(self, request_id: str, kind: type) -> list:
        return [event for event in self.events.get(request_id, []) if isinstance(event, kind)]
