"""Heartbeats and feeds together on a real Valkey that is killed, paused, emptied."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from redis.asyncio import Redis

from services.runtime.ports import BlocksChanged, FleetEvent, FleetSnapshot, RegistryLost, WorkerGone, WorkerInfo, WorkerLoad, WorkerSeen
from services.runtime.registry.codec import Keys
from services.runtime.registry.embedded_redis import EmbeddedRedis
from services.runtime.registry.feed import RedisFleetFeed
from services.runtime.registry.heartbeat import Heartbeat
from services.runtime.registry.workers import RedisRegistry

TTL_S = 2.0
INTERVAL_S = 0.2


def block(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


@dataclass
class Changes:
    stored: list[bytes] = field(default_factory=list)
    removed: list[bytes] = field(default_factory=list)


class Worker:
    """A worker as far as the registry sees it."""

    def __init__(self, url: str, worker_id: str, incarnation: int = 1) -> None:
        self.info = WorkerInfo(worker_id, "prefill", "127.0.0.1:1", incarnation)
        self.changes = Changes()
        self.heartbeat = Heartbeat(RedisRegistry(url, "test", TTL_S), lambda: self.info, self._take, INTERVAL_S, random.Random(1))

    def _take(self) -> Changes:
        taken, self.changes = self.changes, Changes()
        return taken

    @asynccontextmanager
    async def alive(self) -> AsyncIterator[asyncio.Task[None]]:
        task = asyncio.create_task(self.heartbeat.run())
        yield task
        task.cancel()
        await asyncio.wait([task], timeout=5)


class View:
    """What a router knows: applies events as they come."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.feed = RedisFleetFeed(url, "test", TTL_S, rng=random.Random(2), poll_s=0.05, **settings)
        self.workers: dict[str, WorkerInfo] = {}
        self.blocks: dict[tuple[str, int], set[bytes]] = {}
        self.lost = False
        self.log: list[FleetEvent] = []
        self._changed = asyncio.Event()

    def apply(self, event: FleetEvent) -> None:
        match event:
            case FleetSnapshot(workers, holders):
                self.workers = {worker.worker_id: worker for worker in workers}
                self.blocks = {(worker.worker_id, worker.incarnation): set(holders.get(worker.worker_id, ())) for worker in workers}
                self.lost = False
            case WorkerSeen(worker):
                self.workers[worker.worker_id] = worker
            case WorkerGone(worker_id, incarnation):
                self.blocks.pop((worker_id, incarnation), None)
                if worker_id in self.workers and self.workers[worker_id].incarnation <= incarnation:
                    del self.workers[worker_id]
            case BlocksChanged(worker_id, incarnation, stored, removed):
                held = self.blocks.setdefault((worker_id, incarnation), set())
                held.difference_update(removed)
                held.update(stored)
            case RegistryLost():
                self.lost = True
        self.log.append(event)
        self._changed.set()

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        async def follow() -> None:
            async for event in self.feed.events():
                self.apply(event)

        task = asyncio.create_task(follow())
        yield
        assert not task.done(), task
        task.cancel()
        await asyncio.wait([task], timeout=5)

    async def until(self, condition: Callable[[], object], timeout_s: float = 10.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.log]


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


async def test_a_feed_sees_workers_come_change_and_go(server: EmbeddedRedis) -> None:
    view, worker = View(server.url), Worker(server.url, "a")
    worker.changes = Changes(stored=[block(1), block(2)])
    async with view.following():
        await view.until(lambda: view.log)
        assert view.log == [FleetSnapshot((), {})]
        async with worker.alive():
            await view.until(lambda: view.blocks.get(("a", 1)) == {block(1), block(2)})
            worker.info = replace(worker.info, load=WorkerLoad(running=7), state="draining")
            worker.changes = Changes(stored=[block(3)], removed=[block(1)])
            worker.heartbeat.nudge()
            await view.until(lambda: view.blocks[("a", 1)] == {block(2), block(3)})
            assert view.workers["a"] == worker.info
        # Deregistered at the end of its heartbeat: no need to wait for the expiry.
        redis: Any = Redis.from_url(server.url)
        assert not await redis.exists(Keys("test").worker("a"))
        await redis.aclose()
        await view.until(lambda: not view.workers)
    assert "RegistryLost" not in view.kinds()


async def test_a_feed_that_starts_late_gets_everything_as_a_snapshot(server: EmbeddedRedis) -> None:
    worker = Worker(server.url, "a")
    worker.changes = Changes(stored=[block(number) for number in range(3_000)])
    first, late = View(server.url), View(server.url)
    async with worker.alive(), first.following():
        await first.until(lambda: len(first.blocks.get(("a", 1), ())) == 3_000)
        async with late.following():
            await late.until(lambda: late.log)
            assert isinstance(late.log[0], FleetSnapshot)
            assert late.workers == first.workers and late.blocks == first.blocks


async def test_a_worker_that_dies_silently_is_reported_gone_and_its_blocks_are_cleared_by_others(server: EmbeddedRedis) -> None:
    view, dying, staying = View(server.url), Worker(server.url, "dying"), Worker(server.url, "staying")
    dying.changes = Changes(stored=[block(1)])
    async with view.following(), staying.alive():
        await dying.heartbeat.beat()
        await view.until(lambda: view.blocks.get(("dying", 1)) and "staying" in view.workers)
        await view.until(lambda: "dying" not in view.workers)
        assert WorkerGone("dying", 1) in view.log and "staying" in view.workers
        redis: Any = Redis.from_url(server.url)
        async with asyncio.timeout(10):
            while await redis.exists(Keys("test").block(block(1))):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await redis.aclose()


async def test_two_lives_of_one_worker_the_newer_wins_and_the_older_knows(server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    view, older, newer = View(server.url), Worker(server.url, "a", 1), Worker(server.url, "a", 2)
    older.changes = Changes(stored=[block(1)])
    async with view.following(), older.alive() as older_task:
        await view.until(lambda: view.blocks.get(("a", 1)))
        async with newer.alive():
            await view.until(lambda: view.workers["a"].incarnation == 2 and WorkerGone("a", 1) in view.log)
            async with asyncio.timeout(5):
                while not older.heartbeat.fenced:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            older.changes = Changes(stored=[block(5)])
            seen = len(view.log)
            await view.until(lambda: len(view.log) > seen + 5)
            assert view.workers["a"].incarnation == 2
            assert not any(isinstance(event, BlocksChanged) and block(5) in event.stored for event in view.log)
            assert not older_task.done()
            # The older one leaves: nothing of the newer goes with it.
            older_task.cancel()
            await asyncio.wait([older_task])
            seen = len(view.log)
            await view.until(lambda: len(view.log) > seen + 3)
            assert view.workers["a"].incarnation == 2
    assert caplog.text.count("is not routed to any more") == 1


async def test_a_redis_that_died_and_came_back_empty_gets_everything_again_and_no_worker_is_missed_meanwhile(server: EmbeddedRedis) -> None:
    view, workers = View(server.url), [Worker(server.url, name) for name in "ab"]
    workers[0].changes = Changes(stored=[block(1), block(2)])
    async with view.following(), workers[0].alive(), workers[1].alive():
        await view.until(lambda: view.blocks.get(("a", 1)) and "b" in view.workers)
        await asyncio.to_thread(server.kill)
        await view.until(lambda: view.lost)
        workers[0].changes = Changes(stored=[block(3)], removed=[block(1)])
        mark = len(view.log)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.start)
        await view.until(lambda: view.blocks.get(("a", 1)) == {block(2), block(3)}, timeout_s=5)
        await view.until(lambda: len([event for event in view.log[mark:] if isinstance(event, WorkerSeen)]) >= 4)
        assert set(view.workers) == {"a", "b"}
        assert not any(isinstance(event, WorkerGone) for event in view.log)
        # Every snapshot since the outage named both, whoever registered first.
        assert all(len(event.workers) == 2 for event in view.log[mark:] if isinstance(event, FleetSnapshot))


async def test_a_worker_that_died_during_an_outage_is_gone_after_its_grace(server: EmbeddedRedis) -> None:
    view, staying, dying = View(server.url), Worker(server.url, "staying"), Worker(server.url, "dying")
    async with view.following(), staying.alive():
        await dying.heartbeat.beat()
        await view.until(lambda: len(view.workers) == 2)
        await asyncio.to_thread(server.kill)
        await view.until(lambda: view.lost)
        await asyncio.to_thread(server.start)
        await view.until(lambda: not view.lost)
        assert "dying" in view.workers
        await view.until(lambda: set(view.workers) == {"staying"})
        assert WorkerGone("dying", 1) in view.log


async def test_a_redis_that_hangs_longer_than_every_entry_lives_loses_nobody(server: EmbeddedRedis) -> None:
    view, worker = View(server.url), Worker(server.url, "a")
    worker.changes = Changes(stored=[block(1)])
    async with view.following(), worker.alive():
        await view.until(lambda: view.blocks.get(("a", 1)))
        server.pause()
        await view.until(lambda: view.lost)
        await asyncio.sleep(TTL_S)
        server.resume()
        await view.until(lambda: not view.lost)
        seen = len(view.log)
        await view.until(lambda: len(view.log) > seen + 5)
        assert not any(isinstance(event, WorkerGone) for event in view.log)
        assert view.blocks[("a", 1)] == {block(1)}


async def test_a_router_that_lost_its_connection_reads_a_snapshot_again(server: EmbeddedRedis) -> None:
    view, worker = View(server.url), Worker(server.url, "a")
    async with view.following(), worker.alive():
        await view.until(lambda: "a" in view.workers)
        redis: Any = Redis.from_url(server.url)
        await redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
        await view.until(lambda: view.kinds().count("FleetSnapshot") >= 2)
        await redis.aclose()
        assert "a" in view.workers


@pytest.mark.parametrize("damage", ["trimmed", "deleted", "emptied"])
async def test_missed_events_are_noticed_and_a_snapshot_read(server: EmbeddedRedis, damage: str) -> None:
    """The connection stays up; the stream is cut, removed, or the whole data set."""
    view, worker = View(server.url), Worker(server.url, "a")
    worker.changes = Changes(stored=[block(1)])
    redis: Any = Redis.from_url(server.url)
    async with view.following(), worker.alive():
        await view.until(lambda: view.blocks.get(("a", 1)))
        before = view.kinds().count("FleetSnapshot")
        match damage:
            case "trimmed":
                # Two events of which the first is gone before it can be read.
                pipeline = redis.pipeline(transaction=True)
                pipeline.hincrby(Keys("test").sequence, "n", 1)
                await pipeline.execute()
            case "deleted":
                pipeline = redis.pipeline(transaction=True)
                pipeline.hincrby(Keys("test").sequence, "n", 3)
                pipeline.delete(Keys("test").events)
                await pipeline.execute()
            case _:
                await redis.flushall()
        await view.until(lambda: view.kinds().count("FleetSnapshot") > before)
        await view.until(lambda: view.blocks.get(("a", 1)) == {block(1)} and "a" in view.workers)
        seen = len(view.log)
        await view.until(lambda: len(view.log) > seen + 3)
        assert "WorkerGone" not in view.kinds() and "a" in view.workers
    await redis.aclose()


async def test_rubbish_in_the_registry_is_skipped(server: EmbeddedRedis, caplog: pytest.LogCaptureFixture) -> None:
    redis: Any = Redis.from_url(server.url)
    keys = Keys("test")
    await redis.hset(keys.index, "bad", "1")
    await redis.hset(keys.worker("bad"), mapping={"incarnation": "1", "info": '{"role": 3}'})
    view, worker = View(server.url), Worker(server.url, "a")
    async with view.following(), worker.alive():
        await view.until(lambda: "a" in view.workers)
    await redis.aclose()
    assert "not a worker" in caplog.text


async def test_without_any_redis_a_feed_reports_the_loss_once_and_a_heartbeat_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    url = "redis://127.0.0.1:1/0"
    view, worker = View(url), Worker(url, "a")
    async with view.following(), worker.alive() as task:
        await view.until(lambda: view.lost)
        await asyncio.sleep(1.2)
        assert view.kinds() == ["RegistryLost"] and not task.done() and not worker.heartbeat.registered
    assert caplog.text.count("serving goes on") == 1


async def test_a_heartbeat_leaves_quickly_when_redis_hangs(server: EmbeddedRedis) -> None:
    worker = Worker(server.url, "a")
    async with worker.alive() as task:
        async with asyncio.timeout(5):
            while not worker.heartbeat.registered:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        server.pause()
        async with asyncio.timeout(4):
            task.cancel()
            await asyncio.wait([task])
        server.resume()
    assert task.cancelled()


async def test_a_cancelled_feed_always_ends(server: EmbeddedRedis) -> None:
    """redis-py's write timeout (`asyncio.wait_for` before Python 3.12) used to swallow a cancellation that came with the reply."""
    for pause in [0.0] * 5 + [0.001 * number for number in range(10)]:
        view = View(server.url)
        async with view.following():
            await view.until(lambda: view.log)  # noqa: B023
            await asyncio.sleep(pause)
        assert not [task for task in asyncio.all_tasks() if "follow" in repr(task.get_coro())]
