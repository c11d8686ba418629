"""The same bits on every path through real processes: tiny models of each family, served side by side by workers of unlike budgets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from services.engine.api import EngineRequest
from services.engine.model.llama import DTYPES, ModelOptions, load_model
from services.runtime.offloop import run_off_loop
from tests.integration.suite.paths_kit import Ask, Fleet, Seen, differences, fleet_of_models
from tests.integration.test_engine import Worker, random_requests
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

CASES = {
    "llama": ("float32", 64, 4096),
    "qwen2": ("bfloat16", 256, 64),
    "qwen3": ("float32", 4096, 256),
    "mistral": ("bfloat16", 64, 256),
}
"""Family: dtype, chunk budget of prefill and of decode; 4096 is more than any prompt here."""
REQUESTS = 24
SEED = 8
"""With it every family ends some answers by a stop and some by length."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {family: write_tiny_model(root / family, family, seed=21) for family in CASES}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def families(folders: dict[str, Path]) -> AsyncIterator[Fleet]:
    """One router in front of all four models."""

    def settings(budget: int) -> list[dict[str, object]]:
        return [{"model": str(folders[family]), "dtype": case[0], "max_num_batched_tokens": case[budget]} for family, case in CASES.items()]

    workers = {"prefill": settings(1), "decode": settings(2)}
    async with fleet_of_models(workers, ("split", "local"), start_timeout_s=200.0) as fleet:
        yield fleet


def ask_of(request: EngineRequest) -> Ask:
    """The same request as a client words it."""
    stop = {"max_tokens": request.stop.max_tokens, "stop": list(request.stop.strings)}
    return Ask(list(request.token_ids), {**asdict(request.sampling), **stop})


def in_process(folder: Path, dtype: str, requests: list[EngineRequest]) -> list[list[int]]:
    """What one engine gives that computes each prompt alone and whole."""
    torch.set_num_threads(1)  # each thread has a number of its own
    worker = Worker(load_model(folder, ModelOptions(DTYPES[dtype])), folder, budget=4096)
    # With salts of their own none finds another's blocks.
    answers = worker.answers([replace(request, cache_salt=request.request_id) for request in requests], together=1)
    return [[token.token_id for token in answer] for answer in answers]


@pytest.mark.parametrize("family", CASES)
async def test_every_path_gives_the_same_bits_alone_and_eight_at_a_time_cold_and_warm(
    families: Fleet, folders: dict[str, Path], family: str
) -> None:
    requests = random_requests(SEED, REQUESTS)
    asks = [ask_of(request) for request in requests]
    wanted = await families.all("split", asks, together=1, model=family, cache_salt="alone")
    assert [seen.ids for seen in wanted] == await run_off_loop(in_process, folders[family], CASES[family][0], requests)

    async def check(path: str, salt: str, together: int = 8) -> list[Seen]:
        seen = await families.all(path, asks, together=together, model=family, cache_salt=salt)
        assert not (found := differences(wanted, seen)), f"{path}, {salt}, {together} at a time:\n{found}"
        assert {one.completion.path for one in seen} == {path}
        return seen

    await check("split", "one")
    await check("split", "one")  # both warm
    await check("local", "one", together=1)  # computed elsewhere, handed over, and taken from the cache now
    await check("local", "other")
    await check("local", "other")  # warm
    await check("split", "other")  # the taker is warm, its peer is not
    kinds = {(seen.completion.finish_reason.value, seen.completion.usage.completion_tokens == 1) for seen in wanted}
    assert len(kinds) >= 3, kinds
