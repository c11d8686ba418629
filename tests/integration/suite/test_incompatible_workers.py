"""Decode workers that are not of prefill's model, under the same name: never paired, and the reasons can be read."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from kvrelay.fleet import FieldDifference
from services.engine.model.native.build import COMPILERS
from services.launcher.child import ROOT
from tests.integration.suite.fault_kit import (
    Outcome,
    Wire,
    answers_rightly,
    ask,
    at_rest,
    errors_logged,
    eventually,
    ledger,
    prompt_of,
    right_answer,
    store_info,
)
from tests.suite import Suite
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(300)

NAME = "tiny"
FIELDS = {
    "decode-1": {"weights_digest"},
    "decode-2": {"tokenizer_digest"},
    "decode-3": {"weights_digest", "layers"},
    "decode-4": {"block_size"},
    "decode-5": {"dtype"},
}
"""What differs at each of the workers that are not like prefill-0."""


def write_models(folder: Path) -> dict[str, Path]:
    models = {
        "right": write_tiny_model(folder / "right", "llama"),
        "weights": write_tiny_model(folder / "weights", "llama", seed=1),
        "tokenizer": write_tiny_model(folder / "tokenizer", "llama"),
        "layers": write_tiny_model(folder / "layers", "llama", num_hidden_layers=3),
    }
    config = models["tokenizer"] / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 77}))
    return models


async def status(suite: Suite) -> str:
    """What `kvrelay status` prints."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay", "status", "--target", suite.address, cwd=ROOT, env=dict(os.environ),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")
    return output.decode()


async def test_workers_of_other_models_are_never_paired_and_status_says_why(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    async with Suite(models["right"], model_name=NAME, mode="split", store=False, traces=True) as suite, Wire() as stubs:
        # At most two at a time: each loads a model.
        for pair in (
            ((1, {"model": str(models["weights"])}), (2, {"model": str(models["tokenizer"])})),
            ((3, {"model": str(models["layers"])}), (4, {"block_size": 32})),
            ((5, {"dtype": "bfloat16"}),),
        ):
            await asyncio.gather(*(suite.start_worker("decode", index, **changed) for index, changed in pair))

        async def all_known() -> bool:
            return len((await suite.client.fleet()).workers) == 7

        await eventually(all_known, 10, "all workers are known")
        await _holds_what_differs(suite, stubs)

        prompts = [prompt_of(40 + seed, seed) for seed in range(24)]
        outcomes = [outcome for start in range(0, 24, 8) for outcome in await _together(suite, models["right"], prompts[start : start + 8])]
        assert {outcome.path for outcome in outcomes} == {"split"}
        assert Counter(outcome.decision.split(":")[0] for outcome in outcomes) == {"split over prefill-0 and decode-0": 24}
        await at_rest(suite, stubs)
        for name in FIELDS:
            info = await ledger(stubs, suite.address_of(name))
            assert info.free_pages == info.worker.load.total_pages, f"{name} has computed something"

        # Without its only match prefill has nobody to work for: another model answers, alone, and as itself.
        await suite.stop("decode-0")
        answering = {
            "decode-1": (models["weights"], torch.float32, 16),
            "decode-2": (models["tokenizer"], torch.float32, 16),
            "decode-3": (models["layers"], torch.float32, 16),
            "decode-4": (models["right"], torch.float32, 32),
            "decode-5": (models["right"], torch.bfloat16, 16),
        }
        for seed in range(30, 36):
            prompt = prompt_of(50, seed)
            outcome = await ask(suite, prompt)
            assert (outcome.error, outcome.path) == (None, "local"), outcome
            folder, dtype, block_size = answering[outcome.decision.removeprefix("local on ").split(":")[0]]
            assert outcome.token_ids == right_answer(folder, prompt, 8, dtype=dtype, block_size=block_size), outcome.decision
        assert (await ledger(stubs, suite.address_of("prefill-0"))).worker.load.held_handles == 0

        await suite.restart("decode-0")

        async def paired() -> bool:
            outcome = await answers_rightly_of_any(suite, answering | {"decode-0": (models["right"], torch.float32, 16)})
            return outcome.path == "split"

        await eventually(paired, 10, "the match is back")
        await at_rest(suite, stubs)
        assert suite.otlp is not None
        pulled = {span.instance for span in suite.otlp.spans() if span.name == "kv.transfer"}
        assert pulled == {"decode-0"}
        assert errors_logged(suite) == []


@pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="native kernels need a C++ compiler")
async def test_native_and_torch_kernels_share_nothing_and_status_says_why(tiny_model: Path) -> None:
    """Neither by hand-over nor through the block store: the last bits of their KV differ."""
    async with Suite(tiny_model, model_name=NAME, mode="split", kernels="torch") as suite, Wire() as stubs:
        await suite.stop("prefill-0")
        await suite.start_worker("prefill", 0, kernels="native")

        async def known() -> bool:
            return len((await suite.client.fleet()).incompatibilities) == 1

        await eventually(known, 10, "the native prefill worker is known")
        numerics = {name: (await ledger(stubs, suite.address_of(name))).worker.identity.numerics for name in ("prefill-0", "decode-0")}
        assert numerics["prefill-0"].startswith("native-") and numerics["decode-0"].startswith("torch-")
        (pair,) = (await suite.client.fleet()).incompatibilities
        assert list(pair.differences) == [FieldDifference("numerics", numerics["prefill-0"], numerics["decode-0"])]
        rows = [line.split() for line in (await status(suite)).splitlines()]
        assert ["numerics", numerics["prefill-0"], numerics["decode-0"]] in rows
        assert {row[0]: row[-1] for row in rows if row and row[0] in numerics and row[1] == "ready"} == numerics

        prompt = prompt_of(60, 0)
        for _ in range(2):
            outcome = await ask(suite, prompt)
            assert (outcome.error, outcome.path) == (None, "local")
            assert outcome.token_ids == right_answer(tiny_model, prompt, 8, kernels="torch")
        await at_rest(suite, stubs)

        async def written_behind() -> bool:
            return (await store_info(stubs, suite.address_of("kvstore-0"))).blocks == 3

        await eventually(written_behind, 10, "the prompt's blocks are in the store")

        await suite.start_worker("decode", 1, kernels="native")
        await suite.stop("decode-0")

        async def replaced() -> bool:
            return {worker.worker_id for worker in (await suite.client.fleet()).workers if worker.role == "decode"} == {"decode-1"}

        await eventually(replaced, 10, "the native decode worker has taken the other's place")
        outcome = await ask(suite, prompt)
        assert (outcome.error, outcome.path, outcome.cached_tokens) == (None, "split", 0), "nothing of what torch computed is taken"
        assert outcome.token_ids == right_answer(tiny_model, prompt, 8, kernels="native")
        assert (await store_info(stubs, suite.address_of("kvstore-0"))).hits == 0
        await at_rest(suite, stubs)


async def answers_rightly_of_any(suite: Suite, answering: dict[str, tuple[Path, Any, int]]) -> Outcome:
    """One request, whose answer is that of the worker that decoded it."""
    prompt = prompt_of(50, 99)
    outcome = await ask(suite, prompt)
    assert outcome.error is None
    who = outcome.decision.split(":")[0].rpartition(" ")[2]
    folder, dtype, block_size = answering[who]
    assert outcome.token_ids == right_answer(folder, prompt, 8, dtype=dtype, block_size=block_size), outcome.decision
    return outcome


async def _together(suite: Suite, model: Path, prompts: list[list[int]]) -> list[Outcome]:
    return list(await asyncio.gather(*(answers_rightly(suite, model, prompt) for prompt in prompts)))


async def _holds_what_differs(suite: Suite, stubs: Wire) -> None:
    """GetFleet and the command line name each differing field, no other, with both values."""
    fleet = await suite.client.fleet()
    assert {pair.decode_worker for pair in fleet.incompatibilities} == set(FIELDS)
    printed = await status(suite)
    ours = (await ledger(stubs, suite.address_of("prefill-0"))).worker
    assert "prefill-0 -> decode-0" not in printed
    for pair in fleet.incompatibilities:
        assert pair.prefill_worker == "prefill-0"
        theirs = (await ledger(stubs, suite.address_of(pair.decode_worker))).worker
        assert {difference.field for difference in pair.differences} == FIELDS[pair.decode_worker]
        section = printed.split(f"prefill-0 -> {pair.decode_worker}\n")[1].split("->")[0]
        for found in pair.differences:
            here, there = (
                str(getattr(worker.identity if hasattr(worker.identity, found.field) else worker.layout, found.field))
                for worker in (ours, theirs)
            )
            assert here != there
            assert found in (FieldDifference(found.field, here, there),)
            (row,) = [line.split() for line in section.splitlines() if line.split()[:2] == [found.field, here]]
            assert row == [found.field, here, there]
