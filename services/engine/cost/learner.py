"""How long a step takes, learnt from steps as they happen.

It begins with what is known beforehand (a profile, or a guess from the model's size) and is corrected from then on. Kinds of work
that it has not seen are scaled like those it has.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from services.engine.cost.coefficients import StepCoefficients, work
from services.engine.cost.fit import Floats, fit
from services.engine.scheduling.step_cost import StepShape

BUCKETS, BUCKET_STEPS = 128, 8
"""Kinds of steps that are remembered, and steps of each. One kind is one power of two of each part of a shape: a long run of
decodes does not push out what was learnt of prompts."""
REFIT_STEPS = 32
"""Observations between fits, once there have been as many; before, fits come after 1, 2, 4, 8 and 16."""
LEAST_STEPS = 8
"""Steps seen before a guess is worth anything."""
_REFIT_ROUNDS, _FIT_ROUNDS = 2, 12


class StepCostModel:
    """A step's expected duration, corrected by every step that is observed. Implements `StepCostLearner`; owned by one thread.

    A handful of disturbed steps change nothing. Memory is bounded; an observation costs microseconds, every `REFIT_STEPS`th about
    half a millisecond. The same observations give the same model.
    """

    def __init__(self, start: StepCoefficients, *, measured: bool) -> None:
        """`measured`: whether `start` comes from a profile, and so is good from the first step."""
        self._start = start
        self._trusted_from = 0 if measured else LEAST_STEPS
        self._coefficients = start
        self._buckets: OrderedDict[tuple[int, ...], tuple[int, int]] = OrderedDict()
        """Kind of step: its number, which says where its steps are kept, and how many have been. The least recent is first."""
        self._work: Floats = np.zeros((BUCKETS * BUCKET_STEPS, len(start.values)))
        self._seconds: Floats = np.zeros(BUCKETS * BUCKET_STEPS)
        """Zero where no step is kept."""
        self._observed = 0

    @property
    def coefficients(self) -> StepCoefficients:
        """As of the last fit."""
        return self._coefficients

    def predict_s(self, shape: StepShape) -> float | None:
        """See `StepCostLearner`."""
        return self._coefficients.predict_s(shape) if self._observed >= self._trusted_from else None

    def observe(self, shape: StepShape, seconds: float) -> None:
        """See `StepCostLearner`; steps of no work or no duration are ignored."""
        if not 0.0 < seconds < float("inf") or not shape.prefill_tokens + shape.decode_seqs:
            return
        slot = self._slot(shape)
        self._work[slot] = work(shape, self._start.row_knots)
        self._seconds[slot] = seconds
        self._observed += 1
        if self._observed % REFIT_STEPS == 0 or (self._observed < REFIT_STEPS and self._observed.bit_count() == 1):
            kept = self._seconds > 0.0
            values = fit(self._work[kept], self._seconds[kept], self._start.values, self._coefficients.values, rounds=_REFIT_ROUNDS)
            self._coefficients = StepCoefficients.from_values(values, self._start.row_knots)

    def _slot(self, shape: StepShape) -> int:
        """Where the next step of this kind is kept: in place of the oldest one, of the least recent kind if it is a new kind."""
        parts = (shape.prefill_tokens, shape.prefill_context, shape.decode_seqs, shape.decode_context)
        kind = tuple(part.bit_length() for part in parts)
        if kind in self._buckets:
            number, count = self._buckets.pop(kind)
        elif len(self._buckets) < BUCKETS:
            number, count = len(self._buckets), 0
        else:
            number, count = self._buckets.popitem(last=False)[1][0], 0
            self._seconds[number * BUCKET_STEPS : (number + 1) * BUCKET_STEPS] = 0.0
        self._buckets[kind] = (number, count + 1)
        return number * BUCKET_STEPS + count % BUCKET_STEPS


def fitted(start: StepCoefficients, shapes: Sequence[StepShape], seconds: Sequence[float]) -> StepCoefficients:
    """Coefficients for steps (at least one) that were measured, all of which count alike."""
    measured = np.array([work(shape, start.row_knots) for shape in shapes])
    values = fit(measured, np.array(seconds), start.values, start.values, rounds=_FIT_ROUNDS)
    return StepCoefficients.from_values(values, start.row_knots)
