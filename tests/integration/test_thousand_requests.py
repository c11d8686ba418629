"""A thousand random requests, crowded and alone: whatever else an engine does at the time, each answer keeps its bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from bench import exactness as command
from bench.exact_runs import Exactness
from bench.random_requests import differences
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import load_model
from tests.demo_model import demo_folder
from tests.engine_runs import KERNELS, MODES, options
from tests.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", "llama", seed=3)


def exactness_of(folder: Path, mode: str, kernels: str, longest: int = 1500) -> Exactness:
    return Exactness(load_model(folder, options(mode, kernels)), Tokenizer.from_file(str(folder / "tokenizer.json")), longest)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_each_of_a_thousand_random_requests_is_answered_as_alone(folder: Path, kernels: str, mode: str) -> None:
    exactness = exactness_of(folder, mode, kernels)
    requests = exactness.requests(1, 1000)
    crowded = exactness.crowded(1, requests[:700]) | exactness.crowded(2, requests[700:], split=True)
    mismatches = differences(requests, exactness.alone(requests), crowded)
    assert not mismatches, "\n".join(mismatches[:10])
    lengths = [len(request.token_ids) for request in requests]
    assert (min(lengths), max(lengths)) == (1, 1500)
    counts = exactness.counts
    assert counts.requests == 1000 and counts.shared_steps > 800 and counts.chunks > 1500
    assert counts.preemptions > 40 and counts.hits > 100 and counts.imported > 200 and counts.evicted_blocks > 5000, counts


def test_a_decoder_that_heeds_company_is_found_out(folder: Path) -> None:
    exactness = exactness_of(folder, "float32", "torch", longest=60)
    exact = exactness.model.decoder

    class Heedful:
        name = "heedful"

        def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
            return exact.forward(entries, pool) * (1 + 1e-6 * (len(entries) > 2))

    exactness.model.decoder = Heedful()
    requests = exactness.requests(4, 40)
    assert differences(requests, exactness.alone(requests), exactness.crowded(4, requests))


@pytest.mark.parametrize("split", [False, True])
def test_the_command_reports_what_happened_and_that_nothing_differed(folder: Path, split: bool, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(folder), "--requests", "60", "--longest", "100", "--dtype", "float32", "--kernels", "torch"]
    assert command.main([*arguments, *["--split"] * split]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["mismatches"], report["decoder"]) == (60, 0, "torch")
    assert (report["imported"] > 0) == split and report["steps"] > 0


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        command.main(["--requests", "0"])


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", MODES)
def test_the_demo_model_answers_random_requests_as_alone(mode: str) -> None:
    exactness = exactness_of(demo_folder(), mode, "auto", longest=600)
    requests = exactness.requests(4, 20)
    crowded = exactness.crowded(4, requests[:12]) | exactness.crowded(5, requests[12:], split=True)
    mismatches = differences(requests, exactness.alone(requests), crowded)
    assert not mismatches, "\n".join(mismatches)
    assert exactness.counts.hits and exactness.counts.shared_steps and exactness.counts.imported
