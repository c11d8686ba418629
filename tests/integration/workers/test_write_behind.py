"""Finished blocks go to the store behind the requests' backs: whatever comes in the way costs blocks, never the worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvrelay.values import SamplingParams, StopConditions
from services.engine.api import Admitted, EngineRequest
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from services.runtime.ports import Job
from services.worker import prefix
from services.worker.prefix import PrefixExchange

BLOCK = 16
CONTEXT = 128
PAGES = CONTEXT // BLOCK
DEADLINE_S = 20.0


class Shelf:
    """A store client that keeps what it is given."""

    def __init__(self) -> None:
        self.stored: list[list[bytes]] = []
        self.came = asyncio.Event()

    async def store(self, block_hashes: Sequence[bytes], pages: Sequence[int], *, timeout_s: float) -> int:
        assert len(block_hashes) == len(pages)
        self.stored.append(list(block_hashes))
        self.came.set()
        return len(pages)


@asynccontextmanager
async def exchange(folder: Path) -> AsyncIterator[tuple[Engine, PrefixExchange, Shelf]]:
    engine = await Engine.start(EngineSettings(folder, dtype="float32", num_pages=PAGES, max_context_tokens=CONTEXT))
    shelf: Any = Shelf()
    prefixes = PrefixExchange(engine, shelf)
    writing = asyncio.ensure_future(prefixes.run())
    try:
        yield engine, prefixes, shelf
        assert not writing.done(), "the writer has given up"
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)
        await engine.stop()


def job(engine: Engine, tokens: int) -> Job:
    ids = tuple(5 + 7 * at % 250 for at in range(tokens))
    return Job("a", engine.identity.fingerprint, ids, SamplingParams(), StopConditions(max_tokens=4, ignore_eos=True))


async def compute(engine: Engine, one: Job) -> None:
    async with engine.open(EngineRequest(one.request_id, one.token_ids, one.sampling, one.stop)) as stream:
        async for _ in stream:
            pass


async def test_a_prompt_that_nearly_fills_the_context_is_stored(tiny_model: Path) -> None:
    async with exchange(tiny_model) as (engine, prefixes, shelf), asyncio.timeout(DEADLINE_S):
        one = job(engine, CONTEXT - 4)
        await compute(engine, one)
        prefixes.offer(one)
        await shelf.came.wait()
        assert [len(blocks) for blocks in shelf.stored] == [(CONTEXT - 4) // BLOCK]


async def test_a_pool_that_stays_full_costs_the_offer_and_not_the_worker(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "STORE_TIMEOUT_S", 0.2)
    async with exchange(tiny_model) as (engine, prefixes, shelf), asyncio.timeout(DEADLINE_S):
        one = job(engine, 2 * BLOCK)
        everything = EngineRequest("b", [3] * (CONTEXT - 4), stop=StopConditions(max_tokens=4), hold=True)
        async with engine.open(everything) as stream:
            assert isinstance(await anext(stream), Admitted)
            prefixes.offer(one)
            await asyncio.sleep(0.5)
            assert shelf.stored == []
        monkeypatch.setattr(prefix, "STORE_TIMEOUT_S", DEADLINE_S)
        await compute(engine, one)
        prefixes.offer(one)
        await shelf.came.wait()
        assert len(shelf.stored) == 1
