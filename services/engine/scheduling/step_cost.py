"""What a step is made of, and what it is expected to cost. Pure: the scheduler, simulations and planners share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one engine step, all requests together."""

    prefill_tokens: int = 0
    """Prompt tokens computed, over all chunks."""
    prefill_context: int = 0
    """Query-key pairs of those chunks: the sum over their tokens of the positions each one sees, itself included."""
    decode_seqs: int = 0
    """Sequences that draw from one new token each."""
    decode_context: int = 0
    """Positions those sequences see, together."""

    def with_chunk(self, start: int, end: int) -> StepShape:
        """This step and a prompt chunk over positions [start, end) besides."""
        count = end - start
        pairs = count * start + count * (count + 1) // 2
        return StepShape(self.prefill_tokens + count, self.prefill_context + pairs, self.decode_seqs, self.decode_context)

    def with_decode(self, context: int) -> StepShape:
        """This step and one more decoding sequence that sees `context` positions."""
        return StepShape(self.prefill_tokens, self.prefill_context, self.decode_seqs + 1, self.decode_context + context)


class StepCost(Protocol):
    """Expected duration of a step."""

    def predict_s(self, shape: StepShape) -> float:
        """Seconds, never negative, never smaller for more work."""
        ...


class StepCostLearner(Protocol):
    """A step cost that measures itself: what the engine core is given, and what it tells of every step."""

    def predict_s(self, shape: StepShape) -> float | None:
        """Seconds, as `StepCost.predict_s` says; None as long as too few steps were seen."""
        ...

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took that long, from before the forward pass until its tokens were drawn. Cheap; never raises."""
        ...
