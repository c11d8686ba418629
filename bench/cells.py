"""What is measured: one kind of step, and the work in it. No imports beyond the standard library: peers' processes read this too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cell:
    """One row of a results table."""

    phase: str
    """'prefill', 'decode' or 'mixed'."""
    prompt: int = 0
    """Tokens of a prompt; in 'mixed' of the chunk that shares its step with decodes."""
    prompts: int = 1
    """Prompts computed one after the other in one run, so that a run of short ones is not too short to time."""
    batch: int = 0
    """Sequences that decode."""
    context: int = 0
    """Tokens each of them has in its cache at the first step."""
    steps: int = 1

    @property
    def name(self) -> str:
        if self.phase == "prefill":
            return f"prefill {self.prompt}"
        if self.phase == "decode":
            return f"decode B={self.batch}"
        return f"mixed {self.prompt}+{self.batch}"

    @property
    def tokens(self) -> int:
        """Tokens that one run computes: prompt tokens, or tokens drawn, or both."""
        return self.prompt * self.prompts if self.phase == "prefill" else (self.prompt + self.batch) * self.steps

    @property
    def calls(self) -> int:
        """Forward passes of one run, if a prompt is computed whole."""
        return self.prompts if self.phase == "prefill" else self.steps


def standard_cells(prompts: Sequence[int], batches: Sequence[int], *, context: int, chunk: int, steps: int) -> list[Cell]:
    """Prefill of each length, decode of each batch at `context`, and a chunk, if that is not 0, together with 8 decodes.

    A small batch decodes up to four times `steps`, so that its short steps too fill a time in which noise can be seen.
    """
    cells = [Cell("prefill", prompt=length, prompts=max(1, 512 // length)) for length in prompts]
    cells += [Cell("decode", batch=batch, context=context, steps=steps * max(1, 4 // batch)) for batch in batches]
    if chunk:
        cells.append(Cell("mixed", prompt=chunk, batch=8, context=context, steps=max(2, steps // 4)))
    return cells
