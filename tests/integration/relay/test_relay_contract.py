"""One suite for every transport: a hand-over works, is refused, breaks and is cancelled alike in memory and over real gRPC."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from kvrelay.errors import (
    ChecksumMismatchError,
    FingerprintMismatchError,
    HandleConsumedError,
    HandleForgedError,
    InternalError,
    KvAbortedError,
    KvNotFoundError,
    KvTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    PromptMismatchError,
    StaleIncarnationError,
)
from kvrelay.handle import KvLayout, Lease, PeerLocation
from kvrelay.kv.v1 import transfer_service_pb2_grpc
from services.relay.holder import HeldKv, KvHolder
from services.relay.puller import KvPuller, PullResult
from services.relay.service import SERVICE_NAME, KvTransferServicer
from services.relay.transfer import PullEnd, PullEvent, SegmentChunk, SegmentStart, TransferPort
from services.relay.transports.grpc import GrpcTransfer
from services.relay.transports.memory import MemoryTransfer
from services.runtime.clock import ManualClock
from services.runtime.rpc.channels import ChannelPool
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry
from tests.unit.relay.faults import cut, flip, stall
from tests.unit.relay.relay_kit import (
    BIG_LAYOUT,
    IDENTITY,
    LAYOUT,
    WIDE_LAYOUT,
    FakePages,
    FaultyTransfer,
    Warp,
    complete,
    make_holder,
    outcome,
    request_of,
    tokens,
    until,
)

PAGES = [6, 1, 4, 3, 0]
"""Where the holder has its five blocks; the taker uses 1 to 5."""
TAKER_PAGES = [1, 2, 3, 4, 5]


@dataclass
class World:
    """One holder that a transport reaches."""

    source: FakePages
    holder: KvHolder
    transport: TransferPort
    clock: ManualClock
    server: ServiceServer | None = None

    async def hold(self, *, seed: int = 0) -> HeldKv:
        """A prompt of five blocks, the last of them not full."""
        return await self.holder.hold(tokens(5 * self.holder.layout.block_size - 1, seed), pages=PAGES)

    def taker(self, warp: Warp | None = None, **options: bool) -> Taker:
        return Taker(FaultyTransfer(self.transport, warp, **options), self.holder.layout)

    def check_idle(self) -> None:
        assert self.holder.held_handles == 0


class Taker:
    def __init__(self, transport: FaultyTransfer, layout: KvLayout) -> None:
        self.transport = transport
        self.pool = FakePages(7, layout)
        self.puller = KvPuller(transport, IDENTITY, layout, self.pool, idle_timeout_s=5)

    async def pull(self, held: HeldKv, *, timeout_s: float = 20.0, first_block: int = 0) -> PullResult:
        return await self.puller.pull(
            held.handle, prompt_digest=held.handle.prompt_digest, pages=TAKER_PAGES, timeout_s=timeout_s, first_block=first_block
        )

    def landed(self, source: FakePages) -> int:
        """Leading blocks in place; every other page must be as it was."""
        right = [self.pool.bytes_of(t) == source.bytes_of(s) for t, s in zip(TAKER_PAGES, PAGES, strict=True)]
        count = right.index(False) if False in right else len(right)
        for page in {0, 6, *TAKER_PAGES[count:]}:
            assert self.pool.bytes_of(page) == bytes(self.pool.page_bytes), f"page {page} was written"
        return count


@asynccontextmanager
async def world_of(transport: str, layout: KvLayout = LAYOUT) -> AsyncIterator[World]:
    source, clock = FakePages(7, layout, seed=1), ManualClock()
    holder = make_holder(source, clock, layout=layout, ttl_s=30.0)
    if transport == "memory":
        yield World(source, holder, MemoryTransfer({"holder": holder}), clock)
        await holder.revoke_all()
        return
    telemetry = Telemetry.disabled()
    server = ServiceServer("holder", telemetry, drain_grace_s=0.1)
    server.add(transfer_service_pb2_grpc.add_KvTransferServiceServicer_to_server, KvTransferServicer(holder), SERVICE_NAME)
    channels = ChannelPool(telemetry)
    holder.address = f"127.0.0.1:{await server.start()}"
    try:
        yield World(source, holder, GrpcTransfer(channels), clock, server)
    finally:
        await holder.revoke_all()
        await channels.close()
        await server.drain()


transports = pytest.mark.parametrize("transport", ["memory", "grpc"])


@transports
@pytest.mark.parametrize("layout", [LAYOUT, WIDE_LAYOUT, BIG_LAYOUT], ids=["grouped", "one chunk", "three chunks"])
async def test_a_hand_over_during_prefill_is_bit_for_bit_and_mostly_early(transport: str, layout: KvLayout) -> None:
    async with world_of(transport, layout) as world, asyncio.TaskGroup() as group:
        held = await world.hold()
        taker = world.taker()
        size = layout.block_size
        seen: asyncio.Queue[int] = asyncio.Queue()
        pulling = group.create_task(
            taker.puller.pull(
                held.handle, prompt_digest=held.handle.prompt_digest, pages=TAKER_PAGES, timeout_s=30, on_block=seen.put_nowait
            )
        )
        for blocks in (2, 4):
            held.progress(blocks * size + 1)
            while await seen.get() < blocks:
                pass
            assert taker.landed(world.source) == blocks, "blocks arrive while prefill still computes"
        held.progress(5 * size - 1)
        held.commit(17, False, 4321)
        result = await pulling
        assert taker.landed(world.source) == 5
        assert (result.first_token_id, result.finished, result.prefill_end_ns) == (17, False, 4321)
        stats = result.stats
        assert (stats.blocks, stats.kv_bytes, stats.transport) == (5, 5 * layout.block_bytes, transport)
        assert 4 * layout.block_bytes <= stats.early_bytes <= stats.kv_bytes
        assert await held.ended() == "released"
        world.check_idle()


@transports
async def test_only_what_the_taker_lacks_is_sent(transport: str) -> None:
    async with world_of(transport) as world:
        held = await world.hold()
        complete(held, 3, finished=True)
        taker = world.taker()
        result = await taker.pull(held, first_block=4)
        assert result.stats.blocks == 1 and result.finished
        assert taker.pool.bytes_of(5) == world.source.bytes_of(0) and taker.pool.bytes_of(4) == bytes(LAYOUT.block_bytes)
        held = await world.hold()
        complete(held)
        assert (await world.taker().pull(held, first_block=5)).stats.kv_bytes == 0


@transports
async def test_wrong_handles_are_refused_with_their_typed_error_and_never_answered(transport: str) -> None:
    async with world_of(transport) as world:
        held = await world.hold()
        complete(held)
        location = PeerLocation(world.holder.address)
        right = request_of(held.handle)
        other_prompt = (await world.hold(seed=5)).handle.prompt_digest
        for wrong, error in (
            (replace(right, name="kvHandles/" + "0" * 32), KvNotFoundError),
            (replace(right, name="kvHandles/" + "0" * 32, incarnation=1), StaleIncarnationError),
            (replace(right, lease_id="f" * 32), HandleForgedError),
            (replace(right, incarnation=76), StaleIncarnationError),
            (replace(right, identity=replace(IDENTITY, tokenizer_digest="sha256:x")), FingerprintMismatchError),
            (replace(right, layout=replace(LAYOUT, kv_heads=4)), LayoutMismatchError),
            (replace(right, prompt_digest=other_prompt), PromptMismatchError),
        ):
            with pytest.raises(error):
                await anext(world.transport.pull(location, wrong, timeout_s=5))
        assert isinstance(await world.taker().pull(held), PullResult)
        with pytest.raises(HandleConsumedError):
            await world.taker().pull(held)
        late = await world.hold()
        world.clock.advance(30)
        world.holder.sweep()
        with pytest.raises(LeaseExpiredError):
            await world.taker().pull(late)
        broken = await world.hold()
        broken.fail(InternalError("device lost"))
        with pytest.raises(KvAbortedError):
            await world.taker().pull(broken)
        world.check_idle()


@transports
async def test_a_handle_from_the_holders_previous_life_is_refused(transport: str) -> None:
    async with world_of(transport) as world:
        old = await KvHolder(IDENTITY, LAYOUT, 76, world.holder.address, world.source, world.clock).hold(tokens(19), pages=PAGES)
        with pytest.raises(StaleIncarnationError) as caught:
            await world.taker().pull(old)
        assert caught.value.fields["holder_incarnation"] == "77" and caught.value.retryable


async def _reorder(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    listed = [event async for event in events]
    listed[4:6], listed[6:8] = listed[6:8], listed[4:6]
    for event in listed:
        yield event


async def _repeat(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    listed = [event async for event in events]
    for event in (*listed[:4], *listed[2:]):
        yield event


async def _lose(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    listed = [event async for event in events]
    for event in (*listed[:4], *listed[6:]):
        yield event


async def _truncate(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    count = 0
    async for event in events:
        if isinstance(event, SegmentChunk):
            count += 1
            if count == 3:
                event = replace(event, data=event.data[:-1])
        yield event


async def _no_end(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    async for event in events:
        if not isinstance(event, PullEnd):
            yield event


async def _early_end(events: AsyncIterator[PullEvent]) -> AsyncGenerator[PullEvent, None]:
    async for event in events:
        if isinstance(event, SegmentStart) and event.segment.first_block == 2:
            yield PullEnd(1, False, 1)
        yield event


@transports
@pytest.mark.parametrize(
    ("warp", "error", "landed"),
    [
        (flip, ChecksumMismatchError, 2),
        (cut, KvTransferError, 2),
        (stall, KvTransferError, 2),
        (_reorder, KvTransferError, 2),
        (_repeat, KvTransferError, 2),
        (_lose, KvTransferError, 2),
        (_truncate, KvTransferError, 2),
        (_no_end, KvTransferError, 5),
        (_early_end, KvTransferError, 2),
    ],
)
async def test_a_fault_on_the_way_ends_in_its_error_with_only_verified_blocks_in_place(
    transport: str, warp: Warp, error: type[Exception], landed: int
) -> None:
    async with world_of(transport, WIDE_LAYOUT) as world:
        held = await world.hold()
        complete(held)
        taker = world.taker(warp)
        with pytest.raises(error):
            await taker.pull(held, timeout_s=1.0 if warp is stall else 20.0)
        assert taker.landed(world.source) == landed
        async with asyncio.timeout(5):
            assert await held.ended() == "released"
        world.check_idle()
        again = await world.hold()
        complete(again)
        assert isinstance(await world.taker().pull(again), PullResult), "the next hand-over works"


@transports
async def test_a_taker_that_dies_midway_frees_the_holders_pages_at_once(transport: str) -> None:
    """Its stream is cancelled; no release gets through, and the clock stands still, so it can't be the lease."""
    async with world_of(transport, WIDE_LAYOUT) as world, asyncio.TaskGroup() as group:
        held = await world.hold()
        held.progress(2 * WIDE_LAYOUT.block_size)
        stream = world.transport.pull(PeerLocation(world.holder.address), request_of(held.handle), timeout_s=30)
        for _ in range(4):
            await anext(stream)
        waiting = group.create_task(outcome(anext(stream)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.wait([waiting])
        await stream.aclose()
        async with asyncio.timeout(5):
            assert await held.ended() == "released"
        world.check_idle()


@transports
async def test_a_taker_that_stops_reading_loses_the_lease_and_holds_no_page(transport: str) -> None:
    async with world_of(transport, BIG_LAYOUT) as world:
        held = await world.hold()
        # The last block stays out, so that the holder cannot be done however much the buffers between take.
        held.progress(4 * BIG_LAYOUT.block_size)
        stream = world.transport.pull(PeerLocation(world.holder.address), request_of(held.handle), timeout_s=30)
        await anext(stream)
        # Until flow control stops the holder, in however many events of whatever buffers there are.
        for _ in range(100):
            await asyncio.sleep(0.005)
        world.clock.advance(30)
        world.holder.sweep()
        async with asyncio.timeout(5):
            assert await held.ended() == "expired"
        world.check_idle()

        async def rest() -> None:
            async for _ in stream:
                pass

        with pytest.raises(LeaseExpiredError):
            await rest()


@transports
async def test_progress_commit_fail_and_expiry_each_wake_a_waiting_taker(transport: str) -> None:
    async with world_of(transport) as world, asyncio.TaskGroup() as group:
        for wake, error in (("fail", KvAbortedError), ("expiry", LeaseExpiredError), ("commit", None)):
            held = await world.hold()
            pulling = group.create_task(outcome(world.taker().pull(held)))
            held.progress(2 * LAYOUT.block_size)
            await until(lambda held=held: held.served.blocks == 2)
            match wake:
                case "fail":
                    held.fail(InternalError("device lost"))
                case "expiry":
                    world.clock.advance(30)
                    world.holder.sweep()
                case "commit":
                    complete(held)
            result = await pulling
            assert isinstance(result, error or PullResult)
        world.check_idle()


@transports
async def test_renewals_keep_a_handle_that_waits_and_a_wrong_secret_does_not(transport: str) -> None:
    async with world_of(transport) as world:
        held = await world.hold()
        location, name, secret = PeerLocation(world.holder.address), held.handle.name, held.handle.lease.lease_id
        for _ in range(3):
            world.clock.advance(20)
            assert await world.transport.renew(location, name, secret, timeout_s=5)
            assert not await world.transport.renew(location, name, "guess", timeout_s=5)
        with pytest.raises(HandleForgedError):
            await world.transport.release(location, name, "guess", timeout_s=5)
        await world.transport.release(location, name, secret, timeout_s=5)
        assert await held.ended() == "released"
        await world.transport.release(location, name, secret, timeout_s=5)
        assert not await world.transport.renew(location, name, secret, timeout_s=5)


@transports
async def test_a_pull_renews_the_lease_of_a_handle_whose_prefill_is_slow(transport: str) -> None:
    async with world_of(transport) as world, asyncio.TaskGroup() as group:
        held = await world.hold()
        held.handle = replace(held.handle, lease=Lease(held.handle.lease.lease_id, 0.15))
        taker = world.taker()
        pulling = group.create_task(taker.pull(held))
        for _ in range(3):
            renewed = taker.transport.renewed
            world.clock.advance(25)
            await until(lambda renewed=renewed: taker.transport.renewed >= renewed + 2)
            world.holder.sweep()
        complete(held)
        assert isinstance(await pulling, PullResult)


@transports
async def test_many_hand_overs_at_once_keep_their_bytes_apart(transport: str) -> None:
    rng = random.Random(8)
    async with world_of(transport) as world:
        source = FakePages(200, seed=9)
        world.holder.pages = source

        async def hand_over(number: int) -> None:
            pages = list(range(5 * number, 5 * number + 5))
            held = await world.holder.hold(tokens(19, number), pages=pages)
            taker = world.taker()
            async with asyncio.TaskGroup() as group:
                pulling = group.create_task(taker.pull(held))
                for computed in sorted(rng.sample(range(1, 19), 3)):
                    held.progress(computed)
                    await asyncio.sleep(rng.random() * 0.002)
                complete(held, number)
            assert pulling.result().first_token_id == number
            for target, page in zip(TAKER_PAGES, pages, strict=True):
                assert taker.pool.bytes_of(target) == source.bytes_of(page)

        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(hand_over(number))
        world.check_idle()


@transports
async def test_cancel_at_any_point_frees_both_sides(transport: str) -> None:
    rng = random.Random(12)
    async with world_of(transport) as world:
        for turns in (*range(1, 40, 4), *(rng.randrange(1, 300) for _ in range(30))):
            held = await world.hold()
            taker = world.taker()
            complete(held)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(taker.pull(held))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            async with asyncio.timeout(5):
                assert await held.ended() == "released"
            taker.landed(world.source)
        world.check_idle()
        held = await world.hold()
        complete(held)
        assert isinstance(await world.taker().pull(held), PullResult)


async def test_a_holder_that_cannot_be_reached_is_a_transfer_error() -> None:
    async with world_of("grpc") as world:
        held = await world.hold()
        held.handle = replace(held.handle, locations=(PeerLocation("127.0.0.1:1"),))
        with pytest.raises(KvTransferError):
            await world.taker().pull(held)
        await held.revoke()
    holder = make_holder(FakePages(8))
    elsewhere = await holder.hold(tokens(19), pages=PAGES)
    with pytest.raises(KvTransferError):
        await Taker(FaultyTransfer(MemoryTransfer({})), LAYOUT).pull(elsewhere)
    await holder.revoke_all()


async def test_a_server_that_goes_away_midway_is_a_transfer_error_and_frees_its_pages() -> None:
    async with world_of("grpc") as world, asyncio.TaskGroup() as group:
        held = await world.hold()
        held.progress(2 * LAYOUT.block_size)
        taker = world.taker()
        pulling = group.create_task(outcome(taker.pull(held)))
        await until(lambda: held.served.blocks == 2)
        assert world.server is not None
        await world.server.drain()
        assert isinstance(await pulling, KvTransferError)
        assert taker.landed(world.source) in (0, 2)
        assert await held.ended() == "released"
        world.check_idle()
