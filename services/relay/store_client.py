"""A worker's dealings with one block store: take a stored prefix, write finished blocks. It only ever saves work, so it never fails."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial

from kvrelay.errors import InvalidRequestError, KvRelayError, KvTransferError, OverloadedError
from kvrelay.handle import KvHandle, KvLayout, KvSegment, ModelIdentity, check_compatible
from services.engine.api import PageBytes
from services.relay.copying import gather, land, run_to_end
from services.relay.segments import SegmentAssembler
from services.relay.transfer import ReadEnd, ReadEvent, SegmentChunk, SegmentEvent, SegmentStart, StorePort, StoreWrite
from services.runtime.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 1.0
"""How long a failed or cancelled call tries to tell the store; the lease's end is the guarantee."""


class BlockStoreClient:
    """Moves blocks between one pool's pages and one store. `pages[i]` is always the page of the chain's block i."""

    def __init__(
        self,
        store: StorePort,
        identity: ModelIdentity,
        layout: KvLayout,
        pages: PageBytes,
        *,
        idle_timeout_s: float = 2.0,
        cooldown_s: float = 5.0,
        clock: Clock | None = None,
    ) -> None:
        """`idle_timeout_s`: longest silence of the store while a request waits for a prefix. After `cooldown_s` from a failure to reach
        it the store is tried again; until then it isn't, so that a dead one costs one request a little time and the others none."""
        self._store = store
        self._identity = identity
        self._layout = layout
        self._pages = pages
        self._idle_timeout_s = idle_timeout_s
        self._cooldown_s = cooldown_s
        self._clock = clock or SystemClock()
        self._avoid_until = -math.inf

    async def fetch_prefix(self, block_hashes: Sequence[bytes], pages: Sequence[int], first_block: int, *, timeout_s: float) -> int:
        """Takes what the store has of the chain beyond `first_block` into `pages[first_block:]`; how many blocks, verified and in order.

        Any failure, and running out of `timeout_s`, only shortens the result; all but cancellation is logged. When it returns or
        raises, no thread touches the pages any more.
        """
        assert len(pages) >= len(block_hashes)
        if self._avoided():
            return 0
        got = 0

        def count(blocks: int) -> None:
            nonlocal got
            got = blocks - first_block

        handle: KvHandle | None = None
        complete = False
        try:
            async with asyncio.timeout(timeout_s):
                async with asyncio.timeout(self._idle_timeout_s):
                    handle = await self._store.lookup(self._identity, self._layout, block_hashes, timeout_s=timeout_s)
                if handle is not None:
                    self._check(handle, block_hashes)
                    if handle.block_count > first_block:
                        await self._read(handle, pages, first_block, timeout_s, count)
                        complete = True
        except (KvRelayError, TimeoutError) as error:
            logger.warning("took %d blocks from the store, then: %s", got, self._noted(error))
        finally:
            if handle is not None and not complete:
                await self._release(handle.name, handle.lease.lease_id)
        return got

    async def store(self, block_hashes: Sequence[bytes], pages: Sequence[int], *, timeout_s: float) -> int:
        """Writes the blocks of the chain that the store lacks, from `pages`; how many became visible.

        The caller keeps the pages as they are until this returns. Any failure gives 0 and is logged, except cancellation.
        """
        assert len(pages) >= len(block_hashes)
        if self._avoided():
            return 0
        write: StoreWrite | None = None
        committed = False
        try:
            async with asyncio.timeout(timeout_s):
                write = await self._store.create(self._identity, self._layout, block_hashes, timeout_s=timeout_s)
                missing = [index for index in write.missing if 0 <= index < len(block_hashes)]
                if not missing:
                    return 0
                async with aclosing(self._segments(missing, pages)) as segments:
                    try:
                        await self._store.write(write, segments, timeout_s=timeout_s)
                    except OverloadedError as error:
                        # What got in before memory ran out is the head of the chain: worth keeping.
                        logger.info("the store is full: %s", error)
                blocks = await self._store.commit(write, timeout_s=timeout_s)
                committed = True
                return blocks
        except (KvRelayError, TimeoutError) as error:
            logger.warning("blocks not stored: %s", self._noted(error))
            return 0
        finally:
            if write is not None and not committed:
                await self._release(write.name, write.lease_id)

    async def _read(self, handle: KvHandle, pages: Sequence[int], first_block: int, timeout_s: float, count: Callable[[int], None]) -> None:
        assembler = SegmentAssembler(first_block, handle.block_count, self._layout.block_bytes)
        ended = False
        async with aclosing(self._store.read(handle, first_block, timeout_s=timeout_s)) as events:
            while (event := await self._next(events)) is not None:
                if ended:
                    raise KvTransferError("the store goes on after the end", handle=handle.name)
                match event:
                    case ReadEnd():
                        assembler.finish()
                        ended = True
                    case SegmentStart() | SegmentChunk():
                        whole = assembler.feed(event)
                        if whole is not None:
                            views = [self._pages.page_view(page) for page in pages[whole.segment.first_block : assembler.next_block]]
                            await run_to_end(partial(land, whole.segment, whole.chunks, views))
                            count(assembler.next_block)
        if not ended:
            raise KvTransferError("the stream was cut off before its end", handle=handle.name)

    async def _next(self, events: AsyncGenerator[ReadEvent, None]) -> ReadEvent | None:
        try:
            async with asyncio.timeout(self._idle_timeout_s):
                return await anext(events)
        except StopAsyncIteration:
            return None

    async def _segments(self, missing: Sequence[int], pages: Sequence[int]) -> AsyncGenerator[SegmentEvent, None]:
        for index in missing:
            view = self._pages.page_view(pages[index])
            chunks, crc = await run_to_end(partial(gather, [view]))
            yield SegmentStart(KvSegment(index, 1, len(view), crc))
            offset = 0
            for chunk in chunks:
                yield SegmentChunk(offset, chunk)
                offset += len(chunk)

    def _avoided(self) -> bool:
        return self._clock.monotonic() < self._avoid_until

    def _noted(self, error: KvRelayError | TimeoutError) -> str:
        """What to log; a store that could not be reached is avoided for a while."""
        refused = isinstance(error, KvRelayError) and not isinstance(error, KvTransferError)
        if refused or (isinstance(error, KvTransferError) and error.fields.get("cause") == InvalidRequestError.reason):
            return str(error)
        self._avoid_until = self._clock.monotonic() + self._cooldown_s
        return str(error) or "no answer in time"

    def _check(self, handle: KvHandle, block_hashes: Sequence[bytes]) -> None:
        """A store that answers with another prompt's blocks is not believed."""
        check_compatible(self._identity, self._layout, handle.identity, handle.layout)
        if handle.token_start != 0 or list(handle.block_hashes) != list(block_hashes[: handle.block_count]):
            raise KvTransferError("the store answered with another chain", handle=handle.name)

    async def _release(self, name: str, lease_id: str) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._store.release(name, lease_id, timeout_s=RELEASE_TIMEOUT_S)
        except (KvRelayError, TimeoutError) as error:
            logger.debug("releasing %s failed: %s", name, error)
