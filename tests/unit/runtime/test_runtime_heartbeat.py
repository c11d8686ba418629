"""A heartbeat against a registry in memory that fails when it is told to."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from kvrelay.errors import StaleIncarnationError, UnavailableError
from services.runtime.ports import WorkerInfo
from services.runtime.registry.heartbeat import BATCH_BLOCKS, Heartbeat
from services.runtime.registry.workers import Registration

WORKER = WorkerInfo("a", "prefill", "127.0.0.1:1", 7)


@dataclass
class Changes:
    stored: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


class MemoryRegistry:
    """Holds one worker's blocks; `failures` are raised by the next calls, None lets one through."""

    keep_s = 120.0

    def __init__(self) -> None:
        self.registered = False
        self.blocks: set[bytes] = set()
        self.calls: list[str] = []
        self.failures: list[Exception | None] = []
        self.replaced: int | None = None

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure

    async def renew(self, worker: WorkerInfo) -> Registration:
        await self._called("renew")
        fresh, self.registered = not self.registered, True
        replaced, self.replaced = self.replaced, None
        return Registration(fresh, replaced)

    async def publish_blocks(self, worker_id: str, incarnation: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        await self._called("publish")
        self.blocks.difference_update(removed)
        self.blocks.update(stored)

    async def clear(self, worker_id: str, incarnation: int) -> None:
        await self._called(f"clear {incarnation}")

    async def reap(self) -> int:
        await self._called("reap")
        return 0

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        await self._called("deregister")

    async def close(self) -> None:
        self.calls.append("close")

    def lose_everything(self) -> None:
        self.registered, self.blocks = False, set()


class Rig:
    def __init__(self, interval_s: float = 2.0) -> None:
        self.registry = MemoryRegistry()
        self.changes = Changes()
        self.heartbeat = Heartbeat(self.registry, lambda: WORKER, self._take, interval_s, random.Random(0))

    def _take(self) -> Changes:
        taken, self.changes = self.changes, Changes()
        return taken


def blocks(count: int) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(count)]


async def test_changes_of_an_outage_are_published_after_it() -> None:
    rig = Rig()
    rig.changes = Changes(stored=blocks(3))
    await rig.heartbeat.beat()
    rig.registry.failures = [UnavailableError("gone")]
    rig.changes = Changes(stored=blocks(5)[3:], removed=blocks(1))
    await rig.heartbeat.beat()
    assert not rig.heartbeat.registered and rig.registry.blocks == set(blocks(3))
    await rig.heartbeat.beat()
    assert rig.heartbeat.registered and rig.registry.blocks == set(blocks(5)[1:])


async def test_a_registry_that_lost_its_data_gets_everything_again() -> None:
    rig = Rig()
    rig.changes = Changes(stored=blocks(3))
    await rig.heartbeat.beat()
    rig.registry.lose_everything()
    rig.changes = Changes(removed=blocks(1))
    await rig.heartbeat.beat()
    assert rig.registry.blocks == set(blocks(3)[1:])


async def test_a_failure_between_two_batches_loses_neither() -> None:
    rig = Rig()
    rig.changes = Changes(stored=blocks(2 * BATCH_BLOCKS + 1))
    rig.registry.failures = [None, None, UnavailableError("gone")]
    await rig.heartbeat.beat()
    assert len(rig.registry.blocks) == BATCH_BLOCKS
    await rig.heartbeat.beat()
    assert rig.registry.blocks == set(blocks(2 * BATCH_BLOCKS + 1))


async def test_every_published_block_is_renewed_well_before_it_is_forgotten() -> None:
    rig = Rig()
    rig.changes = Changes(stored=blocks(500))
    await rig.heartbeat.beat()
    rig.registry.blocks.clear()
    for _ in range(round(rig.registry.keep_s / 2 / 2.0)):
        await rig.heartbeat.beat()
    assert rig.registry.blocks == set(blocks(500))


async def test_pauses_are_jittered_and_shorter_while_the_registry_is_away() -> None:
    rig = Rig()
    steady = {await rig.heartbeat.beat() for _ in range(20)}
    rig.registry.failures = [UnavailableError("gone")] * 20
    away = {await rig.heartbeat.beat() for _ in range(20)}
    assert all(1.5 <= pause <= 2.0 for pause in steady) and len(steady) > 10
    assert all(pause <= 1.0 for pause in away) and len(away) > 10


async def test_an_earlier_life_is_cleared_after() -> None:
    rig = Rig()
    rig.registry.replaced = 6
    await rig.heartbeat.beat()
    assert "clear 6" in rig.registry.calls


async def test_a_fenced_life_says_so_once_and_keeps_trying(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.registry.failures = [StaleIncarnationError("a newer life of worker a is registered")] * 3
    for _ in range(3):
        await rig.heartbeat.beat()
    assert rig.heartbeat.fenced and caplog.text.count("not routed to any more") == 1
    await rig.heartbeat.beat()
    assert rig.heartbeat.registered and not rig.heartbeat.fenced


async def test_a_nudge_brings_the_next_beat_forward() -> None:
    rig = Rig(interval_s=1_000.0)
    task = asyncio.create_task(rig.heartbeat.run())
    async with asyncio.timeout(30):
        for beats in (1, 2):
            while rig.registry.calls.count("renew") < beats:
                rig.heartbeat.nudge()
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait([task])
    assert rig.registry.calls[-2:] == ["deregister", "close"]


@pytest.mark.parametrize("failure", [UnavailableError("gone"), None])
async def test_leaving_is_quiet_whether_or_not_the_registry_answers(failure: Exception | None) -> None:
    rig = Rig()
    task = asyncio.create_task(rig.heartbeat.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    rig.registry.failures = [failure]
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and rig.registry.calls[-2:] == ["deregister", "close"]


async def test_a_worker_without_a_prefix_cache_only_registers() -> None:
    registry = MemoryRegistry()
    heartbeat = Heartbeat(registry, lambda: WORKER)
    await heartbeat.beat()
    assert registry.calls == ["renew", "reap"]
