"""One sitting: kvrelay and a peer in turn, run by run, so that a machine whose speed drifts treats both alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.cells import Cell
from bench.process import Run, SubjectProcess
from bench.subject import NotMeasured

NOISY = 0.05
"""Share of the cores' time that others took, from which on a cell is marked."""


@dataclass(frozen=True, slots=True)
class Series:
    """All runs of one engine at one cell."""

    cell: Cell
    runs: Sequence[Run]

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each run."""
        return [self.cell.tokens / run.seconds for run in self.runs]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    @property
    def call_ms(self) -> float:
        """Milliseconds of a forward pass."""
        return statistics.median(run.seconds for run in self.runs) / self.cell.calls * 1e3

    @property
    def disturbance(self) -> float:
        """Median share of the cores' time that others had."""
        return statistics.median(run.disturbance.total for run in self.runs)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Two engines at one cell, run by turns."""

    ours: Series
    theirs: Series

    @property
    def ratios(self) -> list[float]:
        """Our rate over theirs, pair by pair: over 1 we are faster."""
        return [a / b for a, b in zip(self.ours.rates, self.theirs.rates, strict=True)]

    @property
    def noisy(self) -> bool:
        return max(self.ours.disturbance, self.theirs.disturbance) > NOISY


def alone(subject: SubjectProcess, cell: Cell, rounds: int) -> Series:
    """One engine at one cell, `rounds` times after a run that is not counted. `NotMeasured` if it has no such cell."""
    subject.run(cell)
    return Series(cell, [subject.run(cell) for _ in range(rounds)])


def in_turn(ours: SubjectProcess, theirs: SubjectProcess, cell: Cell, rounds: int) -> Pairing:
    """Both at one cell, A B A B ..., after a run each that is not counted. `NotMeasured` if one has no such cell."""
    theirs.run(cell)
    ours.run(cell)
    pairs = [(ours.run(cell), theirs.run(cell)) for _ in range(rounds)]
    return Pairing(Series(cell, [a for a, _ in pairs]), Series(cell, [b for _, b in pairs]))


def measured(
    ours: SubjectProcess, theirs: SubjectProcess, cells: Sequence[Cell], rounds: int, say: Callable[[str], None]
) -> dict[str, Pairing]:
    """Name of cell to pairing, for those that both engines have."""
    found = {}
    for cell in cells:
        try:
            found[cell.name] = in_turn(ours, theirs, cell, rounds)
        except NotMeasured as reason:
            say(f"    {cell.name}: {reason}")
    return found
