"""More work than pages: requests wait, longer than a lease lives, and are served; those that leave or are refused leave nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from kvrelay.errors import DeadlineExceededError, InvalidMaxTokensError, OverloadedError, PromptTooLongError
from tests.integration.suite.fault_kit import Wire, answers_rightly, ask, at_rest, errors_logged, prompt_of, right_answer
from tests.suite import Suite
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

POOL_TOKENS = 128 * 16
LEASE_S = 2.0


@dataclass(frozen=True, slots=True)
class World:
    suite: Suite
    stubs: Wire
    model: Path

    async def recovered(self, seed: int) -> None:
        await at_rest(self.suite, self.stubs)
        await answers_rightly(self.suite, self.model, prompt_of(60, seed))
        await at_rest(self.suite, self.stubs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    # Deep enough for a page of 8 KiB, so that a pool of 1 MiB has 128 of them.
    model = write_tiny_model(tmp_path_factory.mktemp("model") / "deep", "llama", num_hidden_layers=4)
    settings: dict[str, Any] = {"kv_cache_mib": 1, "max_waiting": 6, "max_num_batched_tokens": 16, "max_num_seqs": 4}
    async with Suite(model, mode="split", lease_ttl_s=LEASE_S, **settings) as suite, Wire() as stubs:
        yield World(suite, stubs, model)
        assert errors_logged(suite) == []


async def test_requests_wait_for_pages_longer_than_a_lease_and_are_served(world: World) -> None:
    # Decode has room for three prompts and two answers: the third is preempted, the last ones wait for longer than a lease lives.
    prompts = [prompt_of(500, seed) for seed in range(5)]
    outcomes = await asyncio.gather(*(ask(world.suite, prompt, 250) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        assert outcome.error is None, outcome.error
        assert outcome.token_ids == right_answer(world.model, prompt, 250)
        assert outcome.path == "split", outcome.decision
    await world.recovered(seed=10)


async def test_requests_that_leave_the_line(world: World) -> None:
    draw = random.Random(3)

    async def leave(seed: int, after_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await world.suite.client.generate(token_ids=prompt_of(700, seed), max_tokens=300, ignore_eos=True).collect()

    await asyncio.gather(*(leave(20 + i, draw.uniform(0.05, 1.5)) for i in range(7)))
    await world.recovered(seed=30)


async def test_a_deadline_that_passes_in_line(world: World) -> None:
    waiting = [ask(world.suite, prompt_of(700, seed), 300, timeout=1.0) for seed in range(40, 46)]
    outcomes = await asyncio.gather(*waiting)
    assert any(isinstance(outcome.error, DeadlineExceededError) for outcome in outcomes)
    assert all(outcome.error is None or isinstance(outcome.error, DeadlineExceededError) for outcome in outcomes)
    await world.recovered(seed=50)


async def test_what_is_too_much_is_refused_with_a_hint_and_the_rest_is_served(world: World) -> None:
    prompts = [prompt_of(400, seed) for seed in range(60, 90)]
    outcomes = await asyncio.gather(*(ask(world.suite, prompt, 100) for prompt in prompts))
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        if outcome.error is None:
            assert outcome.token_ids == right_answer(world.model, prompt, 100)
        else:
            assert isinstance(outcome.error, OverloadedError), outcome.error
            assert outcome.error.retry_after_s is not None and outcome.error.retry_after_s > 0
    refused = sum(outcome.error is not None for outcome in outcomes)
    assert 0 < refused < len(outcomes)
    await world.recovered(seed=90)


async def test_what_never_fits_the_pool_is_refused_at_the_door(world: World) -> None:
    error = (await ask(world.suite, prompt_of(POOL_TOKENS + 1, 1), 1)).error
    assert isinstance(error, PromptTooLongError)
    error = (await ask(world.suite, prompt_of(POOL_TOKENS - 10, 1), 12)).error
    assert isinstance(error, InvalidMaxTokensError)
    # The last token needs no KV: this fits exactly.
    await answers_rightly(world.suite, world.model, prompt_of(POOL_TOKENS - 10, 1), 11)
    await at_rest(world.suite, world.stubs)
