"""Non-negative least squares on relative errors, robust to outliers: what the step-cost model is fitted with. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

PRIOR_WEIGHT = 0.002
"""How much the start counts for a coefficient: what one step would in which it is a twentieth of the time."""
OUTLIER_SCALES = 3.0
"""Errors are discounted by half at this many times the usual one, by four fifths at twice that."""
LEAST_SCALE = 0.03
"""Errors below this share of a step are never called large."""
_NOTICEABLE = 0.01
_DEFINITE = 1e-9
"""Added to the diagonal, as a share of it: two kinds of work that always come together leave it regular."""


def fit(work: Floats, seconds: Floats, start: Sequence[float], current: Sequence[float], *, rounds: int) -> tuple[float, ...]:
    """Coefficients `b >= 0` with `work @ b` close to `seconds`, each step's error taken as a share of it.

    `work` `[steps, terms]`, `seconds` `[steps]` over zero, at least one. What the steps say little about stays at `start`, scaled by
    how much slower than `start` they are on the whole. `current` is where to begin: coefficients of an earlier fit, or `start`;
    every round brings the weights of outliers closer to where they settle.
    """
    given, most = np.asarray(start), work.max(axis=0)
    # A unit for each coefficient: its start, or what would make a noticeable part of a step where the start says too little.
    level = float(np.exp(np.median(np.log(seconds / np.maximum(work @ given, 1e-3 * seconds)))))
    scale = np.maximum(level * given, np.divide(_NOTICEABLE * np.median(seconds), most, out=np.zeros(len(given)), where=most > 0.0))
    scale[scale == 0.0] = 1.0
    units, prior = work * scale, PRIOR_WEIGHT * level * given / scale
    solution = np.asarray(current) / scale
    for _ in range(rounds):
        predicted = np.maximum(units @ solution, 1e-3 * seconds)
        errors = np.log(seconds / predicted)
        usual = max(1.4826 * float(np.median(np.abs(errors))), LEAST_SCALE)
        weights = 1.0 / (seconds * predicted * (1.0 + (errors / (OUTLIER_SCALES * usual)) ** 2))
        weighted = units * weights[:, None]
        matrix = weighted.T @ units
        matrix.flat[:: len(scale) + 1] += PRIOR_WEIGHT + _DEFINITE * matrix.diagonal()
        root = np.sqrt(matrix.diagonal())
        solution = _solve_nonnegative(matrix / np.outer(root, root), (weighted.T @ seconds + prior) / root, solution * root) / root
    return tuple((solution * scale).tolist())


def _solve_nonnegative(matrix: Floats, target: Floats, guess: Floats) -> Floats:
    """The `x >= 0` that minimises `x.matrix.x / 2 - target.x` for a positive definite matrix (Lawson and Hanson 1974).

    Coefficients over zero in `guess` are tried first; it changes the time, not the answer.
    """
    free = guess > 0.0
    solution = _solve_free(matrix, target, free)
    if (solution < 0.0).any():
        free[:] = False
        solution = np.zeros(len(target))
    tolerance = 1e-10 * float(np.abs(target).max())
    for _ in range(10 * len(target)):
        gradient = np.where(free, -np.inf, target - matrix @ solution)
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        free[best] = True
        trial = _solve_free(matrix, target, free)
        while (low := free & (trial <= 0.0)).any():
            share = float(np.min(solution[low] / (solution[low] - trial[low])))
            solution = np.maximum(solution + share * (trial - solution), 0.0)
            free &= solution > 1e-15
            trial = _solve_free(matrix, target, free)
        solution = trial
    return solution


def _solve_free(matrix: Floats, target: Floats, free: npt.NDArray[np.bool_]) -> Floats:
    """The minimum with every coefficient that is not free at zero."""
    solution = np.zeros(len(target))
    solution[free] = np.linalg.solve(matrix[np.ix_(free, free)], target[free])
    return solution
