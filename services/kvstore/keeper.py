"""The store as its callers see it: handles in and out, bytes checked off the event loop, time from a clock."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from kvrelay import hashing
from kvrelay.errors import InvalidRequestError, KvNotFoundError, KvTransferError, OverloadedError, StaleIncarnationError
from kvrelay.handle import HandleState, KvHandle, KvLayout, KvSegment, Lease, ModelIdentity, StoreLocation
from services.kvstore.memory import verified_block
from services.kvstore.store import BlockStore
from services.relay.segments import SegmentBuffer
from services.relay.transfer import HANDLE_PREFIX, ReadEnd, ReadEvent, SegmentChunk, SegmentEvent, SegmentStart
from services.runtime.clock import Clock
from services.runtime.offloop import run_off_loop


class StoreKeeper:
    """One life of one block store. Lives on the event loop; `run()` sweeps expired leases."""

    def __init__(
        self, store: BlockStore, incarnation: int, address: str, clock: Clock, *, max_streams: int = 64, debug: bool = False
    ) -> None:
        """`max_streams` bounds reads and writes under way, and with them the bytes in flight. `address` may be set again later.
        `debug` checks the store's invariants at every sweep."""
        self.store = store
        self.incarnation = incarnation
        self.address = address
        self._clock = clock
        self._max_streams = max_streams
        self._streams = 0
        self._debug = debug
        self._sweep_every_s = min(1.0, store.lease_ttl_s / 8)

    def lookup(self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes]) -> KvHandle | None:
        """A leased handle of the longest stored prefix; None when the first block isn't stored."""
        name, lease_id = _new_handle()
        blocks = self.store.lookup(name, lease_id, _keys(identity, layout, block_hashes), self._clock.monotonic())
        if not blocks:
            return None
        segments = [KvSegment(index, 1, block.size_bytes, block.crc32c) for index, block in enumerate(blocks)]
        return self._handle(name, lease_id, HandleState.COMMITTED, identity, layout, block_hashes[: len(blocks)], segments)

    def create(self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes]) -> tuple[KvHandle, list[int]]:
        """Opens a write: its handle, and the indexes of the blocks to write."""
        name, lease_id = _new_handle()
        keys = _keys(identity, layout, block_hashes)
        missing = self.store.create(name, lease_id, keys, layout.block_bytes, self._clock.monotonic())
        return self._handle(name, lease_id, HandleState.WRITING, identity, layout, block_hashes, ()), missing

    async def write(self, name: str, lease_id: str, events: AsyncIterator[SegmentEvent]) -> tuple[int, int]:
        """Takes segments of one block each; the blocks and bytes verified. Nothing becomes visible.

        Raises `KvTransferError` for a stream that makes no sense or pauses for the length of a lease, `ChecksumMismatchError`, and what
        `BlockStore.begin_block` raises. Blocks verified before stay written.
        """
        self.store.check_write(name, lease_id, self._clock.monotonic())
        self._enter_stream()
        buffer: SegmentBuffer | None = None
        blocks = size_bytes = 0
        try:
            while (event := await self._next(events)) is not None:
                if isinstance(event, SegmentStart):
                    if buffer is not None:
                        raise KvTransferError("a block begins before the one before it is complete")
                    segment = event.segment
                    if segment.block_count != 1:
                        raise InvalidRequestError("blocks are written one by one", field="segment.block_count")
                    size = self.store.begin_block(name, lease_id, segment.first_block, self._clock.monotonic())
                    try:
                        buffer = SegmentBuffer(segment, size)
                    except KvTransferError:
                        self.store.abandon_block(name, segment.first_block)
                        raise
                    continue
                if buffer is None:
                    raise KvTransferError("bytes that belong to no block")
                buffer.add(event)
                if buffer.whole:
                    block = await run_off_loop(verified_block, buffer.segment, buffer.chunks)
                    self.store.finish_block(name, lease_id, buffer.segment.first_block, block, self._clock.monotonic())
                    buffer, blocks, size_bytes = None, blocks + 1, size_bytes + block.size_bytes
            if buffer is not None:
                raise KvTransferError("the stream ends inside a block")
            return blocks, size_bytes
        finally:
            self._streams -= 1
            if buffer is not None:
                self.store.abandon_block(name, buffer.segment.first_block)

    def commit(self, name: str, lease_id: str) -> int:
        """Makes a write's blocks visible; how many became so."""
        return self.store.commit(name, lease_id, self._clock.monotonic())

    async def read(self, name: str, lease_id: str, incarnation: int, first_block: int) -> AsyncGenerator[ReadEvent, None]:
        """Streams blocks `[first_block, ...)` of a leased prefix, then the end. The handle's one use: it is over afterwards."""
        count = self._begin_read(name, lease_id, incarnation, first_block)
        try:
            for index in range(first_block, count):
                block = self.store.block(name, lease_id, index, self._clock.monotonic())
                yield SegmentStart(KvSegment(index, 1, block.size_bytes, block.crc32c))
                offset = 0
                for chunk in block.chunks:
                    yield SegmentChunk(offset, chunk)
                    offset += len(chunk)
            yield ReadEnd(count - first_block)
        finally:
            self._streams -= 1
            self.store.release(name, lease_id, self._clock.monotonic())

    def renew(self, name: str, lease_id: str) -> float | None:
        """Extends a lease: its new time to live in seconds, or None when it is over, unknown, or the secret is wrong."""
        return self.store.renew(name, lease_id, self._clock.monotonic())

    def release(self, name: str, lease_id: str) -> None:
        """Ends a read or drops a write; nothing for one that is over or unknown."""
        self.store.release(name, lease_id, self._clock.monotonic())

    def sweep(self) -> None:
        """Ends what let its lease run out."""
        self.store.expire(self._clock.monotonic())
        if self._debug:
            self.store.check_integrity()

    async def run(self) -> None:
        """Sweeps until cancelled, on its own timer."""
        while True:
            await asyncio.sleep(self._sweep_every_s)
            self.sweep()

    def _begin_read(self, name: str, lease_id: str, incarnation: int, first_block: int) -> int:
        stale = StaleIncarnationError(
            "the handle was made in another life of the store",
            handle=name,
            handle_incarnation=incarnation,
            holder_incarnation=self.incarnation,
        )
        self._enter_stream()
        try:
            count = self.store.readable(name, lease_id, self._clock.monotonic())
            if incarnation != self.incarnation:
                raise stale
            if first_block > count:
                raise InvalidRequestError(f"first_block {first_block} of {count} blocks", field="first_block")
            self.store.begin_read(name)
        except KvNotFoundError:
            self._streams -= 1
            if incarnation != self.incarnation:
                raise stale from None
            raise
        except BaseException:
            self._streams -= 1
            raise
        return count

    def _enter_stream(self) -> None:
        if self._streams >= self._max_streams:
            raise OverloadedError(f"{self._max_streams} transfers are under way", retry_after_s=0.5, limit=self._max_streams)
        self._streams += 1

    async def _next(self, events: AsyncIterator[SegmentEvent]) -> SegmentEvent | None:
        try:
            async with asyncio.timeout(self.store.lease_ttl_s):
                return await anext(events, None)
        except TimeoutError:
            raise KvTransferError(f"nothing came for {self.store.lease_ttl_s} s") from None

    def _handle(
        self,
        name: str,
        lease_id: str,
        state: HandleState,
        identity: ModelIdentity,
        layout: KvLayout,
        block_hashes: Sequence[bytes],
        segments: Sequence[KvSegment],
    ) -> KvHandle:
        return KvHandle(
            name=name,
            state=state,
            identity=identity,
            layout=layout,
            token_start=0,
            token_end=len(block_hashes) * layout.block_size,
            block_hashes=tuple(block_hashes),
            # The digest of a prompt that ends with these full blocks: there is no rest to hash.
            prompt_digest=hashing.prompt_digest(block_hashes[-1], (), layout.block_size),
            segments=tuple(segments),
            lease=Lease(lease_id, self.store.lease_ttl_s),
            incarnation=self.incarnation,
            locations=(StoreLocation(self.address),),
        )


def _new_handle() -> tuple[str, str]:
    return HANDLE_PREFIX + secrets.token_hex(16), secrets.token_hex(16)


def _keys(identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes]) -> list[bytes]:
    """What blocks are stored under. The hash names model, salt and tokens; the layout, convertible or not, is part of the bytes."""
    if any(len(h) != hashing.HASH_BYTES for h in block_hashes):
        raise InvalidRequestError(f"a block hash is {hashing.HASH_BYTES} bytes long", field="block_hashes")
    fields = {f.name: str(getattr(layout, f.name)) for f in dataclasses.fields(layout)}
    space = hashing.fingerprint({**fields, "identity": identity.fingerprint.hex()})
    return [space + block_hash for block_hash in block_hashes]
