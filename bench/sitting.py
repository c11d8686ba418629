"""One sitting: kvrelay and a peer in turn, run by run, so that a machine whose speed drifts treats both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from bench.cells import Cell
from bench.process import Run, SubjectFailed, SubjectProcess
from bench.subject import NotMeasured

NOISY = 0.05
"""Share of the cores' time that others took, from which on a cell is marked."""
CELL_S = 120.0
"""After so long no further round of a cell begins, and a run of this length needs no other one before it to count."""
MAX_FAILED_CELLS = 2
"""So many, and the peer's other cells are left out: each may cost the whole patience with a process."""
T = TypeVar("T")


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
    def cell(self) -> Cell:
        return self.ours.cell

    @property
    def ratios(self) -> list[float]:
        """Our rate over theirs, pair by pair: over 1 we are faster."""
        return [a / b for a, b in zip(self.ours.rates, self.theirs.rates, strict=True)]

    @property
    def noisy(self) -> bool:
        return max(self.ours.disturbance, self.theirs.disturbance) > NOISY


def alone(subject: SubjectProcess, cell: Cell, rounds: int, limit_s: float = CELL_S) -> Series:
    """One engine at one cell, up to `rounds` times after a run that is not counted. `NotMeasured` if it has no such cell."""
    end = time.monotonic() + limit_s
    subject.run(cell)
    return Series(cell, _repeated(lambda: subject.run(cell), rounds, end))


def in_turn(ours: SubjectProcess, theirs: SubjectProcess, cell: Cell, rounds: int, limit_s: float = CELL_S) -> Pairing:
    """Both at one cell, A B A B ..., up to `rounds` times after a run each that is not counted.

    A first run of theirs that takes `limit_s` by itself is counted, and is the only one. `NotMeasured` if one has no such cell.
    """
    end = time.monotonic() + limit_s
    first = theirs.run(cell)
    ours.run(cell)

    def pair() -> tuple[Run, Run]:
        return ours.run(cell), theirs.run(cell)

    pairs = [(ours.run(cell), first)] if first.seconds >= limit_s else _repeated(pair, rounds, end)
    return Pairing(Series(cell, [a for a, _ in pairs]), Series(cell, [b for _, b in pairs]))


def _repeated(once: Callable[[], T], rounds: int, end: float) -> list[T]:
    """At least one time, and no further time from `end` on (of the monotonic clock)."""
    found = [once()]
    while len(found) < rounds and time.monotonic() < end:
        found.append(once())
    return found


def measured(
    ours: SubjectProcess,
    theirs: SubjectProcess,
    cells: Sequence[Cell],
    rounds: int,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> Iterator[Pairing]:
    """A pairing for each cell that both engines have, one after the other.

    What they have not is said; a cell that fails is noted for the report, and the next one is tried.
    """
    failed = 0
    for cell in cells:
        if failed == MAX_FAILED_CELLS:
            note(f"{cell.name}: not tried after {failed} failed cells")
            continue
        try:
            say(f"    {cell.name}")
            yield in_turn(ours, theirs, cell, rounds)
        except NotMeasured as reason:
            say(f"      none: {reason}")
        except SubjectFailed as failure:
            failed += 1
            note(f"{cell.name}: failed: {failure}")
