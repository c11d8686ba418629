"""The benchmark runs its engines in processes of their own, and what it times is the model's work."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from bench import engine as driver
from bench import probe, process
from bench.cells import Cell
from bench.floors import OPERANDS
from bench.machine import Disturbance
from bench.ours import ModelPath
from bench.ours_engine import WholeEngine
from bench.peers.fbgemm import FbgemmLlama
from bench.peers.huggingface import Transformers
from bench.probe import Peaks
from bench.process import Run, SubjectFailed, SubjectProcess
from bench.sitting import MAX_FAILED_CELLS, alone, in_turn, measured
from bench.subject import NotMeasured, Setup, Subject, random_prompt
from tests.tiny_models import write_tiny_model

FAKE = "tests.unit.bench.fake_subject"
CELLS = [
    Cell("prefill", prompt=24, prompts=2),
    Cell("decode", batch=1, context=20, steps=3),
    Cell("decode", batch=3, context=20, steps=3),
]
pytestmark = [
    # By calls that the compared engines still make.
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel:UserWarning"),
]
QUESTION = (5, 17, 200, 33, 8)
MIXED = Cell("mixed", prompt=16, batch=2, context=20, steps=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench"), "llama", seed=3)


def setup(model: Path | str, kind: str = "float32", binaries: Path | str = "-") -> Setup:
    return Setup(str(model), kind, threads=1, room=1024, binaries=str(binaries), kernels="torch")


def fake(model: str, folder: Path | str = "-") -> SubjectProcess:
    return SubjectProcess(sys.executable, FAKE, setup(model, binaries=folder), [min(os.sched_getaffinity(0))])


def test_subject_is_pinned_and_its_chatter_is_no_answer() -> None:
    with fake("well") as subject:
        assert subject.versions == {"cpus": str(min(os.sched_getaffinity(0))), "omp": "1"}
        assert subject.run(CELLS[0]).seconds == 0.48
        assert subject.greedy([4, 9], 3) == [9, 9, 9]


def test_cell_that_one_side_lacks_is_left_out() -> None:
    said: list[str] = []
    with fake("well") as ours, fake("well") as theirs:
        (found,) = measured(ours, theirs, [MIXED, CELLS[1]], 2, said.append, pytest.fail)
    assert found.cell == CELLS[1]
    assert found.ratios == [1.0, 1.0]
    assert "it has none" in said[1]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("dies", "ended with 3: more chatter"),
        ("fails", "RuntimeError: out of pages for so many tokens"),
        ("too modern", "ended by SIGILL, an instruction that this CPU does not have: more chatter"),
    ],
)
def test_cell_that_breaks_a_peer_is_noted_and_the_others_are_measured(model: str, reason: str) -> None:
    notes: list[str] = []
    with fake("well") as ours, fake(model) as theirs:
        found = [pairing.cell for pairing in measured(ours, theirs, CELLS, 1, lambda text: None, notes.append)]
    assert notes == [f"prefill 24: failed: fake_subject: {reason}"]
    assert found == CELLS[1:]


def test_peer_that_keeps_breaking_is_given_up_but_what_it_did_before_stays() -> None:
    notes: list[str] = []
    cells = [CELLS[1], *[CELLS[0]] * (MAX_FAILED_CELLS + 1)]
    with fake("well") as ours, fake("dies") as theirs:
        found = [pairing.cell for pairing in measured(ours, theirs, cells, 1, lambda text: None, notes.append)]
    assert found == [CELLS[1]]
    assert ["ended with 3" in note for note in notes] == [True] * MAX_FAILED_CELLS + [False]
    assert "not tried" in notes[-1]


def test_subject_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with fake("hangs", tmp_path) as subject, open(reader, "rb") as pipe:
        monkeypatch.setattr(process, "PATIENCE_S", 2.0)
        with pytest.raises(SubjectFailed, match="no answer within 2 s"):
            subject.run(CELLS[0])
        os.set_blocking(reader, True)
        # Ends when nobody is left who could write.
        assert pipe.read() == b"started\n"
        monkeypatch.undo()
        assert subject.run(CELLS[1]).seconds == 0.03


def test_a_slow_cell_has_fewer_runs() -> None:
    decode = CELLS[1]
    with fake("well") as ours, fake("well") as theirs:
        assert len(alone(ours, decode, 3).runs) == 3
        assert len(alone(ours, decode, 3, limit_s=0.0).runs) == 1
        assert len(in_turn(ours, theirs, decode, 3).ratios) == 3
        assert len(in_turn(ours, theirs, decode, 3, limit_s=theirs.run(decode).seconds).ratios) == 1


def test_a_product_is_measured_on_the_largest_matrices_that_do_not_take_long() -> None:
    sides: list[int] = []

    def product(side: int) -> Callable[[], object]:
        sides.append(side)
        return lambda: None

    assert probe.peak(product, 500, patience_s=float("inf")) > 0
    assert sides == [128, 256, 500]
    sides.clear()
    probe.peak(product, 500, patience_s=0.0)
    assert sides == [128, 128]


def test_the_probe_measures_every_type_there_is_a_floor_for() -> None:
    peaks = probe.measure(1, [min(os.sched_getaffinity(0))], [50_000], side=64)
    assert peaks.read_rate(1) > 0
    assert {operand for operands in OPERANDS.values() for operand in operands} == peaks.operations_per_s.keys()
    assert all(rate > 0 for rate in peaks.operations_per_s.values())


def test_subject_that_does_not_load_says_why() -> None:
    with pytest.raises(SubjectFailed, match="no such model"):
        fake("unloadable")


@pytest.mark.parametrize("make", [ModelPath, WholeEngine, Transformers])
def test_every_float32_engine_does_the_cells_and_gives_the_same_answer(
    make: type[Subject], tiny: Path, request: pytest.FixtureRequest
) -> None:
    subject = make(setup(tiny))  # type: ignore[call-arg]
    if isinstance(subject, WholeEngine):
        request.addfinalizer(subject.close)
    expected = Transformers(setup(tiny)).greedy(QUESTION, 6)
    assert subject.greedy(QUESTION, 6) == expected
    assert all(subject.run(cell) > 0 for cell in [*CELLS, *CELLS])
    assert subject.greedy(QUESTION, 6) == expected
    if make is not ModelPath:
        with pytest.raises(NotMeasured):
            subject.run(MIXED)
    else:
        assert subject.run(MIXED) > 0


def test_fbgemm_computes_the_same_model(tiny: Path) -> None:
    subject = FbgemmLlama(setup(tiny, "int8"))
    assert all(subject.run(cell) > 0 for cell in CELLS)
    assert subject.greedy(QUESTION, 1) == Transformers(setup(tiny)).greedy(QUESTION, 1)


def test_prompts_are_reproducible_and_differ_by_seed() -> None:
    assert random_prompt(7, 40, 300) == random_prompt(7, 40, 300)
    assert random_prompt(7, 40, 300) != random_prompt(8, 40, 300)
    assert all(100 <= token < 300 for token in random_prompt(7, 400, 300))


class Instant:
    """Stands for a `SubjectProcess`: takes a time that its module says, and notes who was asked."""

    seconds: Mapping[str, float] = {"bench.ours": 1.0, "bench.ours_engine": 2.0, "bench.peers.openvino": 4.0, "bench.peers.fbgemm": 3.0}
    interrupted = ""
    """Module during whose second cell somebody presses Ctrl-C."""

    def __init__(self, python: str, module: str, setup: Setup, cpus: Sequence[int]) -> None:
        if module == "bench.peers.llama_cpp":
            raise SubjectFailed("cannot load")
        self._module = module
        self._seconds = self.seconds[module]
        self.versions = {"module": module}

    def __enter__(self) -> Instant:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None: ...

    def run(self, cell: Cell) -> Run:
        if self._module == self.interrupted and cell.batch != 1:
            raise KeyboardInterrupt
        return Run(self._seconds, Disturbance(0.0, 0.0))

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        return [1] * count


@pytest.fixture
def peers(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Arguments for a run of int8 with `Instant` engines, of which vLLM is not installed."""
    for installed in ("openvino/bin/python", "llama.cpp/bin/llama-bench"):
        (tmp_path / installed).parent.mkdir(parents=True)
        (tmp_path / installed).touch()
    monkeypatch.setattr(driver, "SubjectProcess", Instant)
    monkeypatch.setattr(driver, "_folder", lambda model, dtype: tiny)
    monkeypatch.setattr(driver, "ensure_gguf", lambda name: tmp_path / name)
    peaks = Peaks({1000: 1e9}, {"float32": 1e9, "bfloat16": 1e9, "int8": 1e9})
    monkeypatch.setattr(probe, "measure", lambda *arguments: peaks)
    chosen = ["--peers", "llama.cpp", "openvino", "fbgemm", "vllm", "--peers-dir", str(tmp_path)]
    return [*chosen, "--kinds", "int8", "--prompts", "--rounds", "2"]


def test_driver_pairs_each_peer_with_its_like_and_goes_on_after_a_failure(peers: list[str]) -> None:
    results = driver.run(driver.parse([*peers, "--threads", "1", "64", "--batches", "1"]))
    (group,) = results.groups
    assert group.peers["openvino"]["decode B=1"].ratios == [2.0, 2.0]
    assert group.peers["fbgemm"]["decode B=1"].ratios == [3.0, 3.0]
    assert group.model.keys() == {"decode B=1", "mixed 256+8"}
    skipped = "\n".join(results.skipped)
    assert "llama.cpp, int8, 1 thread(s): failed: cannot load" in skipped
    assert "vllm" in skipped and "bench/README.md" in skipped
    assert "64 threads: only" in skipped


def test_ctrl_c_leaves_what_was_measured(peers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Instant, "interrupted", "bench.peers.fbgemm")
    results = driver.run(driver.parse([*peers, "--threads", "1", "--batches", "1", "4", "--chunk", "0"]))
    (group,) = results.groups
    assert {name: list(cells) for name, cells in group.peers.items()} == {
        "openvino": ["decode B=1", "decode B=4"],
        "fbgemm": ["decode B=1"],
    }
    assert results.skipped[-1] == "the rest: stopped by hand"
