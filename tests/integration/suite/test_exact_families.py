"""The same bits on every path through real processes: tiny models of each family, workers of different chunk budgets."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from services.engine.api import EngineRequest
from services.engine.model import load_model
from tests.integration.suite.paths_kit import PATHS, Ask, Seen, differences, fleet_of_budgets
from tests.integration.test_engine import DTYPES, Worker, random_requests
from tests.tiny_models import write_tiny_model

CASES = {
    "llama": ("float32", 64, 4096),
    "qwen2": ("bfloat16", 256, 64),
    "qwen3": ("float32", 4096, 256),
    "mistral": ("bfloat16", 64, 256),
}
"""Family: dtype, chunk budget of prefill and of decode; 4096 is more than any prompt here."""
REQUESTS = 30


def ask_of(request: EngineRequest) -> Ask:
    """The same request as a client words it."""
    stop = {"max_tokens": request.stop.max_tokens, "stop": list(request.stop.strings)}
    return Ask(list(request.token_ids), {**asdict(request.sampling), **stop})


def in_process(folder: Path, dtype: str, requests: list[EngineRequest]) -> list[list[int]]:
    """What one engine gives that computes each prompt alone and whole."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = load_model(folder, DTYPES[dtype])
        return [[token.token_id for token in Worker(model, folder, budget=4096).answers([request])[0]] for request in requests]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", CASES)
async def test_every_path_gives_the_same_bits_alone_and_eight_at_a_time_cold_and_warm(family: str, tmp_path: Path) -> None:
    dtype, prefill_budget, decode_budget = CASES[family]
    folder = write_tiny_model(tmp_path / family, family, seed=21)
    requests = random_requests(len(family), REQUESTS)
    asks = [ask_of(request) for request in requests]
    expected = in_process(folder, dtype, requests)
    async with fleet_of_budgets(folder, prefill=prefill_budget, decode=decode_budget, dtype=dtype) as paths:
        wanted = await paths.all("split", asks, together=1, cache_salt="alone")
        assert [seen.ids for seen in wanted] == expected

        async def check(path: str, *, salt: str, together: int) -> list[Seen]:
            seen = await paths.all(path, asks, together=together, cache_salt=salt)
            assert not (found := differences(wanted, seen)), f"{path}, {salt}, {together} at a time:\n{found}"
            assert {one.completion.path for one in seen} == {"split" if path == "split" else "local"}
            return seen

        for path in PATHS:
            await check(path, salt=f"{path} cold", together=8)
        for path in PATHS:
            await check(path, salt=f"{path} cold", together=8)  # warm now
        # The taker has a prefix that its peer lacks, and the other way round.
        await check("split", salt="local cold", together=8)
        await check("local", salt="split cold", together=8)
    kinds = {(seen.completion.finish_reason.value, seen.completion.usage.completion_tokens == 1) for seen in wanted}
    assert len(kinds) >= 3, kinds
