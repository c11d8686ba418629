"""The profile file: what is written is read again, and what is no profile is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import ConfigError
from services.engine.cost.coefficients import Floors, StepCoefficients
from services.engine.cost.profile import MAX_BYTES, FitError, MeasuredPoint, Profile, ProfiledModel, Setup, parse_profile, read_profile
from services.engine.cost.profiling import LEAST_ROUNDS, Plan, fit_points, measure, plans
from services.engine.model.config import ModelConfig
from services.engine.scheduling.step_cost import StepShape
from services.runtime.processes.machine import Machine, this_machine
from tests.tiny_models import write_tiny_model

PROFILE = Profile(
    kvrelay="1.0",
    measured_at="2026-01-02T03:04:05+00:00",
    model=ProfiledModel("tiny", "sha256:00", "bfloat16", "bfloat16", "none"),
    setup=Setup("torch", "cpu", 1, 16, "2.13.0"),
    machine=Machine("a CPU", ("avx2",), 2, 1 << 30),
    floors=Floors(1, 2, 3, 4, 5, 6),
    coefficients=StepCoefficients(1e-3, (1e-4, 2e-4, 0.0, 0.0, 1e-4), 0.0, 1e-5, 1e-8, 1e-9),
    error=FitError(1, 0.02, 0.03),
    points=(
        MeasuredPoint(StepShape().with_chunk(16, 80), 0.2, 0.3, 5, held_out=False),
        MeasuredPoint(StepShape().with_decode(7), 0.1, 0.1, 5, held_out=True),
    ),
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(PROFILE.dump(), encoding="utf-8")
    assert read_profile(path) == PROFILE


def test_entries_that_a_later_release_may_add_are_ignored() -> None:
    raw = json.loads(PROFILE.dump())
    raw["more"] = raw["machine"]["more"] = 1
    assert parse_profile(json.dumps(raw)) == PROFILE


def _set(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(raw: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for name in parents:
            raw = raw[name]
        if value is None:
            del raw[last]
        else:
            raw[last] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", "other"), "not a profile"),
        (_set("version", 2), "version 2 is not 1"),
        (_set("coefficients", None), "coefficients is missing"),
        (_set("coefficients.step_s", None), "coefficients.step_s is missing"),
        (_set("coefficients.step_s", -1e-9), "coefficients.step_s must be a number of 0 or more"),
        (_set("coefficients.step_s", "1"), "coefficients.step_s must be a number of 0 or more"),
        (_set("coefficients.step_s", float("inf")), "coefficients.step_s must be a number of 0 or more"),
        (_set("coefficients.row_s", [1.0]), "row_knots must be ascending"),
        (_set("coefficients.row_knots", [1, 4, 4, 64, 256]), "row_knots must be ascending"),
        (_set("coefficients.row_knots", 3), "coefficients.row_knots must be a list"),
        (_set("model", "smollm2"), "model must be an object"),
        (_set("model.dtype", 16), "model.dtype must be text"),
        (_set("setup.threads", True), "setup.threads must be a whole number"),
        (_set("points", [{}]), "points[0].shape is missing"),
    ],
)
def test_a_wrong_entry_is_named(change: Callable[[dict[str, Any]], None], message: str) -> None:
    raw = json.loads(PROFILE.dump())
    change(raw)
    with pytest.raises(ConfigError) as caught:
        parse_profile(json.dumps(raw))
    assert message in caught.value.message


def test_coefficients_that_say_nothing_are_refused() -> None:
    nothing = dataclasses.replace(PROFILE, coefficients=StepCoefficients(0.0, (0.0,) * 5, 0.0, 0.0, 0.0, 0.0))
    with pytest.raises(ConfigError, match="every coefficient is 0"):
        parse_profile(nothing.dump())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "not JSON"),
        (b"[]", "not a profile"),
        (b"\xff\xfe", "not text"),
        (b" " * (MAX_BYTES + 1), "over"),
        (None, "No such file"),
    ],
    ids=["broken", "list", "binary", "large", "missing"],
)
def test_a_file_that_is_no_profile_is_refused_by_its_name(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "some.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="some") as caught:
        read_profile(path)
    assert message in caught.value.message


def test_a_profile_of_a_model_of_other_sizes_is_refused() -> None:
    PROFILE.check_sizes(PROFILE.floors)
    for field in dataclasses.fields(Floors):
        with pytest.raises(ConfigError, match=field.name):
            PROFILE.check_sizes(dataclasses.replace(PROFILE.floors, **{field.name: 99}))


def test_what_else_is_not_as_it_was_measured_is_named() -> None:
    assert PROFILE.differences(dataclasses.replace(PROFILE.model, name="other"), PROFILE.setup, PROFILE.machine) == []
    model = dataclasses.replace(PROFILE.model, weights_digest="sha256:11")
    told = PROFILE.differences(model, dataclasses.replace(PROFILE.setup, threads=2), dataclasses.replace(PROFILE.machine, cpu="another"))
    assert told == ["weights sha256:00, now sha256:11", "threads 1, now 2", "CPU a CPU, now another"]


def test_floors_are_counted_from_the_configuration(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(write_tiny_model(tmp_path, "llama"))
    floors = Floors.of(config, dtype="float32", kv_dtype="bfloat16", quantization="none")
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128
    assert floors == Floors(2 * layer * 4, 64 * 300 * 4, 2 * 2 * 32 * 2, 2 * 2 * layer, 2 * 64 * 300, 4 * 2 * 64)
    assert floors.decode_step_bytes == 4 * Floors.of(config, dtype="float32", kv_dtype="float32", quantization="int8").decode_step_bytes


class FakeModel:
    """A model whose steps take what a known cost says, by a clock of its own."""

    def __init__(self, cost: StepCoefficients) -> None:
        self._cost = cost
        self._rng = random.Random(0)
        self.now = 0.0
        self.forwards = 0

    def forward(self, entries: Any) -> list[int]:
        shape = StepShape()
        for entry in entries:
            end = entry.start + len(entry.token_ids)
            assert end <= len(entry.pages) * 16
            shape = shape.with_decode(end) if len(entry.token_ids) == 1 else shape.with_chunk(entry.start, end)
        used = [page for entry in entries for page in entry.pages]
        assert len(set(used)) == len(used)
        self.now += self._cost.predict_s(shape) * self._rng.uniform(0.97, 1.03) * (5 if self._rng.random() < 0.1 else 1)
        self.forwards += 1
        return [0] * len(entries)

    def sample(self, row: int, params: Any, **_: Any) -> Any:
        return row


@pytest.mark.parametrize("quick", [True, False])
def test_measured_points_give_back_the_cost_they_come_from(quick: bool) -> None:
    model = FakeModel(StepCoefficients(20e-3, (1e-3, 1e-3, 1.5e-3, 1.5e-3, 1.5e-3), 3e-3, 2e-4, 1e-7, 5e-7))
    steps = plans(context=2048, rows=256, quick=quick)
    points = measure(model, steps, block_size=16, budget_s=0.0, clock=lambda: model.now, busy_clock=lambda: model.now)
    assert model.forwards == len(steps) * (1 + LEAST_ROUNDS)
    _, error = fit_points(Floors(212_000_000, 56_000_000, 23_040, 212_000_000, 56_000_000, 69_120).guess(), points)
    assert error.points == sum(step.held_out for step in steps)
    assert error.median < 0.05 and error.p90 < 0.15


def test_it_measures_on_as_long_as_the_time_allows() -> None:
    model = FakeModel(StepCoefficients(1.0, (0.0,) * 5, 0.0, 0.0, 0.0, 0.0))
    clock = lambda: model.now  # noqa: E731
    points = measure(model, [Plan(decodes=(5,))], block_size=16, budget_s=1000.0, clock=clock, busy_clock=clock)
    assert LEAST_ROUNDS < points[0].steps < 1001


def test_steps_that_waited_for_a_core_are_left_out_unless_all_did() -> None:
    model = FakeModel(StepCoefficients(1.0, (0.0,) * 5, 0.0, 0.0, 0.0, 0.0))

    def points(busy: Callable[[], float]) -> list[MeasuredPoint]:
        return measure(model, [Plan(decodes=(5,))], block_size=16, budget_s=0.0, clock=lambda: model.now, busy_clock=busy)

    waited = [0.0, 1.0, 0.0, 0.1, 0.0, 1.0]
    assert points(lambda: waited.pop(0))[0].steps == LEAST_ROUNDS - 1
    assert points(lambda: 0.0)[0].steps == LEAST_ROUNDS


@pytest.mark.parametrize(("context", "rows"), [(1, 1), (20, 1), (20, 256), (128, 8), (4096, 256)])
@pytest.mark.parametrize("quick", [True, False])
def test_steps_to_measure_fit_the_model_and_the_budget(context: int, rows: int, quick: bool) -> None:
    for step in plans(context=context, rows=rows, quick=quick):
        assert 0 < step.shape.prefill_tokens + step.shape.decode_seqs <= rows
        assert all(0 <= start < end <= context for start, end in step.chunks)
        assert all(1 <= seen <= context for seen in step.decodes)


def test_this_machine_can_be_described() -> None:
    machine = this_machine()
    assert machine.cores >= 1 and machine.memory_bytes >= 0
