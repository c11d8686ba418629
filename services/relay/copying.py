"""Threads that touch pages: nothing here returns while one of them still runs.

Whoever lends pages may reuse them as soon as the borrower's coroutine is over, however it ended. A cancelled `await` of a thread
leaves the thread running, so it can't be used as it is.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import google_crc32c

from kvrelay.errors import ChecksumMismatchError
from kvrelay.handle import KvSegment
from services.relay.transfer import CHUNK_BYTES
from services.runtime.offloop import assert_off_loop, run_off_loop

T = TypeVar("T")


async def run_to_end(fn: Callable[[], T]) -> T:
    """`run_off_loop(fn)` that, when cancelled, first waits until `fn` is over (or sure never to begin), then raises `CancelledError`."""
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    # Taken by the thread that begins `fn`, or by the cancelled caller so that no thread ever will.
    first = threading.Lock()

    def call() -> T:
        if not first.acquire(blocking=False):
            raise asyncio.CancelledError
        try:
            return fn()
        finally:
            if not loop.is_closed():
                loop.call_soon_threadsafe(over.set)

    try:
        return await run_off_loop(call)
    except asyncio.CancelledError:
        if not first.acquire(blocking=False):
            await wait_through_cancels(over)
        raise


async def wait_through_cancels(event: asyncio.Event) -> None:
    """Waits for something short and certain however often it is cancelled; raises the `CancelledError` afterwards."""
    cancelled: asyncio.CancelledError | None = None
    while not event.is_set():
        try:
            await event.wait()
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def gather(views: Sequence[memoryview]) -> tuple[list[bytes], int]:
    """Copies pages into chunks of at most `CHUNK_BYTES`, one after another; also their CRC32C. Blocks: not on the event loop."""
    assert_off_loop("copying KV pages")
    if sum(len(view) for view in views) <= CHUNK_BYTES:
        chunks = [b"".join(views)]
    else:
        chunks = [bytes(view[start : start + CHUNK_BYTES]) for view in views for start in range(0, len(view), CHUNK_BYTES)]
    return chunks, checksum(chunks)


def checksum(chunks: Sequence[bytes]) -> int:
    """CRC32C of the chunks' bytes, one after another. Blocks: not on the event loop."""
    assert_off_loop("a KV checksum")
    crc = 0
    for chunk in chunks:
        crc = google_crc32c.extend(crc, chunk)
    return crc


def verify(segment: KvSegment, chunks: Sequence[bytes]) -> None:
    """Raises `ChecksumMismatchError` unless the bytes have the segment's checksum. Blocks: not on the event loop."""
    actual = checksum(chunks)
    if actual != segment.crc32c:
        raise ChecksumMismatchError(
            f"blocks {segment.first_block} to {segment.first_block + segment.block_count - 1} are not the bytes that were sent",
            segment=segment.first_block,
            expected=segment.crc32c,
            actual=actual,
        )


def land(segment: KvSegment, chunks: Sequence[bytes], views: Sequence[memoryview]) -> None:
    """Verifies a whole segment, then copies it into its pages: unverified bytes never get there. Blocks: not on the event loop."""
    verify(segment, chunks)
    page, at = 0, 0
    for chunk in chunks:
        taken = 0
        while taken < len(chunk):
            count = min(len(chunk) - taken, len(views[page]) - at)
            views[page][at : at + count] = memoryview(chunk)[taken : taken + count]
            taken, at = taken + count, at + count
            if at == len(views[page]):
                page, at = page + 1, 0
