"""Keeper and client together, in one process: what a worker stores comes back to another bit for bit, or not at all."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

import google_crc32c
import pytest

import services.relay.store_client as client_module
from kvrelay import hashing
from kvrelay.errors import (
    ChecksumMismatchError,
    HandleConsumedError,
    HandleForgedError,
    InvalidRequestError,
    KvNotFoundError,
    KvTransferError,
    LeaseExpiredError,
    OverloadedError,
    StaleIncarnationError,
)
from kvrelay.handle import HandleState, KvLayout, KvSegment, StoreLocation
from services.kvstore.keeper import StoreKeeper
from services.kvstore.store import BlockStore
from services.relay.copying import land
from services.relay.store_client import BlockStoreClient
from services.relay.transfer import ReadEnd, ReadEvent, SegmentChunk, SegmentEvent, SegmentStart
from services.runtime.clock import ManualClock
from tests.unit.relay.faults import cut, flip, stall
from tests.unit.relay.relay_kit import BIG_LAYOUT, IDENTITY, LAYOUT, FakePages, MemoryStore, outcome, spin, tokens

BLOCK = LAYOUT.block_bytes


def make_keeper(
    clock: ManualClock | None = None, *, limit_blocks: int = 100, layout: KvLayout = LAYOUT, max_streams: int = 8
) -> StoreKeeper:
    store = BlockStore(limit_blocks * layout.block_bytes, 10.0)
    return StoreKeeper(store, 5, "store:1", clock or ManualClock(), max_streams=max_streams, debug=True)


def hashes_of(count: int, seed: int = 0) -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(IDENTITY.fingerprint), tokens(4 * count, seed), 4)


def client_of(store: MemoryStore, pages: FakePages, layout: KvLayout = LAYOUT) -> BlockStoreClient:
    return BlockStoreClient(store, IDENTITY, layout, pages)


def check_idle(keeper: StoreKeeper) -> None:
    keeper.store.check_integrity()
    assert keeper.store.leases == 0 and keeper._streams == 0


async def replay(events: list[SegmentEvent]) -> AsyncGenerator[SegmentEvent, None]:
    for event in events:
        yield event


def piece(index: int, data: bytes) -> list[SegmentEvent]:
    return [SegmentStart(KvSegment(index, 1, len(data), google_crc32c.value(data))), SegmentChunk(0, data)]


@pytest.mark.parametrize("layout", [LAYOUT, BIG_LAYOUT], ids=["small blocks", "blocks of three chunks"])
async def test_stored_blocks_come_back_bit_for_bit_into_the_right_pages(layout: KvLayout) -> None:
    keeper = make_keeper(layout=layout)
    source, target = FakePages(6, layout, seed=1), FakePages(6, layout)
    hashes = hashes_of(3)
    assert await client_of(MemoryStore(keeper), source, layout).store(hashes, [4, 0, 2], timeout_s=5) == 3
    assert await client_of(MemoryStore(keeper), target, layout).fetch_prefix([*hashes, bytes(32)], [1, 5, 3, 0], 1, timeout_s=5) == 2
    assert target.bytes_of(5) == source.bytes_of(0) and target.bytes_of(3) == source.bytes_of(2)
    assert target.bytes_of(1) == target.bytes_of(0) == bytes(layout.block_bytes), (
        "blocks the taker has, or the store lacks, are not written"
    )
    check_idle(keeper)


async def test_only_missing_blocks_are_sent() -> None:
    keeper = make_keeper()
    pages = FakePages(6, seed=1)
    client = client_of(MemoryStore(keeper), pages)
    hashes = hashes_of(4)
    assert await client.store(hashes[:2], [0, 1], timeout_s=5) == 2
    pages.viewed.clear()
    assert await client.store(hashes, [0, 1, 2, 3], timeout_s=5) == 2
    assert pages.viewed == [2, 3]
    assert await client.store(hashes, [0, 1, 2, 3], timeout_s=5) == 0
    check_idle(keeper)


async def test_another_model_layout_or_salt_finds_nothing() -> None:
    keeper = make_keeper()
    client = client_of(MemoryStore(keeper), FakePages(6, seed=1))
    hashes = hashes_of(2)
    await client.store(hashes, [0, 1], timeout_s=5)
    assert keeper.lookup(replace(IDENTITY, adapter="sha256:x"), LAYOUT, hashes) is None
    assert keeper.lookup(IDENTITY, replace(LAYOUT, tp_size=2), hashes) is None
    assert keeper.lookup(replace(IDENTITY, model="another name"), LAYOUT, hashes) is not None
    assert await client.fetch_prefix(hashes_of(2, seed=9), [0, 1], 0, timeout_s=5) == 0


async def test_a_found_prefix_has_a_handle_that_says_what_it_is() -> None:
    keeper = make_keeper()
    hashes = hashes_of(3)
    await client_of(MemoryStore(keeper), pages := FakePages(6, seed=1)).store(hashes, [0, 1, 2], timeout_s=5)
    handle = keeper.lookup(IDENTITY, LAYOUT, [*hashes, bytes(32)])
    assert handle is not None
    assert handle.state is HandleState.COMMITTED and handle.block_count == 3 and tuple(handle.block_hashes) == tuple(hashes)
    assert handle.prompt_digest == hashing.prompt_digest(hashing.root_hash(IDENTITY.fingerprint), tokens(12), 4)
    assert [s.crc32c for s in handle.segments] == [google_crc32c.value(pages.bytes_of(p)) for p in (0, 1, 2)]
    assert handle.locations == (StoreLocation("store:1"),) and handle.incarnation == 5


async def test_read_handles_are_leased_fenced_and_single_use() -> None:
    clock = ManualClock()
    keeper = make_keeper(clock)
    hashes = hashes_of(2)
    await client_of(MemoryStore(keeper), FakePages(6, seed=1)).store(hashes, [0, 1], timeout_s=5)

    async def read(name: str, secret: str, incarnation: int = 5, first_block: int = 0) -> list[ReadEvent]:
        async with aclosing(keeper.read(name, secret, incarnation, first_block)) as events:
            return [event async for event in events]

    handle = keeper.lookup(IDENTITY, LAYOUT, hashes)
    assert handle is not None
    name, secret = handle.name, handle.lease.lease_id
    for args, error in (
        (("kvHandles/" + "0" * 32, secret), KvNotFoundError),
        (("kvHandles/" + "0" * 32, secret, 4), StaleIncarnationError),
        ((name, "guess"), HandleForgedError),
        ((name, secret, 4), StaleIncarnationError),
        ((name, secret, 5, 3), InvalidRequestError),
    ):
        with pytest.raises(error):
            await read(*args)
    assert keeper.renew(name, secret) == 10.0 and keeper.renew(name, "guess") is None
    assert len(await read(name, secret, 5, 1)) == 3
    with pytest.raises(HandleConsumedError):
        await read(name, secret)
    late = keeper.lookup(IDENTITY, LAYOUT, hashes)
    assert late is not None
    clock.advance(10)
    keeper.sweep()
    with pytest.raises(LeaseExpiredError):
        await read(late.name, late.lease.lease_id)
    check_idle(keeper)


async def test_a_reader_that_stalls_beyond_its_lease_gets_no_more_and_pins_nothing() -> None:
    clock = ManualClock()
    keeper = make_keeper(clock)
    hashes = hashes_of(3)
    await client_of(MemoryStore(keeper), FakePages(6, seed=1)).store(hashes, [0, 1, 2], timeout_s=5)
    handle = keeper.lookup(IDENTITY, LAYOUT, hashes)
    assert handle is not None
    async with aclosing(keeper.read(handle.name, handle.lease.lease_id, 5, 0)) as events:
        await anext(events)
        clock.advance(10)
        keeper.sweep()
        assert keeper.store.leases == 0
        await anext(events)
        with pytest.raises(LeaseExpiredError):
            await anext(events)
    check_idle(keeper)


@pytest.mark.parametrize(
    ("events", "error", "blocks"),
    [
        ([SegmentChunk(0, b"x")], KvTransferError, 0),
        ([*piece(0, bytes(BLOCK - 1))], KvTransferError, 0),
        ([SegmentStart(KvSegment(0, 2, 2 * BLOCK, 1))], InvalidRequestError, 0),
        ([SegmentStart(KvSegment(0, 1, BLOCK, None))], KvTransferError, 0),
        ([SegmentStart(KvSegment(0, 1, BLOCK, 1)), SegmentChunk(0, bytes(BLOCK))], ChecksumMismatchError, 0),
        ([*piece(0, bytes(BLOCK)), *piece(7, bytes(BLOCK))], InvalidRequestError, 1),
        ([*piece(0, bytes(BLOCK)), *piece(0, bytes(BLOCK))], InvalidRequestError, 1),
        ([SegmentStart(KvSegment(0, 1, BLOCK, 1)), *piece(1, bytes(BLOCK))], KvTransferError, 0),
        ([SegmentStart(KvSegment(0, 1, BLOCK, 1)), SegmentChunk(0, b"x")], KvTransferError, 0),
        ([SegmentStart(KvSegment(0, 1, BLOCK, 1)), SegmentChunk(0, bytes(BLOCK + 1))], KvTransferError, 0),
    ],
    ids=["no segment", "short", "two blocks", "no crc", "bad crc", "not missing", "twice", "unfinished", "cut", "too long"],
)
async def test_a_broken_write_leaves_only_verified_blocks(events: list[SegmentEvent], error: type[Exception], blocks: int) -> None:
    keeper = make_keeper()
    handle, missing = keeper.create(IDENTITY, LAYOUT, hashes_of(3))
    assert missing == [0, 1, 2]
    with pytest.raises(error):
        await keeper.write(handle.name, handle.lease.lease_id, replay(events))
    assert keeper.store.used_bytes == blocks * BLOCK
    assert keeper.commit(handle.name, handle.lease.lease_id) == blocks
    check_idle(keeper)


async def test_streams_under_way_are_bounded() -> None:
    keeper = make_keeper(max_streams=1)
    handle, _ = keeper.create(IDENTITY, LAYOUT, hashes_of(1))
    gate = asyncio.Event()

    async def slow() -> AsyncGenerator[SegmentEvent, None]:
        await gate.wait()
        for event in piece(0, bytes(BLOCK)):
            yield event

    async with asyncio.TaskGroup() as group:
        writing = group.create_task(keeper.write(handle.name, handle.lease.lease_id, slow()))
        await spin()
        with pytest.raises(OverloadedError):
            await keeper.write(handle.name, handle.lease.lease_id, slow())
        with pytest.raises(OverloadedError):
            await anext(keeper.read(handle.name, handle.lease.lease_id, 5, 0))
        gate.set()
        assert await writing == (1, BLOCK)
    keeper.release(handle.name, handle.lease.lease_id)
    check_idle(keeper)


Warp = Callable[[AsyncIterator[ReadEvent]], AsyncGenerator[ReadEvent, None]]


async def _peer_gone(events: AsyncIterator[ReadEvent]) -> AsyncGenerator[ReadEvent, None]:
    for _ in range(4):
        yield await anext(events)
    raise KvTransferError("peer gone")


async def _two_ends(events: AsyncIterator[ReadEvent]) -> AsyncGenerator[ReadEvent, None]:
    async for event in events:
        yield event
    yield ReadEnd(4)


@pytest.mark.parametrize(("warp", "blocks"), [(flip, 2), (cut, 2), (stall, 2), (_peer_gone, 2), (_two_ends, 4)])
async def test_a_failing_fetch_keeps_what_was_verified_and_never_raises(warp: Warp, blocks: int) -> None:
    keeper = make_keeper()
    source, target = FakePages(4, seed=1), FakePages(4)
    hashes = hashes_of(4)
    await client_of(MemoryStore(keeper), source).store(hashes, [0, 1, 2, 3], timeout_s=5)
    client = BlockStoreClient(MemoryStore(keeper, warp), IDENTITY, LAYOUT, target, idle_timeout_s=0.3)
    assert await client.fetch_prefix(hashes, [0, 1, 2, 3], 0, timeout_s=5) == blocks
    for page in range(4):
        assert target.bytes_of(page) == (source.bytes_of(page) if page < blocks else bytes(BLOCK))
    check_idle(keeper)


async def test_a_store_that_answers_with_another_chain_is_not_believed() -> None:
    keeper = make_keeper()
    source = FakePages(4, seed=1)
    await client_of(MemoryStore(keeper), source).store(hashes_of(2), [0, 1], timeout_s=5)

    class Liar(MemoryStore):
        async def lookup(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            return self.keeper.lookup(IDENTITY, LAYOUT, hashes_of(2))

    target = FakePages(4)
    assert await client_of(Liar(keeper), target).fetch_prefix(hashes_of(2, seed=8), [0, 1], 0, timeout_s=5) == 0
    assert target.viewed == []
    check_idle(keeper)


async def test_of_a_chain_over_the_memory_limit_the_head_is_kept() -> None:
    keeper = make_keeper(limit_blocks=2)
    client = client_of(MemoryStore(keeper), FakePages(4, seed=1))
    assert await client.store(hashes_of(3), [0, 1, 2], timeout_s=5) == 2
    found = keeper.lookup(IDENTITY, LAYOUT, hashes_of(3))
    assert found is not None and found.block_count == 2
    keeper.release(found.name, found.lease.lease_id)
    check_idle(keeper)


async def test_a_dead_store_costs_one_request_a_little_and_the_others_nothing() -> None:
    keeper = make_keeper()
    calls: list[str] = []

    class Dying(MemoryStore):
        dead: str | None = None

        async def lookup(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            calls.append("lookup")
            if self.dead == "gone":
                raise KvTransferError("UNAVAILABLE")
            if self.dead == "silent":
                await asyncio.Event().wait()
            return keeper.lookup(IDENTITY, LAYOUT, hashes_of(1))

        async def create(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            calls.append("create")
            raise KvTransferError("UNAVAILABLE")

    clock = ManualClock()
    store = Dying(keeper)
    await client_of(MemoryStore(keeper), FakePages(4, seed=1)).store(hashes_of(1), [0], timeout_s=5)
    client = BlockStoreClient(store, IDENTITY, LAYOUT, FakePages(4), idle_timeout_s=0.1, cooldown_s=5.0, clock=clock)
    for how in ("gone", "silent"):
        store.dead = how
        for _ in range(3):
            assert await client.fetch_prefix(hashes_of(1), [0], 0, timeout_s=5) == 0
            assert await client.store(hashes_of(1), [0], timeout_s=5) == 0
        assert calls == ["lookup"]
        clock.advance(5)
        store.dead = None
        assert await client.fetch_prefix(hashes_of(1), [0], 0, timeout_s=5) == 1, "it is tried again"
        calls.clear()
    assert await client.store(hashes_of(1), [0], timeout_s=5) == 0
    assert await client.fetch_prefix(hashes_of(1), [0], 0, timeout_s=5) == 0
    assert calls == ["create"]


async def test_a_refusal_is_no_reason_to_avoid_the_store() -> None:
    keeper = make_keeper(max_streams=0)
    store = MemoryStore(keeper)
    client = client_of(store, FakePages(4, seed=1))
    assert await client.store(hashes_of(1), [0], timeout_s=5) == 0
    keeper._max_streams = 1
    assert await client.store(hashes_of(1), [0], timeout_s=5) == 1
    keeper._max_streams = 0
    assert await client.fetch_prefix(hashes_of(1), [0], 0, timeout_s=5) == 0
    keeper._max_streams = 1
    assert await client.fetch_prefix(hashes_of(1), [0], 0, timeout_s=5) == 1
    check_idle(keeper)


@pytest.mark.parametrize("operation", ["fetch", "store"])
async def test_cancel_at_any_point_leaves_nothing_in_store_or_pages(operation: str) -> None:
    rng = random.Random(5)
    hashes = hashes_of(3)
    cancelled = 0
    for turns in (*range(15), *(rng.randrange(150) for _ in range(25))):
        keeper = make_keeper()
        source, target = FakePages(4, seed=1), FakePages(4)
        client = client_of(MemoryStore(keeper), source)
        if operation == "fetch":
            await client.store(hashes, [0, 1, 2], timeout_s=5)
            client = client_of(MemoryStore(keeper), target)
        async with asyncio.TaskGroup() as group:
            if operation == "fetch":
                task = group.create_task(client.fetch_prefix(hashes, [0, 1, 2], 0, timeout_s=5))
            else:
                task = group.create_task(client.store(hashes, [0, 1, 2], timeout_s=5))
            for _ in range(turns):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            await asyncio.wait([task])
        assert finished or task.cancelled()
        cancelled += task.cancelled()
        before = bytes(target.buffer)
        await spin(5)
        assert bytes(target.buffer) == before
        check_idle(keeper)
        assert keeper.store.used_bytes in (0, 3 * BLOCK)
    assert cancelled >= 3


async def test_a_cancelled_fetch_returns_only_when_no_thread_writes_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow_land(*args: object) -> None:
        began.set()
        go.wait(10)
        land(*args)  # type: ignore[arg-type]
        ended.set()

    keeper = make_keeper()
    hashes = hashes_of(2)
    await client_of(MemoryStore(keeper), FakePages(4, seed=1)).store(hashes, [0, 1], timeout_s=5)
    monkeypatch.setattr(client_module, "land", slow_land)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(outcome(client_of(MemoryStore(keeper), FakePages(4)).fetch_prefix(hashes, [0, 1], 0, timeout_s=5)))
        while not began.is_set():
            await spin(1)
        task.cancel()
        await spin()
        assert not task.done()
        go.set()
        await asyncio.wait([task])
    assert task.cancelled() and ended.is_set()
    check_idle(keeper)
