"""Clients that leave early or run out of time, at every moment of a request: everything is given back, and the next one works."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from kvrelay.errors import CancelledByClientError, DeadlineExceededError
from services.launcher.child import ROOT
from tests.integration.suite.fault_kit import (
    SLOW,
    Wire,
    answers_rightly,
    ask,
    at_rest,
    errors_logged,
    in_the_middle,
    prompt_of,
    right_answer,
)
from tests.suite import Suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = 1200
"""Prompt tokens that take a second or so to compute."""


@dataclass(frozen=True, slots=True)
class World:
    suite: Suite
    stubs: Wire
    model: Path

    async def recovered(self, seed: int) -> None:
        """Nothing is held any more, and the next request takes the same way and is answered rightly."""
        await at_rest(self.suite, self.stubs)
        outcome = await answers_rightly(self.suite, self.model, prompt_of(60, seed))
        assert outcome.path == "split"
        await at_rest(self.suite, self.stubs)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_model: Path) -> AsyncIterator[World]:
    async with Suite(tiny_model, mode="split", **SLOW) as suite, Wire() as stubs:
        yield World(suite, stubs, tiny_model)
        assert errors_logged(suite) == []


@pytest.mark.parametrize("tokens", [0, 1, 2, 20])
async def test_a_client_that_leaves_after_some_tokens(world: World, tokens: int) -> None:
    prompt = prompt_of(LONG if tokens < 2 else 60, seed=100 + tokens)
    async with world.suite.client.generate(token_ids=prompt, max_tokens=400, ignore_eos=True) as stream:
        got = [(await anext(stream)).token_id for _ in range(tokens)]
    assert got == list(right_answer(world.model, prompt, 20)[:tokens])
    with pytest.raises(CancelledByClientError):
        await stream.completion_or_raise()
    await world.recovered(seed=200 + tokens)


async def test_a_client_that_leaves_while_kv_is_handed_over(world: World) -> None:
    async with world.suite.client.generate(token_ids=prompt_of(LONG, 110), max_tokens=4) as stream:
        await in_the_middle(world.stubs, world.suite.address_of("prefill-0"), LONG)
    assert stream.token_ids == []
    await world.recovered(seed=210)


async def test_a_client_that_leaves_before_it_was_heard(world: World) -> None:
    for seed in range(5):
        stream = world.suite.client.generate(token_ids=prompt_of(60, seed), max_tokens=4)
        task = asyncio.ensure_future(stream.collect())
        for _ in range(seed):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await world.recovered(seed=220)


async def test_clients_that_leave_at_any_moment(world: World) -> None:
    draw = random.Random(7)

    async def leave(seed: int, after_s: float) -> None:
        stream = world.suite.client.generate(token_ids=prompt_of(draw.choice((20, 200, 500)), seed), max_tokens=60, ignore_eos=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(after_s):
                await stream.collect()

    for round_ in range(4):
        await asyncio.gather(*(leave(1000 + 10 * round_ + i, draw.uniform(0, 0.8)) for i in range(4)))
    await world.recovered(seed=230)


async def test_a_client_that_is_killed(world: World) -> None:
    command = [
        sys.executable,
        "-m",
        "kvrelay",
        "generate",
        "--target",
        world.suite.address,
        "--max-tokens",
        "2000",
        "--ignore-eos",
        "Once upon",
    ]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.wait_for(process.stdout.read(1), 20)
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    await world.recovered(seed=240)


@pytest.mark.parametrize("timeout_s", [0.001, 0.02, 0.1, 0.3])
async def test_a_deadline_that_passes_during_prefill(world: World, timeout_s: float) -> None:
    prompt = prompt_of(3000, seed=300 + int(1000 * timeout_s))
    outcome = await ask(world.suite, prompt, 4, timeout=timeout_s)
    assert isinstance(outcome.error, DeadlineExceededError)
    assert outcome.token_ids == ()
    await world.recovered(seed=310 + int(1000 * timeout_s))


async def test_a_deadline_that_passes_during_decode(world: World) -> None:
    prompt = prompt_of(40, seed=320)
    outcome = await ask(world.suite, prompt, 4000, timeout=1.5)
    assert isinstance(outcome.error, DeadlineExceededError)
    assert outcome.token_ids[:20] == right_answer(world.model, prompt, 20)[: len(outcome.token_ids)]
    await world.recovered(seed=330)
