"""Threads on pages: over before the coroutine is, and nothing unverified in the pages."""

from __future__ import annotations

import asyncio
import threading

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import ChecksumMismatchError
from kvrelay.handle import KvSegment
from services.relay.copying import checksum, gather, land, run_to_end, wait_through_cancels
from services.relay.transfer import CHUNK_BYTES
from services.runtime.offloop import MAX_THREADS
from tests.unit.relay.relay_kit import spin


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(1, 64), st.data())
def test_what_was_gathered_lands_as_it_was_whatever_the_chunks(sizes: list[int], step: int, data: st.DataObject) -> None:
    block = sizes[0]
    source = [data.draw(st.binary(min_size=block, max_size=block)) for _ in sizes]
    chunks, crc = gather([memoryview(x) for x in source])
    assert b"".join(chunks) == b"".join(source) and crc == google_crc32c.value(b"".join(source))
    flat = b"".join(chunks)
    target = [bytearray(block) for _ in sizes]
    land(KvSegment(0, len(sizes), len(flat), crc), [flat[i : i + step] for i in range(0, len(flat), step)], [memoryview(x) for x in target])
    assert target == source


def test_a_large_block_is_cut_into_chunks() -> None:
    chunks, crc = gather([memoryview(bytes(2 * CHUNK_BYTES + 5))])
    assert [len(x) for x in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 5] and crc == checksum(chunks)


def test_bytes_that_fail_their_checksum_never_reach_the_page() -> None:
    target = bytearray(b"before")
    with pytest.raises(ChecksumMismatchError) as caught:
        land(KvSegment(3, 1, 6, google_crc32c.value(b"right!")), [b"wrong!"], [memoryview(target)])
    assert target == b"before" and caught.value.fields["segment"] == "3"


async def test_checksums_and_copies_are_refused_on_the_event_loop() -> None:
    with pytest.raises(AssertionError):
        checksum([b"x"])
    with pytest.raises(AssertionError):
        gather([memoryview(b"x")])


async def test_a_cancelled_caller_waits_for_its_thread_however_often_it_is_cancelled() -> None:
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        go.wait(10)
        ended.set()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(run_to_end(work))
        while not began.is_set():
            await spin(1)
        for _ in range(3):
            task.cancel()
            await spin()
        assert not task.done() and not ended.is_set()
        go.set()
        await asyncio.wait([task])
    assert task.cancelled() and ended.is_set()


async def test_work_that_had_not_begun_when_cancelled_never_begins() -> None:
    go, ran = threading.Event(), threading.Event()
    async with asyncio.TaskGroup() as group:
        blockers = [group.create_task(run_to_end(lambda: go.wait(10))) for _ in range(MAX_THREADS)]
        task = group.create_task(run_to_end(ran.set))
        await spin()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled() and not any(x.done() for x in blockers)
        go.set()
    await run_to_end(lambda: None)
    assert not ran.is_set()


async def test_errors_of_the_thread_arrive() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_to_end(lambda: 1 // 0)


async def test_waiting_through_cancels_raises_afterwards() -> None:
    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(wait_through_cancels(event))
        await spin(2)
        task.cancel()
        await spin(2)
        assert not task.done()
        event.set()
        await asyncio.wait([task])
    assert task.cancelled()
