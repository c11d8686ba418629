"""KvPuller against holders that lie, stall, vanish or talk too much: nothing unverified counts, nothing outside its pages is written."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

import google_crc32c
import pytest

import services.relay.puller as puller_module
from kvrelay.errors import (
    ChecksumMismatchError,
    FingerprintMismatchError,
    HandleForgedError,
    KvTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    PromptMismatchError,
)
from kvrelay.handle import HandleState, KvHandle, KvSegment, Lease, Location, PeerLocation, StoreLocation
from services.relay.copying import land
from services.relay.puller import KvPuller
from services.relay.transfer import PullEnd, PullEvent, PullRequest, SegmentChunk, SegmentStart
from tests.unit.relay.relay_kit import IDENTITY, LAYOUT, FakePages, outcome, spin

DIGEST = bytes(range(32))
BLOCK = LAYOUT.block_bytes
HANDLE = KvHandle(
    name="kvHandles/" + "1" * 32,
    state=HandleState.WRITING,
    identity=IDENTITY,
    layout=LAYOUT,
    token_start=0,
    token_end=11,
    block_hashes=(bytes(32), bytes(32)),
    prompt_digest=DIGEST,
    segments=(),
    lease=Lease("secret", 30.0),
    incarnation=5,
    locations=(StoreLocation("elsewhere"), PeerLocation("holder")),
)
EAGER = replace(HANDLE, lease=Lease("secret", 0.15))
"""Its lease is renewed every 50 ms."""
END = PullEnd(42, False, 99)


def data_of(first: int, count: int = 1) -> bytes:
    return b"".join(bytes([block + 1]) * BLOCK for block in range(first, first + count))


def start(first: int, count: int = 1, *, early: bool = False, wait_s: float = 0.0, **changes: int | None) -> SegmentStart:
    segment = KvSegment(first, count, count * BLOCK, google_crc32c.value(data_of(first, count)))
    return SegmentStart(replace(segment, **changes), wait_s, early)


def block(first: int, count: int = 1, *, early: bool = False) -> list[PullEvent]:
    return [start(first, count, early=early), SegmentChunk(0, data_of(first, count))]


HANG = object()


class ScriptedTransfer:
    """Sends what it was told to; `HANG` stays silent, an exception is raised."""

    name = "scripted"

    def __init__(self, script: Sequence[object], *, renews: bool = True) -> None:
        self.script = script
        self.renews = renews
        self.requests: list[tuple[Location, PullRequest]] = []
        self.released: list[str] = []
        self.renewed = 0
        self.renewed_again = asyncio.Event()
        self.closed = False

    def reaches(self, location: Location) -> bool:
        return isinstance(location, PeerLocation)

    async def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]:
        self.requests.append((location, request))
        try:
            for step in self.script:
                if step is HANG:
                    await asyncio.Event().wait()
                elif isinstance(step, Exception):
                    raise step
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step  # type: ignore[misc]
        finally:
            self.closed = True

    async def renew(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> bool:
        assert (name, lease_id) == (HANDLE.name, "secret")
        self.renewed += 1
        if self.renewed == 2:
            self.renewed_again.set()
        return self.renews

    async def release(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> None:
        assert location == PeerLocation("holder") and lease_id == "secret"
        self.released.append(name)


class Taker:
    """A pool whose pages 1, 4 and 2 are the taker's; pages 0, 3 and 5 belong to others and hold 0xEE."""

    PAGES = (1, 4, 2)

    def __init__(self, script: Sequence[object], *, idle_timeout_s: float = 5.0, renews: bool = True) -> None:
        self.pool = FakePages(6)
        for page in (0, 3, 5):
            self.pool.page_view(page)[:] = b"\xee" * BLOCK
        self.transfer = ScriptedTransfer(script, renews=renews)
        self.puller = KvPuller(self.transfer, IDENTITY, LAYOUT, self.pool, idle_timeout_s=idle_timeout_s)
        self.seen: list[int] = []

    async def pull(
        self, handle: KvHandle = HANDLE, *, first_block: int = 0, timeout_s: float = 20.0, digest: bytes = DIGEST
    ) -> puller_module.PullResult:
        return await self.puller.pull(
            handle, prompt_digest=digest, pages=self.PAGES, first_block=first_block, timeout_s=timeout_s, on_block=self.seen.append
        )

    def check_pages(self, landed: int, first_block: int = 0) -> None:
        """Blocks [first_block, landed) are in place, everything else untouched."""
        for index, page in enumerate(self.PAGES):
            expected = data_of(index) if first_block <= index < landed else bytes(BLOCK)
            assert self.pool.bytes_of(page) == expected, f"block {index}"
        assert all(self.pool.bytes_of(page) == b"\xee" * BLOCK for page in (0, 3, 5)), "a page of somebody else"


async def test_a_pull_lands_blocks_by_position_and_counts_what_came_early() -> None:
    taker = Taker([*block(0, early=True), *block(1, 2), END])
    result = await taker.pull()
    taker.check_pages(3)
    assert (result.first_token_id, result.finished, result.prefill_end_ns) == (42, False, 99)
    assert taker.seen == [1, 3]
    stats = result.stats
    assert (stats.kv_bytes, stats.blocks, stats.early_bytes, stats.transport) == (3 * BLOCK, 3, BLOCK, "scripted")
    assert stats.wait_s >= 0 and stats.transfer_s >= 0
    assert taker.transfer.released == [] and taker.transfer.closed
    location, request = taker.transfer.requests[0]
    assert location == PeerLocation("holder"), "the first location that the transport reaches"
    assert request == PullRequest(HANDLE.name, "secret", 5, IDENTITY, LAYOUT, DIGEST, 0)


async def test_blocks_the_taker_has_are_neither_asked_for_nor_written() -> None:
    taker = Taker([*block(2), END])
    result = await taker.pull(first_block=2)
    taker.check_pages(3, first_block=2)
    assert result.stats.blocks == 1 and taker.transfer.requests[0][1].first_block == 2
    taker = Taker([END])
    assert (await taker.pull(first_block=3)).stats.kv_bytes == 0
    taker.check_pages(0)


@pytest.mark.parametrize(
    ("script", "error", "landed"),
    [
        pytest.param([*block(1)], KvTransferError, 0, id="gap"),
        pytest.param([*block(0), *block(0)], KvTransferError, 1, id="block sent twice"),
        pytest.param([*block(0, 2), *block(1, 2)], KvTransferError, 2, id="overlap"),
        pytest.param([*block(0, 4)], KvTransferError, 0, id="more blocks than the handle"),
        pytest.param([start(0, size_bytes=BLOCK + 1)], KvTransferError, 0, id="segment too long"),
        pytest.param([start(0, size_bytes=BLOCK - 1)], KvTransferError, 0, id="segment too short"),
        pytest.param([start(0, block_count=0, size_bytes=0)], KvTransferError, 0, id="segment of nothing"),
        pytest.param([start(0, crc32c=None), SegmentChunk(0, data_of(0))], KvTransferError, 0, id="no checksum"),
        pytest.param([start(0), SegmentChunk(0, data_of(0, 2))], KvTransferError, 0, id="chunk beyond the segment"),
        pytest.param([start(0), SegmentChunk(5, data_of(0)[5:])], KvTransferError, 0, id="chunk with a hole before it"),
        pytest.param([SegmentChunk(0, data_of(0))], KvTransferError, 0, id="bytes of no segment"),
        pytest.param([start(0), SegmentChunk(0, b"x" * BLOCK)], ChecksumMismatchError, 0, id="wrong bytes"),
        pytest.param([*block(0), start(1), SegmentChunk(0, data_of(2))], ChecksumMismatchError, 1, id="another block's bytes"),
        pytest.param([*block(0, 2), END], KvTransferError, 2, id="end before the last block"),
        pytest.param([*block(0, 2), start(2), END], KvTransferError, 2, id="end inside a segment"),
        pytest.param([END], KvTransferError, 0, id="end at once"),
        pytest.param([*block(0, 3)], KvTransferError, 3, id="no end"),
        pytest.param([*block(0, 2), start(2)], KvTransferError, 2, id="cut inside a segment"),
        pytest.param([], KvTransferError, 0, id="nothing at all"),
        pytest.param([*block(0, 3), END, END], KvTransferError, 3, id="two ends"),
        pytest.param([*block(0, 3), END, *block(0)], KvTransferError, 3, id="blocks after the end"),
        pytest.param([*block(0), KvTransferError("peer gone")], KvTransferError, 1, id="peer gone"),
        pytest.param([*block(0), LeaseExpiredError("late")], LeaseExpiredError, 1, id="refused midway"),
    ],
)
async def test_a_broken_holder_is_refused_and_let_go_of(script: list[object], error: type[Exception], landed: int) -> None:
    taker = Taker(script)
    with pytest.raises(error):
        await taker.pull()
    taker.check_pages(landed)
    assert taker.seen[-1:] == ([landed] if landed else [])
    assert taker.transfer.released == [HANDLE.name] and taker.transfer.closed


@pytest.mark.parametrize(
    ("handle", "digest", "error"),
    [
        (replace(HANDLE, identity=replace(IDENTITY, rope="theta=1")), DIGEST, FingerprintMismatchError),
        (replace(HANDLE, layout=replace(LAYOUT, layers=3)), DIGEST, LayoutMismatchError),
        (HANDLE, bytes(32), PromptMismatchError),
        (replace(HANDLE, token_end=13), DIGEST, PromptMismatchError),
        (replace(HANDLE, token_end=8), DIGEST, PromptMismatchError),
        (replace(HANDLE, token_start=1), DIGEST, HandleForgedError),
        (replace(HANDLE, locations=(StoreLocation("x"),)), DIGEST, KvTransferError),
        (replace(HANDLE, locations=()), DIGEST, KvTransferError),
    ],
)
async def test_a_handle_that_cannot_be_the_takers_is_refused_without_a_call(
    handle: KvHandle, digest: bytes, error: type[Exception]
) -> None:
    taker = Taker([*block(0, 3), END])
    with pytest.raises(error):
        await taker.pull(handle, digest=digest)
    assert taker.transfer.requests == [] and taker.transfer.released == []


async def test_silence_inside_a_segment_is_not_excused_by_renewals() -> None:
    taker = Taker([start(0), HANG], idle_timeout_s=0.5)
    with pytest.raises(KvTransferError, match="sign of life"):
        await taker.pull(EAGER)
    assert taker.transfer.renewed >= 1 and taker.transfer.released == [HANDLE.name]


async def test_a_holder_that_waits_for_prefill_has_time_while_it_renews() -> None:
    taker = Taker([1.5, *block(0, 3), END], idle_timeout_s=1.0)
    await taker.pull(EAGER)
    taker.check_pages(3)
    assert taker.transfer.renewed >= 4


async def test_a_holder_that_neither_sends_nor_renews_is_given_up() -> None:
    taker = Taker([HANG], idle_timeout_s=0.5, renews=False)
    with pytest.raises(KvTransferError, match="sign of life"):
        await taker.pull(EAGER)
    assert taker.transfer.renewed == 1, "a lost lease is not asked for again"


async def test_the_whole_pull_is_bounded_whatever_the_holder_does() -> None:
    taker = Taker([HANG], idle_timeout_s=0.2)
    with pytest.raises(KvTransferError, match=r"over 0\.5 s"):
        await taker.pull(timeout_s=0.5)
    assert taker.transfer.closed and taker.transfer.released == [HANDLE.name]


async def test_cancel_at_any_point_leaves_no_thread_and_no_handle_behind() -> None:
    rng = random.Random(11)
    cancelled = 0
    for turns in (*range(40), *(rng.randrange(400) for _ in range(60))):
        taker = Taker([*block(0), *block(1), *block(2), END])
        async with asyncio.TaskGroup() as group:
            task = group.create_task(taker.pull())
            for _ in range(turns):
                await asyncio.sleep(0)
            finished = task.done()
            task.cancel()
            await asyncio.wait([task])
        before = bytes(taker.pool.buffer)
        assert finished or task.cancelled()
        cancelled += task.cancelled()
        if taker.transfer.requests and not finished:
            assert taker.transfer.released == [HANDLE.name] and taker.transfer.closed
        landed = sum(taker.pool.bytes_of(page) == data_of(index) for index, page in enumerate(Taker.PAGES))
        taker.check_pages(landed)
        assert landed - (taker.seen[-1] if taker.seen else 0) in (0, 1), "at most one verified block that the cancel left unreported"
        await spin(5)
        assert bytes(taker.pool.buffer) == before
    assert cancelled >= 5


async def test_a_cancelled_pull_returns_only_when_no_thread_writes_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow_land(segment: KvSegment, chunks: Sequence[bytes], views: Sequence[memoryview]) -> None:
        began.set()
        go.wait(10)
        land(segment, chunks, views)
        ended.set()

    monkeypatch.setattr(puller_module, "land", slow_land)
    taker = Taker([*block(0, 3), END])
    async with asyncio.TaskGroup() as group:
        task = group.create_task(taker.pull())
        while not began.is_set():
            await spin(1)
        task.cancel()
        await spin()
        task.cancel()
        await spin()
        assert not task.done()
        go.set()
        await asyncio.wait([task])
    assert task.cancelled() and ended.is_set()


async def test_letting_go_of_a_dead_holder_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(puller_module, "RELEASE_TIMEOUT_S", 0.05)
    taker = Taker([KvTransferError("peer gone")])

    async def never(*args: object, **kwargs: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(taker.transfer, "release", never)
    with pytest.raises(KvTransferError, match="peer gone"):
        await taker.pull()
    await taker.puller.release(HANDLE)


async def test_keeping_a_handle_alive_renews_until_the_context_ends_and_passes_errors_through() -> None:
    taker = Taker([])
    with pytest.raises(ZeroDivisionError):
        async with taker.puller.keep_alive(EAGER):
            await taker.transfer.renewed_again.wait()
            _ = 1 // 0
    renewed = taker.transfer.renewed
    await spin()
    assert taker.transfer.renewed == renewed
    async with taker.puller.keep_alive(replace(HANDLE, locations=())):
        pass


async def test_one_failing_pull_does_not_touch_another() -> None:
    good, bad = Taker([*block(0), 0.05, *block(1, 2), END]), Taker([*block(0), start(1), SegmentChunk(0, b"x" * BLOCK)])
    async with asyncio.TaskGroup() as group:
        results = [group.create_task(outcome(x.pull())) for x in (good, bad)]
    assert isinstance(results[1].result(), ChecksumMismatchError)
    assert isinstance(results[0].result(), puller_module.PullResult)
    good.check_pages(3)
