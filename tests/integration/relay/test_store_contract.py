"""One suite for every way to a block store: in memory and over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import google_crc32c
import pytest

from kvrelay import hashing
from kvrelay.errors import (
    ChecksumMismatchError,
    HandleConsumedError,
    HandleForgedError,
    KvNotFoundError,
    KvTransferError,
    LeaseExpiredError,
    OverloadedError,
    StaleIncarnationError,
)
from kvrelay.handle import KvHandle, KvLayout, KvSegment
from kvrelay.kv.v1 import kv_store_service_pb2 as pb
from kvrelay.kv.v1 import kv_store_service_pb2_grpc
from kvrelay.kv.v1 import transfer_service_pb2 as transfer_pb
from services.kvstore.keeper import StoreKeeper
from services.kvstore.service import SERVICE_NAME, KvStoreServicer
from services.kvstore.store import BlockStore
from services.relay.store_client import BlockStoreClient
from services.relay.transfer import ReadEvent, SegmentChunk, SegmentEvent, SegmentStart, StorePort, StoreWrite
from services.relay.transports.grpc import GrpcStore
from services.runtime.clock import ManualClock
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry
from tests.unit.relay.relay_kit import BIG_LAYOUT, IDENTITY, LAYOUT, WIDE_LAYOUT, FakePages, MemoryStore, tokens, until


@dataclass
class World:
    keeper: StoreKeeper
    port: StorePort
    clock: ManualClock
    channels: ChannelPool | None = None

    def client(self, pages: FakePages) -> BlockStoreClient:
        return BlockStoreClient(self.port, IDENTITY, LAYOUT, pages)

    async def check_idle(self) -> None:
        await until(lambda: self.keeper.store.leases == 0 and self.keeper._streams == 0)
        self.keeper.store.check_integrity()


@asynccontextmanager
async def world_of(kind: str, *, limit_bytes: int = 64 << 20, max_streams: int = 8) -> AsyncIterator[World]:
    clock = ManualClock()
    keeper = StoreKeeper(BlockStore(limit_bytes, 10.0), 5, "store", clock, max_streams=max_streams)
    if kind == "memory":
        yield World(keeper, MemoryStore(keeper), clock)
        return
    telemetry = Telemetry.disabled()
    server = ServiceServer("store", telemetry, drain_grace_s=0.1)
    server.add(kv_store_service_pb2_grpc.add_KvStoreServiceServicer_to_server, KvStoreServicer(keeper), SERVICE_NAME)
    channels = ChannelPool(telemetry)
    keeper.address = f"127.0.0.1:{await server.start()}"
    try:
        yield World(keeper, GrpcStore(channels, keeper.address), clock, channels)
    finally:
        await channels.close()
        await server.drain()


kinds = pytest.mark.parametrize("kind", ["memory", "grpc"])


def hashes_of(count: int, seed: int = 0) -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(IDENTITY.fingerprint), tokens(4 * count, seed), 4)


async def read_all(port: StorePort, handle: KvHandle, first_block: int = 0) -> list[ReadEvent]:
    return [event async for event in port.read(handle, first_block, timeout_s=5)]


@kinds
@pytest.mark.parametrize("layout", [LAYOUT, WIDE_LAYOUT, BIG_LAYOUT], ids=["small", "one chunk", "three chunks"])
async def test_blocks_travel_through_the_store_bit_for_bit(kind: str, layout: KvLayout) -> None:
    async with world_of(kind) as world:
        source, target = FakePages(5, layout, seed=2), FakePages(5, layout)
        hashes = hashes_of(4)
        writer = BlockStoreClient(world.port, IDENTITY, layout, source)
        assert await writer.store(hashes, [3, 1, 0, 2], timeout_s=10) == 4
        assert await writer.store(hashes, [3, 1, 0, 2], timeout_s=10) == 0, "all are there"
        reader = BlockStoreClient(world.port, IDENTITY, layout, target)
        assert await reader.fetch_prefix([*hashes, bytes(32)], [0, 1, 2, 3, 4], 1, timeout_s=10) == 3
        for page, origin in ((1, 1), (2, 0), (3, 2)):
            assert target.bytes_of(page) == source.bytes_of(origin)
        assert target.bytes_of(0) == target.bytes_of(4) == bytes(layout.block_bytes)
        await world.check_idle()


@kinds
async def test_a_lookup_that_finds_nothing_leases_nothing(kind: str) -> None:
    async with world_of(kind) as world:
        assert await world.port.lookup(IDENTITY, LAYOUT, hashes_of(3), timeout_s=5) is None
        assert await world.client(FakePages(3)).fetch_prefix(hashes_of(3), [0, 1, 2], 0, timeout_s=5) == 0
        await world.check_idle()
        assert world.keeper.store.misses == 2


@kinds
async def test_wrong_handles_are_refused_with_their_typed_error(kind: str) -> None:
    async with world_of(kind) as world:
        await world.client(FakePages(3, seed=1)).store(hashes_of(3), [0, 1, 2], timeout_s=5)
        handle = await world.port.lookup(IDENTITY, LAYOUT, hashes_of(3), timeout_s=5)
        assert handle is not None
        for wrong, error in (
            (replace(handle, name="kvHandles/" + "0" * 32), KvNotFoundError),
            (replace(handle, name="kvHandles/" + "0" * 32, incarnation=4), StaleIncarnationError),
            (replace(handle, incarnation=4), StaleIncarnationError),
            (replace(handle, lease=replace(handle.lease, lease_id="guess")), HandleForgedError),
        ):
            with pytest.raises(error):
                await read_all(world.port, wrong)
        with pytest.raises(HandleForgedError):
            await world.port.release(handle.name, "guess", timeout_s=5)
        assert len(await read_all(world.port, handle)) == 7
        with pytest.raises(HandleConsumedError):
            await read_all(world.port, handle)
        late = await world.port.lookup(IDENTITY, LAYOUT, hashes_of(3), timeout_s=5)
        assert late is not None
        world.clock.advance(10)
        world.keeper.sweep()
        with pytest.raises(LeaseExpiredError):
            await read_all(world.port, late)
        write = await world.port.create(IDENTITY, LAYOUT, hashes_of(2, seed=3), timeout_s=5)
        with pytest.raises(HandleForgedError):
            await world.port.commit(replace(write, lease_id="guess"), timeout_s=5)
        await world.port.release(write.name, write.lease_id, timeout_s=5)
        with pytest.raises(HandleConsumedError):
            await world.port.commit(write, timeout_s=5)
        await world.check_idle()


def block_events(index: int, data: bytes, crc: int | None = None) -> list[SegmentEvent]:
    return [SegmentStart(KvSegment(index, 1, len(data), google_crc32c.value(data) if crc is None else crc)), SegmentChunk(0, data)]


@kinds
async def test_a_corrupt_block_is_refused_and_what_came_before_it_stays(kind: str) -> None:
    async with world_of(kind) as world:
        write = await world.port.create(IDENTITY, LAYOUT, hashes_of(3), timeout_s=5)

        async def events() -> AsyncGenerator[SegmentEvent, None]:
            for event in (
                *block_events(0, b"a" * LAYOUT.block_bytes),
                *block_events(1, b"b" * LAYOUT.block_bytes, crc=1),
                *block_events(2, b"c" * LAYOUT.block_bytes),
            ):
                yield event

        with pytest.raises(ChecksumMismatchError):
            await world.port.write(write, events(), timeout_s=5)
        assert await world.port.commit(write, timeout_s=5) == 1
        await world.check_idle()


@kinds
async def test_a_writer_that_dies_midway_leaves_nothing_visible_and_its_memory_comes_back(kind: str) -> None:
    async with world_of(kind) as world, asyncio.TaskGroup() as group:
        write = await world.port.create(IDENTITY, LAYOUT, hashes_of(3), timeout_s=5)

        async def events() -> AsyncGenerator[SegmentEvent, None]:
            for event in (*block_events(0, b"a" * LAYOUT.block_bytes), block_events(1, b"b" * LAYOUT.block_bytes)[0]):
                yield event
            await asyncio.Event().wait()

        writing = group.create_task(world.port.write(write, events(), timeout_s=30))
        await until(lambda: world.keeper.store.used_bytes == 2 * LAYOUT.block_bytes)
        writing.cancel()
        await asyncio.wait([writing])
        await until(lambda: world.keeper.store.used_bytes == LAYOUT.block_bytes)
        assert world.keeper.store.blocks == 0
        world.clock.advance(10)
        world.keeper.sweep()
        assert world.keeper.store.used_bytes == 0
        await world.check_idle()


@kinds
async def test_too_many_streams_are_refused(kind: str) -> None:
    async with world_of(kind, max_streams=1) as world, asyncio.TaskGroup() as group:
        write = await world.port.create(IDENTITY, LAYOUT, hashes_of(1), timeout_s=5)
        gate = asyncio.Event()

        async def slow() -> AsyncGenerator[SegmentEvent, None]:
            await gate.wait()
            for event in block_events(0, b"a" * LAYOUT.block_bytes):
                yield event

        writing = group.create_task(world.port.write(write, slow(), timeout_s=30))
        await until(lambda: world.keeper._streams == 1)
        with pytest.raises(OverloadedError) as caught:
            await world.port.write(write, _nothing(), timeout_s=5)
        assert caught.value.retry_after_s is not None
        gate.set()
        assert await writing == 1
        assert await world.port.commit(write, timeout_s=5) == 1
        await world.check_idle()


@kinds
async def test_many_writers_and_readers_of_shared_prefixes_agree(kind: str) -> None:
    """The memory limit is below what they write, so blocks come and go; whatever is read is right."""
    rng = random.Random(6)
    chains = [hashes_of(8, seed=0)[:k] + hashes_of(8, seed=s)[k:] for s, k in ((1, 0), (2, 3), (3, 5), (4, 8))]
    content = {h: rng.randbytes(LAYOUT.block_bytes) for chain in chains for h in chain}
    async with world_of(kind, limit_bytes=12 * LAYOUT.block_bytes) as world:

        async def worker(number: int) -> int:
            fetched = 0
            for turn in range(6):
                chain = chains[(number + turn) % len(chains)]
                pages = FakePages(8)
                got = await world.client(pages).fetch_prefix(chain, range(8), 0, timeout_s=20)
                for index in range(got):
                    assert pages.bytes_of(index) == content[chain[index]]
                for index in range(got, 8):
                    pages.page_view(index)[:] = content[chain[index]]
                await world.client(pages).store(chain, range(8), timeout_s=20)
                fetched += got
            return fetched

        async with asyncio.TaskGroup() as group:
            workers = [group.create_task(worker(number)) for number in range(6)]
        assert sum(x.result() for x in workers) > 0 and world.keeper.store.evicted > 0
        await world.check_idle()


@pytest.mark.parametrize("operation", ["fetch", "store"])
async def test_cancel_at_any_point_over_grpc_ends_both_sides(operation: str) -> None:
    rng = random.Random(7)
    hashes = hashes_of(3)
    async with world_of("grpc") as world:
        source = FakePages(3, seed=1)
        for turn in range(30):
            if operation == "fetch":
                await world.client(source).store(hashes, [0, 1, 2], timeout_s=5)
                work = world.client(FakePages(3)).fetch_prefix(hashes, [0, 1, 2], 0, timeout_s=5)
            else:
                work = world.client(source).store(hashes_of(3, seed=turn), [0, 1, 2], timeout_s=5)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(work)
                for _ in range(rng.randrange(1, 60)):
                    await asyncio.sleep(0.0001 if rng.random() < 0.3 else 0)
                task.cancel()
                await asyncio.wait([task])
            # A create whose answer the cancel cut off is an open write of nobody: its lease ends it.
            await until(lambda: world.keeper._streams == 0)
            world.clock.advance(10)
            world.keeper.sweep()
            await world.check_idle()
        assert await world.client(source).store(hashes_of(3, seed=99), [0, 1, 2], timeout_s=5) == 3


async def test_requests_that_make_no_sense_are_typed_errors() -> None:
    async with world_of("grpc") as world:
        port = world.port
        for chain in ([], [b"short"], [bytes(32), bytes(32)], [bytes([i // 256, i % 256]) + bytes(30) for i in range(20_000)]):
            with pytest.raises(KvTransferError) as caught:
                await port.create(IDENTITY, LAYOUT, chain, timeout_s=5)
            assert caught.value.fields["cause"] == "INVALID_REQUEST"
        for layout in (replace(LAYOUT, layers=0), replace(LAYOUT, layers=10_000_000)):
            with pytest.raises(KvTransferError):
                await port.create(IDENTITY, layout, hashes_of(1), timeout_s=5)
        assert world.channels is not None
        stub = kv_store_service_pb2_grpc.KvStoreServiceStub(world.channels.get(world.keeper.address))
        info = await stub.GetStoreInfo(pb.GetStoreInfoRequest(), timeout=5)
        assert (info.incarnation, info.blocks, info.limit_bytes, info.lease_ttl.seconds) == (5, 0, 64 << 20, 10)
        write = await port.create(IDENTITY, LAYOUT, hashes_of(1), timeout_s=5)
        request = pb.KvStoreServiceRenewLeasesRequest(
            renewals=[transfer_pb.LeaseRenewal(name=write.name, lease_id=x) for x in (write.lease_id, "guess")]
        )
        results = (await stub.RenewLeases(request, timeout=5)).results
        assert [(r.renewed, r.ttl.seconds) for r in results] == [(True, 10), (False, 0)]
        with pytest.raises(KvNotFoundError):
            await port.write(StoreWrite("", "", ()), _nothing(), timeout_s=5)
        await port.release(write.name, write.lease_id, timeout_s=5)
        await world.check_idle()


async def _nothing() -> AsyncGenerator[SegmentEvent, None]:
    return
    yield
