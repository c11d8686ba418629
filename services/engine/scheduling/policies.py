"""What a step takes: one small strategy for each scheduling policy, and the planning they share. Pure, deterministic.

- `whole`: a prompt is computed in one step, decodes ride along (Orca, 2022).
- `chunked`: decodes first, chunks of prompts fill the token budget (Sarathi-Serve, 2024).
- `dynamic`: as chunked, with the largest budget for which the step is expected to keep the objective for the time between tokens
  (Dynamic SplitFuse of DeepSpeed-FastGen, 2024, with a measured cost in place of a fixed size).
- `prefill-only`, `decode-only`: for the two sides of a split. Prompts and decodes never share a step; where a worker has both all
  the same, their steps alternate.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.errors import ConfigError
from services.engine.scheduling.sequence import SequenceState
from services.engine.scheduling.step_cost import StepCostLearner, StepShape

POLICIES = ("whole", "chunked", "dynamic", "decode-only", "prefill-only")
ORDERS = ("fcfs", "shortest")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be computed in the next step."""

    sequence: SequenceState
    start: int
    end: int
    draws: bool
    """The chunk ends with the newest token: the next one is drawn from it."""


class Cut(enum.Enum):
    """Which prompts may be computed in parts."""

    ANY = "any"
    LONG = "long"
    """Those longer than a whole step."""
    NONE = "none"
    """None: the first one of a step may exceed its budget."""


@dataclass(frozen=True, slots=True)
class Filling:
    """How prompts fill the rest of a step."""

    budget: int
    """Tokens."""
    cut: Cut
    step_tokens: int
    """Tokens of a whole step."""
    block_size: int

    def fill(self, sequences: Sequence[SequenceState]) -> list[Chunk]:
        """Chunks in the order of `sequences`; none overtakes one that was left out."""
        chunks: list[Chunk] = []
        budget = self.budget
        for sequence in sequences:
            if budget <= 0:
                break
            left = sequence.prefill_left
            if left <= budget or (self.cut is Cut.NONE and not chunks):
                end = sequence.computed + left
            elif self.cut is Cut.NONE or (self.cut is Cut.LONG and left <= self.step_tokens):
                break
            else:
                end = self._edge(sequence.computed, sequence.computed + budget)
            chunks.append(Chunk(sequence, sequence.computed, end, draws=end == len(sequence.token_ids)))
            budget -= end - sequence.computed
        return chunks

    def _edge(self, start: int, end: int) -> int:
        """Whole blocks where possible: a block that a chunk finishes can be handed over at once."""
        aligned = end - end % self.block_size
        return aligned if aligned > start else end


class Policy(Protocol):
    """Asked once a step: first whether decodes take part, then, with those that do, what prompts may add."""

    cut: Cut
    decodes_why: str
    """Why decodes take part in a step: for people."""

    def takes_decodes(self, *, prompts: bool) -> bool:
        """Whether decodes take part in this step; `prompts`: there are prompts to compute as well."""
        ...

    def budget(self, step: StepShape, fill: Callable[[int], list[Chunk]]) -> tuple[int, str]:
        """Prompt tokens that may join the decodes of `step`, and why so many. `fill` says which chunks a budget would give.

        At least 1 whenever `step` is empty: prompts never starve.
        """
        ...


class Chunked:
    """Decodes first; the rest of the token budget is for prompts."""

    cut = Cut.ANY
    decodes_why = "decodes first"

    def __init__(self, step_tokens: int) -> None:
        self._step_tokens = step_tokens

    def takes_decodes(self, *, prompts: bool) -> bool:
        return True

    def budget(self, step: StepShape, fill: Callable[[int], list[Chunk]]) -> tuple[int, str]:
        return self._step_tokens - step.decode_seqs, "token budget"


class Whole(Chunked):
    """As many whole prompts as fit the token budget, and the first one in any case."""

    cut = Cut.NONE
    decodes_why = "rides along"


class Dynamic(Chunked):
    """As many prompt tokens as the step's expected duration allows, one at least. Without an expectation: as chunked."""

    def __init__(self, step_tokens: int, objective_s: float, cost: StepCostLearner | None) -> None:
        super().__init__(step_tokens)
        self._objective_s = objective_s
        self._cost = cost

    def budget(self, step: StepShape, fill: Callable[[int], list[Chunk]]) -> tuple[int, str]:
        most, why = super().budget(step, fill)
        if self._cost is None or self._cost.predict_s(step) is None:
            return most, f"{why}: no step cost is known"
        if self._keeps(step, fill(most)):
            return most, why
        kept, too_many = 1, most
        while too_many - kept > 1:
            middle = (kept + too_many) // 2
            if self._keeps(step, fill(middle)):
                kept = middle
            else:
                too_many = middle
        return kept, "step time objective"

    def _keeps(self, step: StepShape, chunks: Sequence[Chunk]) -> bool:
        assert self._cost is not None
        for chunk in chunks:
            step = step.with_chunk(chunk.start, chunk.end)
        expected_s = self._cost.predict_s(step)
        return expected_s is None or expected_s <= self._objective_s


class Separate(Chunked):
    """Steps of decodes and steps of prompts, in turns where there are both."""

    cut = Cut.LONG
    decodes_why = "a step of decodes"

    def __init__(self, step_tokens: int) -> None:
        super().__init__(step_tokens)
        self._prompts_next = False

    def takes_decodes(self, *, prompts: bool) -> bool:
        self._prompts_next = self._prompts_next or not prompts
        return not (self._prompts_next and prompts)

    def budget(self, step: StepShape, fill: Callable[[int], list[Chunk]]) -> tuple[int, str]:
        self._prompts_next = step.decode_seqs > 0
        if self._prompts_next:
            return 0, "a step of decodes"
        return self._step_tokens, "a step of prompts"


def make_policy(name: str, step_tokens: int, tbt_objective_ms: float, cost: StepCostLearner | None) -> Policy:
    """The strategy of that name. Raises `ConfigError` for an unknown one, and for an objective that is missing or means nothing."""
    if name == "dynamic":
        if not 0 < tbt_objective_ms < float("inf"):
            raise ConfigError(f"policy dynamic needs tbt_objective_ms, over 0 milliseconds, got {tbt_objective_ms:g}")
        return Dynamic(step_tokens, tbt_objective_ms / 1e3, cost)
    if tbt_objective_ms != 0:
        raise ConfigError(f"tbt_objective_ms is for policy dynamic; with policy {name} it must be 0, got {tbt_objective_ms:g}")
    makers: dict[str, Callable[[int], Policy]] = {
        "whole": Whole,
        "chunked": Chunked,
        "decode-only": Separate,
        "prefill-only": Separate,
    }
    if name not in makers:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
    return makers[name](step_tokens)


Order = Callable[[SequenceState], tuple[int, ...]]


def prefill_order(name: str) -> Order:
    """A key by which prompts are admitted and computed, smallest first. Raises `ConfigError` for an unknown name.

    `shortest` counts what is left of a prompt from the work that was planned before it came. So once as many prompt tokens as it
    has itself were computed after its arrival, no later one overtakes it; preempted ones go before all.
    """
    if name == "fcfs":
        return lambda sequence: (sequence.arrival,)
    if name == "shortest":
        return lambda sequence: (
            0 if sequence.preemptions else 1,
            sequence.work_before + len(sequence.token_ids) - sequence.computed,
            sequence.arrival,
        )
    raise ConfigError(f"prefill_order must be one of {', '.join(ORDERS)}, got {name!r}")
