"""The step-cost model: what it learns of steps whose true cost is known."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.cost.coefficients import ROW_KNOTS, Floors, StepCoefficients, work
from services.engine.cost.learner import BUCKETS, LEAST_STEPS, StepCostModel, fitted
from services.engine.scheduling.step_cost import StepShape

FLOORS = Floors(
    layer_bytes=212_000_000,
    head_bytes=56_000_000,
    kv_position_bytes=23_040,
    token_flops=212_000_000,
    head_flops=56_000_000,
    pair_flops=69_120,
)
"""Of a model of 135 M parameters in bf16."""
parts = st.integers(0, 5000)


def truth(shape: StepShape) -> float:
    """A core that is bound by memory up to 9 rows and by arithmetic above: not of the model's own form."""
    rows = shape.prefill_tokens + shape.decode_seqs
    decode = 4e-3 + 1e-4 * shape.decode_seqs if shape.decode_seqs else 0.0
    return 8e-3 + max(15e-3, 1.6e-3 * rows) + decode + 9e-8 * shape.prefill_context + 5e-7 * shape.decode_context


def random_shape(rng: random.Random) -> StepShape:
    shape = StepShape()
    kind = rng.choice(("prefill", "decode", "mixed"))
    if kind != "decode":
        start = rng.choice((0, 0, 128, 512, 1024))
        shape = shape.with_chunk(start, start + rng.randint(1, 256))
    if kind != "prefill":
        for _ in range(rng.randint(1, 16)):
            shape = shape.with_decode(rng.randint(1, 1500))
    return shape


def noisy_steps(count: int, *, seed: int, slower: float = 1.0) -> list[tuple[StepShape, float]]:
    """Steps with 5 % of noise, every tenth of them disturbed: up to ten times as long."""
    rng = random.Random(seed)
    steps = []
    for number in range(count):
        shape = random_shape(rng)
        steps.append((shape, slower * truth(shape) * rng.gauss(1.0, 0.05) * (rng.uniform(2.0, 10.0) if number % 10 == 9 else 1.0)))
    return steps


def learnt(steps: Sequence[tuple[StepShape, float]], start: StepCoefficients | None = None) -> StepCostModel:
    model = StepCostModel(start or FLOORS.guess(), measured=start is not None)
    for shape, seconds in steps:
        model.observe(shape, seconds)
    return model


def held_out_errors(model: StepCostModel, *, slower: float = 1.0) -> list[float]:
    rng = random.Random(99)
    shapes = [random_shape(rng) for _ in range(300)]
    return [abs(model.coefficients.predict_s(shape) / (slower * truth(shape)) - 1.0) for shape in shapes]


def test_predictions_of_steps_it_has_not_seen_are_close_in_spite_of_noise_and_disturbed_steps() -> None:
    errors = held_out_errors(learnt(noisy_steps(320, seed=1)))
    assert statistics.median(errors) < 0.03
    assert statistics.quantiles(errors, n=10)[-1] < 0.10


def test_a_few_steps_are_enough_for_a_rough_idea() -> None:
    assert statistics.median(held_out_errors(learnt(noisy_steps(16, seed=2)))) < 0.10


def test_a_disturbed_step_changes_little() -> None:
    steps = noisy_steps(200, seed=3)
    before = learnt(steps)
    shape = StepShape().with_chunk(0, 128)
    after = learnt([*steps, *((shape, 100 * truth(shape)) for _ in range(3)), *steps[:21]])
    assert after.coefficients != before.coefficients
    predicted, as_before = after.predict_s(shape), before.predict_s(shape)
    assert predicted is not None and predicted == pytest.approx(as_before, rel=0.05)


def test_a_long_run_of_decodes_does_not_make_it_forget_prompts() -> None:
    rng = random.Random(4)
    decodes = [StepShape().with_decode(rng.randint(100, 1500)) for _ in range(3000)]
    model = learnt([*noisy_steps(200, seed=4), *((shape, truth(shape)) for shape in decodes)])
    prompt = StepShape().with_chunk(0, 200)
    assert model.predict_s(prompt) == pytest.approx(truth(prompt), rel=0.10)


def test_work_it_has_never_seen_is_scaled_like_the_work_it_has() -> None:
    rng = random.Random(5)
    decodes = [StepShape().with_decode(rng.randint(100, 1500)) for _ in range(64)]
    prompt = StepShape().with_chunk(0, 200)
    slow = learnt([(shape, 3 * FLOORS.guess().predict_s(shape)) for shape in decodes])
    assert slow.predict_s(prompt) == pytest.approx(3 * FLOORS.guess().predict_s(prompt), rel=0.05)


def test_a_profile_counts_from_the_first_step_and_a_guess_after_some() -> None:
    profile = fitted(FLOORS.guess(), *zip(*noisy_steps(200, seed=6), strict=True))
    assert statistics.median(held_out_errors(learnt([], profile))) < 0.05
    assert learnt([], profile).predict_s(StepShape().with_decode(10)) == profile.predict_s(StepShape().with_decode(10))
    steps = noisy_steps(LEAST_STEPS, seed=7)
    assert learnt(steps[:-1]).predict_s(StepShape().with_decode(10)) is None
    assert learnt(steps).predict_s(StepShape().with_decode(10)) is not None


def test_a_profile_of_a_faster_machine_is_corrected() -> None:
    profile = fitted(FLOORS.guess(), *zip(*noisy_steps(200, seed=8), strict=True))
    assert statistics.median(held_out_errors(learnt(noisy_steps(64, seed=9, slower=2.0), profile), slower=2.0)) < 0.05


def test_the_same_steps_give_the_same_model() -> None:
    steps = noisy_steps(300, seed=10)
    assert learnt(steps).coefficients == learnt(steps).coefficients


def test_more_kinds_of_steps_than_it_remembers_do_no_harm() -> None:
    rng = random.Random(11)
    shapes = [StepShape(*(2 ** rng.randint(0, 12) for _ in range(4))) for _ in range(20 * BUCKETS)]
    model = learnt([(shape, truth(shape)) for shape in shapes])
    errors = [abs(model.coefficients.predict_s(shape) / truth(shape) - 1.0) for shape in shapes]
    assert statistics.median(errors) < 0.05


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_duration_that_cannot_be_is_ignored(seconds: float) -> None:
    steps = noisy_steps(100, seed=12)
    model = learnt(steps)
    for _ in range(50):
        model.observe(StepShape().with_decode(10), seconds)
    assert model.coefficients == learnt(steps).coefficients


@settings(max_examples=60, deadline=None)
@given(
    start=st.lists(st.just(0.0) | st.floats(1e-12, 1.0), min_size=10, max_size=10),
    shapes=st.lists(st.tuples(st.builds(StepShape, parts, parts, parts, parts), st.floats(1e-6, 1e3)), min_size=1, max_size=40),
    shape=st.builds(StepShape, parts, parts, parts, parts),
    more=st.tuples(parts, parts, parts, parts),
)
def test_whatever_it_was_told_no_prediction_is_negative_or_smaller_for_more_work(
    start: list[float], shapes: list[tuple[StepShape, float]], shape: StepShape, more: tuple[int, int, int, int]
) -> None:
    coefficients = learnt(shapes, StepCoefficients.from_values(start, ROW_KNOTS)).coefficients
    larger = StepShape(*(a + b for a, b in zip(dataclasses.astuple(shape), more, strict=True)))
    assert min(coefficients.values) >= 0.0
    assert 0.0 <= coefficients.predict_s(shape) <= coefficients.predict_s(larger) * (1 + 1e-12)


def test_no_work_costs_nothing() -> None:
    assert FLOORS.guess().predict_s(StepShape()) == 0.0


def test_rows_are_counted_by_range() -> None:
    rows = work(StepShape(prefill_tokens=90, decode_seqs=10), ROW_KNOTS)[1 : 1 + len(ROW_KNOTS)]
    assert rows == (3.0, 12.0, 48.0, 36.0, 0.0)
