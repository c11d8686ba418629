"""Measures what steps of a model cost: a grid of shapes to fit on and random ones to test on, in random order, again and again."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvrelay.values import SamplingParams
from services.engine.cost.coefficients import StepCoefficients
from services.engine.cost.learner import fitted
from services.engine.cost.profile import FitError, MeasuredPoint
from services.engine.scheduling.core import ModelPort, StepEntry
from services.engine.scheduling.step_cost import StepShape

LEAST_ROUNDS = 3
"""Times each shape is measured, however long it takes."""
LEAST_BUSY = 0.95
"""Share of its time in which a step must have had a core."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One step to measure."""

    chunks: tuple[tuple[int, int], ...] = ()
    """Prompt chunks: positions [start, end) of a sequence each."""
    decodes: tuple[int, ...] = ()
    """Decoding sequences: positions that each sees."""
    held_out: bool = False
    """Measured to test a fit, not to make it."""

    @property
    def shape(self) -> StepShape:
        shape = StepShape()
        for start, end in self.chunks:
            shape = shape.with_chunk(start, end)
        for context in self.decodes:
            shape = shape.with_decode(context)
        return shape

    def entries(self, block_size: int, first_page: int = 0) -> list[StepEntry]:
        """The step over pages from `first_page` on, none of them shared. Every entry draws, as a prompt's last chunk does."""
        spans = [*self.chunks, *((context - 1, context) for context in self.decodes)]
        entries = []
        for start, end in spans:
            pages = range(first_page, first_page + -(-end // block_size))
            first_page = pages.stop
            entries.append(StepEntry([1 + i % 97 for i in range(end - start)], start, pages, sample=True))
        return entries

    def pages(self, block_size: int) -> int:
        """Pages that `entries` names."""
        return sum(-(-end // block_size) for end in (*(end for _, end in self.chunks), *self.decodes))


def plans(*, context: int, rows: int, quick: bool = False, seed: int = 0) -> list[Plan]:
    """Steps for a model of `context` positions whose steps have at most `rows` rows: a grid, and random ones held out."""
    rng = random.Random(seed)
    longest = min(context, 512 if quick else 1536)
    lengths = [n for n in ((16, 64, 128) if quick else (8, 16, 32, 64, 128, 256)) if n <= min(longest, rows)] or [min(longest, rows)]
    contexts = sorted({min(longest, n) for n in ((64, 512) if quick else (64, 512, 1536))})
    batches = [n for n in ((1, 2, 4, 8, 16) if quick else (1, 2, 3, 4, 6, 8, 12, 16)) if n <= rows]

    def chunk(length: int, start: int) -> tuple[int, int]:
        start = max(0, min(start, longest - length))
        return start, start + length

    chunks = {chunk(length, start) for length in lengths for start in (0, *contexts)}
    grid = [Plan(chunks=(each,)) for each in sorted(chunks)]
    grid += [Plan(decodes=(seen,) * batch) for batch in batches for seen in contexts]
    grid += [
        Plan(chunks=(chunk(length, start),), decodes=(contexts[-1] // 2 or 1,) * batch)
        for length, start, batch in ((16, 0, 2), (32, 512, 8), (64, 0, 4), (112, 0, 16), (128, 256, 8))
        if length + batch <= rows and length <= longest
    ]
    held_out = []
    for number in range(8 if quick else 24):
        length = rng.randint(1, max(lengths)) if number % 4 else 0
        batch = rng.randint(1, min(batches[-1], max(1, rows - length))) if number % 4 != 1 and length < rows else 0
        decodes = tuple(rng.randint(1, longest) for _ in range(batch))
        held_out.append(Plan((chunk(length, rng.randint(0, longest)),) if length else (), decodes, held_out=True))
    return grid + held_out


def measure(
    model: ModelPort,
    steps: Sequence[Plan],
    *,
    block_size: int,
    budget_s: float,
    clock: Callable[[], float],
    busy_clock: Callable[[], float],
    seed: int = 0,
) -> list[MeasuredPoint]:
    """Runs every step at least `LEAST_ROUNDS` times, and on until `budget_s` have passed. Blocks.

    `clock` tells seconds, `busy_clock` those in which this thread had a core: steps that waited for one are left out, unless every
    step of a kind did. Each round has an order of its own, so that what disturbs the machine for a while is not one shape's misfortune.
    """
    rng = random.Random(seed)
    taken: list[list[tuple[float, float]]] = [[] for _ in steps]
    begun, rounds = clock(), 0
    for plan in steps:
        _run(model, plan.entries(block_size))
    while rounds < LEAST_ROUNDS or (clock() - begun) * (rounds + 1) / rounds < budget_s:
        rounds += 1
        for index in rng.sample(range(len(steps)), len(steps)):
            entries = steps[index].entries(block_size)
            started, busy = clock(), busy_clock()
            _run(model, entries)
            taken[index].append((clock() - started, busy_clock() - busy))
    return [_point(plan, times) for plan, times in zip(steps, taken, strict=True)]


def _point(plan: Plan, times: Sequence[tuple[float, float]]) -> MeasuredPoint:
    calm = [seconds for seconds, busy in times if busy > LEAST_BUSY * seconds] or [seconds for seconds, _ in times]
    return MeasuredPoint(plan.shape, statistics.median(calm), quantile(calm, 0.9), len(calm), plan.held_out)


def _run(model: ModelPort, entries: Sequence[StepEntry]) -> None:
    for row in model.forward(entries):
        model.sample(row, SamplingParams(), index=0, prompt_ids=(), output_ids=(), blocked_ids=())


def fit_points(start: StepCoefficients, points: Sequence[MeasuredPoint]) -> tuple[StepCoefficients, FitError]:
    """Coefficients of the points that are not held out, and their error on those that are."""
    fit_on = [point for point in points if not point.held_out]
    coefficients = fitted(start, [point.shape for point in fit_on], [point.seconds for point in fit_on])
    errors = [abs(coefficients.predict_s(point.shape) / point.seconds - 1.0) for point in points if point.held_out]
    return coefficients, FitError(len(errors), statistics.median(errors), quantile(errors, 0.9))


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of `values` (at least one) do not exceed."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
