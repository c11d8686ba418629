"""The whole suite while its Redis is killed, stays away for longer than any entry lives, and comes back empty."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from redis.asyncio import Redis

from tests.suite import Suite

AWAY_S = 15.0
"""Over the 6 s after which an entry that nobody renews is gone."""
REGISTERED_AGAIN_S = 10.0


async def generate(suite: Suite, number: int) -> int:
    """One request; an odd one is long enough for a split."""
    prompt = f"request {number} " * (60 if number % 2 else 2)
    return len([token async for token in suite.client.generate(prompt, max_tokens=4, ignore_eos=True, timeout=60)])


async def load(suite: Suite, stop: asyncio.Event) -> list[int]:
    """Requests one after the other until told to stop; a failed one raises."""
    counts = []
    while not stop.is_set():
        counts.append(await generate(suite, len(counts)))
        await asyncio.sleep(0.1)
    return counts


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_no_request_notices_a_redis_that_is_killed_and_comes_back_empty(tiny_model: Path) -> None:
    async with Suite(tiny_model, prefill=1, decode=1) as suite:
        before = {worker.worker_id: worker.incarnation for worker in (await suite.client.fleet()).workers}
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(load(suite, stop)) for _ in range(2)]
            await asyncio.sleep(1)
            await asyncio.to_thread(suite.redis.kill)
            await asyncio.sleep(AWAY_S)
            await asyncio.to_thread(suite.redis.start)
            back_s = time.monotonic()
            async with asyncio.timeout(REGISTERED_AGAIN_S):
                await registered_again(suite, set(before))
            print(f"registered again {time.monotonic() - back_s:.1f} s after the return")
            await asyncio.sleep(2)
            stop.set()
        assert all(count == 4 for counts in running for count in counts.result())
        assert all(len(counts.result()) >= 5 for counts in running)
        after = {worker.worker_id: worker.incarnation for worker in (await suite.client.fleet()).workers}
        assert after == before


async def registered_again(suite: Suite, worker_ids: set[str]) -> None:
    redis = Redis.from_url(suite.redis.url)
    try:
        while True:
            keys = [key async for key in redis.scan_iter("*:worker:*")]
            if {key.decode().rpartition(":")[2] for key in keys} >= worker_ids:
                return
            await asyncio.sleep(0.1)
    finally:
        await redis.aclose()
