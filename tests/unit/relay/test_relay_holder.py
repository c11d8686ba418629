"""KvHolder alone: refusals in order, wake-ups, the lease on a clock turned by hand, and when pages are free."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from dataclasses import replace

import google_crc32c
import pytest

import services.relay.holder as holder_module
from kvrelay import hashing
from kvrelay.errors import (
    FingerprintMismatchError,
    HandleConsumedError,
    HandleForgedError,
    InternalError,
    InvalidRequestError,
    KvAbortedError,
    KvNotFoundError,
    LayoutMismatchError,
    LeaseExpiredError,
    OverloadedError,
    PromptMismatchError,
    StaleIncarnationError,
)
from kvrelay.handle import HandleState, PeerLocation
from services.relay.copying import gather
from services.relay.transfer import PullEnd, PullRequest, SegmentChunk, SegmentStart
from services.runtime.clock import ManualClock
from tests.unit.relay.relay_kit import (
    BIG_LAYOUT,
    IDENTITY,
    LAYOUT,
    WIDE_LAYOUT,
    FakePages,
    complete,
    make_holder,
    outcome,
    request_of,
    spin,
    tokens,
)

OTHER_NAME = "kvHandles/" + "0" * 32


async def drain(holder: holder_module.KvHolder, request: PullRequest) -> list[object]:
    async with aclosing(holder.pull(request)) as events:
        return [event async for event in events]


async def test_a_handle_describes_its_prompt_before_anything_is_computed() -> None:
    holder = make_holder(FakePages(8))
    prompt = tokens(10)
    held = await holder.hold(prompt, "salt")
    handle = held.handle
    root = hashing.root_hash(IDENTITY.fingerprint, "salt")
    assert (handle.token_start, handle.token_end, handle.block_count) == (0, 10, 3)
    assert handle.block_hashes == tuple(hashing.block_hashes(root, prompt, 4)) and len(handle.block_hashes) == 2
    assert handle.prompt_digest == hashing.prompt_digest(root, prompt, 4)
    assert handle.state is HandleState.WRITING and handle.incarnation == 77 and handle.locations == (PeerLocation("holder"),)
    assert sum(s.size_bytes for s in handle.segments) == 3 * LAYOUT.block_bytes
    again = await holder.hold(prompt, "salt")
    assert again.handle.name != handle.name and again.handle.lease.lease_id != handle.lease.lease_id
    assert (await holder.hold(prompt)).handle.prompt_digest != handle.prompt_digest
    await holder.revoke_all()


async def test_blocks_come_in_order_with_checksums_in_segments_of_up_to_a_chunk() -> None:
    pages = FakePages(8, seed=1)
    holder = make_holder(pages)
    held = await holder.hold(tokens(18), pages=[5, 2, 7, 0, 3])
    complete(held, 9, finished=True)
    start, chunk, end = await drain(holder, request_of(held.handle, first_block=1))
    expected = b"".join(pages.bytes_of(p) for p in (2, 7, 0, 3))
    assert isinstance(start, SegmentStart) and isinstance(chunk, SegmentChunk)
    assert (start.segment.first_block, start.segment.block_count, start.segment.size_bytes) == (1, 4, len(expected))
    assert start.segment.crc32c == google_crc32c.value(expected) and not start.early
    assert chunk == SegmentChunk(0, expected)
    assert end == PullEnd(9, True, 123)
    assert await held.ended() == "released" and holder.held_handles == 0 and held.committed
    assert held.served.blocks == 4 and held.served.kv_bytes == len(expected) and held.served.early_bytes == 0


@pytest.mark.parametrize(("layout", "chunks"), [(WIDE_LAYOUT, 1), (BIG_LAYOUT, 3)])
async def test_a_block_of_a_chunk_or_more_is_a_segment_of_its_own(layout: object, chunks: int) -> None:
    pages = FakePages(2, layout, seed=2)  # type: ignore[arg-type]
    holder = make_holder(pages, layout=layout)  # type: ignore[arg-type]
    held = await holder.hold(tokens(2 * holder.layout.block_size), pages=[1, 0])
    complete(held)
    events = await drain(holder, request_of(held.handle))
    assert [type(e).__name__ for e in events] == ["SegmentStart", *["SegmentChunk"] * chunks] * 2 + ["PullEnd"]
    sent = b"".join(e.data for e in events if isinstance(e, SegmentChunk))
    assert sent == pages.bytes_of(1) + pages.bytes_of(0)
    assert all(len(e.data) <= 1 << 20 for e in events if isinstance(e, SegmentChunk))


async def test_each_report_of_progress_wakes_the_reader_with_what_is_complete() -> None:
    holder = make_holder(FakePages(8, seed=3))
    held = await holder.hold(tokens(11))
    async with aclosing(holder.pull(request_of(held.handle))) as events, asyncio.TaskGroup() as group:
        first = group.create_task(anext(events))
        await spin()
        held.set_pages([0, 1, 2])
        held.progress(3)
        await spin()
        assert not first.done(), "half a block is not a block"
        held.progress(9)
        start = await first
        assert isinstance(start, SegmentStart) and start.segment.block_count == 2 and start.early
        assert isinstance(await anext(events), SegmentChunk)
        second = group.create_task(anext(events))
        await spin()
        held.progress(11)
        start = await second
        assert isinstance(start, SegmentStart) and start.segment.first_block == 2 and start.early, "the rest of a prompt is its last block"
        assert isinstance(await anext(events), SegmentChunk)
        end = group.create_task(anext(events))
        await spin()
        assert not end.done()
        held.commit(4, False, 5)
        assert await end == PullEnd(4, False, 5)
    assert held.served.early_bytes == held.served.kv_bytes == 3 * LAYOUT.block_bytes


async def test_a_taker_that_has_every_block_gets_only_the_end() -> None:
    holder = make_holder(pages := FakePages(8, seed=3))
    held = await holder.hold(tokens(8), pages=[0, 1])
    complete(held)
    assert await drain(holder, request_of(held.handle, first_block=2)) == [PullEnd(7, False, 123)]
    assert pages.viewed == []


async def test_refusals_name_what_is_wrong_and_use_nothing_up() -> None:
    holder = make_holder(FakePages(8, seed=4))
    held = await holder.hold(tokens(8), pages=[0, 1])
    complete(held)
    right = request_of(held.handle)
    for wrong, error in (
        (replace(right, name=OTHER_NAME), KvNotFoundError),
        (replace(right, name=OTHER_NAME, incarnation=76), StaleIncarnationError),
        (replace(right, lease_id="0" * 32), HandleForgedError),
        (replace(right, lease_id="0" * 32, incarnation=76), HandleForgedError),
        (replace(right, incarnation=76), StaleIncarnationError),
        (replace(right, identity=replace(IDENTITY, weights_digest="sha256:other")), FingerprintMismatchError),
        (replace(right, identity=replace(IDENTITY, numerics="native-2")), FingerprintMismatchError),
        (replace(right, layout=replace(LAYOUT, block_size=8)), LayoutMismatchError),
        (replace(right, prompt_digest=bytes(32)), PromptMismatchError),
        (replace(right, first_block=3), InvalidRequestError),
    ):
        with pytest.raises(error):
            await drain(holder, wrong)
    with pytest.raises(FingerprintMismatchError) as caught:
        await drain(holder, replace(right, identity=replace(IDENTITY, weights_digest="sha256:other")))
    assert caught.value.fields["weights_digest"] == f"{IDENTITY.weights_digest} != sha256:other"
    with pytest.raises(FingerprintMismatchError, match="numerics: native-1 here, native-2 there"):
        await drain(holder, replace(right, identity=replace(IDENTITY, numerics="native-2")))
    with pytest.raises(StaleIncarnationError) as stale:
        await drain(holder, replace(right, incarnation=76))
    assert stale.value.fields["handle_incarnation"] == "76" and stale.value.fields["holder_incarnation"] == "77"
    assert holder.held_handles == 1
    assert len(await drain(holder, right)) == 3
    with pytest.raises(HandleConsumedError):
        await drain(holder, right)
    with pytest.raises(HandleConsumedError):
        await drain(holder, replace(right, incarnation=76, lease_id="guess"))


async def test_a_second_pull_is_refused_while_the_first_still_runs() -> None:
    holder = make_holder(FakePages(8, seed=4))
    held = await holder.hold(tokens(8), pages=[0, 1])
    async with aclosing(holder.pull(request_of(held.handle))) as events:
        held.progress(8)
        await anext(events)
        with pytest.raises(HandleConsumedError):
            await drain(holder, request_of(held.handle))
        assert holder.held_handles == 1
    assert await held.ended() == "released"


async def test_leaving_a_pull_early_frees_the_pages_and_uses_the_handle_up() -> None:
    holder = make_holder(FakePages(8, seed=4))
    held = await holder.hold(tokens(8), pages=[0, 1])
    async with aclosing(holder.pull(request_of(held.handle))) as events:
        held.progress(4)
        await anext(events)
    assert await held.ended() == "released" and not held.committed
    held.progress(8)
    held.commit(1, False, 1)
    assert not held.committed and held.handle.state is HandleState.RELEASED
    with pytest.raises(HandleConsumedError):
        await drain(holder, request_of(held.handle))


async def test_cancelling_a_reader_that_waits_for_a_block_ends_the_handle_at_once() -> None:
    holder = make_holder(FakePages(8))
    held = await holder.hold(tokens(8), pages=[0, 1])
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(drain(holder, request_of(held.handle)))
        await spin()
        reading.cancel()
        await asyncio.wait([reading])
        assert await held.ended() == "released"


async def test_a_failing_producer_tells_the_waiting_reader_at_once() -> None:
    holder = make_holder(FakePages(8))
    held = await holder.hold(tokens(8), pages=[0, 1])
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(outcome(anext(holder.pull(request_of(held.handle)))))
        await spin()
        held.fail(InternalError("device lost"))
        error = await reading
        assert isinstance(error, KvAbortedError) and "device lost" in error.message
    assert await held.ended() == "failed"
    with pytest.raises(KvAbortedError):
        await drain(holder, request_of(held.handle))


async def test_leaving_the_context_ends_the_handle() -> None:
    holder = make_holder(FakePages(8))
    async with await holder.hold(tokens(8), pages=[0, 1]) as held:
        assert holder.held_handles == 1
    assert await held.ended() == "failed" and holder.held_handles == 0


async def test_a_lease_nobody_renews_runs_out_on_the_holders_clock() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(8), clock, ttl_s=10.0)
    held = await holder.hold(tokens(8), pages=[0, 1])
    clock.advance(9)
    assert holder.renew(held.handle.name, held.handle.lease.lease_id) == 10.0
    assert holder.renew(held.handle.name, "guess") is None and holder.renew(OTHER_NAME, "guess") is None
    clock.advance(9)
    holder.sweep()
    assert holder.held_handles == 1
    clock.advance(1)
    with pytest.raises(LeaseExpiredError):  # refused before the sweeper came by
        await drain(holder, request_of(held.handle))
    assert holder.renew(held.handle.name, held.handle.lease.lease_id) is None
    holder.sweep()
    assert await held.ended() == "expired" and holder.held_handles == 0
    with pytest.raises(LeaseExpiredError):
        await drain(holder, request_of(held.handle))


async def test_renewing_for_ever_keeps_a_handle_no_longer_than_its_request_may_last() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(8), clock, ttl_s=10.0)
    held = await holder.hold(tokens(8), pages=[0, 1], at_most_s=25.0)
    given = []
    for _ in range(5):
        given.append(holder.renew(held.handle.name, held.handle.lease.lease_id))
        clock.advance(6)
        holder.sweep()
    assert given == [10.0, 10.0, 10.0, 7.0, 1.0]
    assert await held.ended() == "expired" and holder.held_handles == 0


async def test_expiry_wakes_a_reader_that_waits_for_a_block() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(8), clock, ttl_s=10.0)
    held = await holder.hold(tokens(8), pages=[0, 1])
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(outcome(anext(holder.pull(request_of(held.handle)))))
        await spin()
        clock.advance(10)
        holder.sweep()
        assert isinstance(await reading, LeaseExpiredError)
    assert await held.ended() == "expired"


async def test_a_taker_that_stops_reading_cannot_hold_pages_beyond_the_lease() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(4, WIDE_LAYOUT, seed=1), clock, layout=WIDE_LAYOUT, ttl_s=10.0)
    held = await holder.hold(tokens(4 * WIDE_LAYOUT.block_size), pages=[0, 1, 2, 3])
    complete(held)
    async with aclosing(holder.pull(request_of(held.handle))) as events:
        for _ in range(4):
            await anext(events)
            clock.advance(9)  # slow, but it moves: each event it takes extends the lease
        await anext(events)
        clock.advance(10)
        holder.sweep()
        assert await held.ended() == "expired", "free although the reader still hangs in the stream"
        with pytest.raises(LeaseExpiredError):
            await anext(events)


async def test_an_overdue_lease_stops_a_reader_even_before_the_sweep() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(4, WIDE_LAYOUT, seed=1), clock, layout=WIDE_LAYOUT, ttl_s=10.0)
    held = await holder.hold(tokens(4 * WIDE_LAYOUT.block_size), pages=[0, 1, 2, 3])
    complete(held)
    async with aclosing(holder.pull(request_of(held.handle))) as events:
        await anext(events)
        clock.advance(10)
        with pytest.raises(LeaseExpiredError):
            await anext(events)
    assert await held.ended() == "expired"


async def test_what_was_copied_while_the_lease_ran_out_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()

    def slow_gather(views: list[memoryview]) -> tuple[list[bytes], int]:
        clock.advance(10)
        return gather(views)

    monkeypatch.setattr(holder_module, "gather", slow_gather)
    holder = make_holder(FakePages(8, seed=1), clock, ttl_s=10.0)
    held = await holder.hold(tokens(8), pages=[0, 1])
    complete(held)
    with pytest.raises(LeaseExpiredError):
        await drain(holder, request_of(held.handle))
    assert await held.ended() == "expired" and held.served.blocks == 0


async def test_pages_are_free_before_the_taker_has_read_the_last_message() -> None:
    holder = make_holder(FakePages(8, seed=1))
    held = await holder.hold(tokens(8), pages=[0, 1])
    complete(held)
    async with aclosing(holder.pull(request_of(held.handle))) as events:
        assert [type(await anext(events)) for _ in range(3)] == [SegmentStart, SegmentChunk, PullEnd]
        assert await held.ended() == "released"


@pytest.mark.parametrize("ending", ["expiry", "fail", "release", "revoke", "cancel"])
async def test_pages_are_free_only_after_the_last_copy(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    began, go = threading.Event(), threading.Event()
    overlaps: list[bool] = []

    def slow_gather(views: list[memoryview]) -> tuple[list[bytes], int]:
        began.set()
        go.wait(10)
        overlaps.append(free.done())
        return gather(views)

    monkeypatch.setattr(holder_module, "gather", slow_gather)
    clock = ManualClock()
    holder = make_holder(FakePages(8, seed=5), clock, ttl_s=10.0)
    held = await holder.hold(tokens(8), pages=[0, 1])
    complete(held)
    async with asyncio.TaskGroup() as group:
        free = group.create_task(held.ended())
        reading = group.create_task(outcome(drain(holder, request_of(held.handle))))
        while not began.is_set():
            await spin(1)
        revoking = None
        match ending:
            case "expiry":
                clock.advance(10)
                holder.sweep()
            case "fail":
                held.fail(InternalError("device lost"))
            case "release":
                holder.release(held.handle.name, held.handle.lease.lease_id)
            case "revoke":
                revoking = group.create_task(held.revoke())
                await spin()
                revoking.cancel()  # even a cancelled revoke returns only when the pages are free
            case "cancel":
                reading.cancel()
        await spin()
        assert not free.done() and not reading.done() and (revoking is None or not revoking.done())
        go.set()
        await asyncio.wait([reading])
        assert await free == {"expiry": "expired", "fail": "failed", "revoke": "failed"}.get(ending, "released")
    assert overlaps == [False]
    refused = (LeaseExpiredError, KvAbortedError, HandleConsumedError)
    assert reading.cancelled() if ending == "cancel" else isinstance(reading.result(), refused)


async def test_release_is_idempotent_and_needs_the_secret() -> None:
    holder = make_holder(FakePages(8))
    held = await holder.hold(tokens(8), pages=[0, 1])
    with pytest.raises(HandleForgedError):
        holder.release(held.handle.name, "guess")
    assert holder.held_handles == 1
    for _ in range(2):
        holder.release(held.handle.name, held.handle.lease.lease_id)
    holder.release(OTHER_NAME, "whatever")
    assert await held.ended() == "released"


async def test_handles_are_bounded() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(8), clock, max_handles=2)
    first, _ = await holder.hold(tokens(8)), await holder.hold(tokens(8))
    with pytest.raises(OverloadedError) as caught:
        await holder.hold(tokens(8))
    assert caught.value.retry_after_s is not None
    await first.revoke()
    await holder.hold(tokens(8))
    await holder.revoke_all()
    assert holder.held_handles == 0


async def test_the_sweeper_runs_without_any_work() -> None:
    clock = ManualClock()
    holder = make_holder(FakePages(8), clock, ttl_s=0.02)
    held = await holder.hold(tokens(8))
    async with asyncio.TaskGroup() as group:
        sweeper = group.create_task(holder.run())
        clock.advance(1)
        assert await held.ended() == "expired"
        sweeper.cancel()
