"""The side that has KV: gives out handles, serves one pull of each, and says when the pages may be reused."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from kvrelay import hashing
from kvrelay.errors import (
    InvalidRequestError,
    KvAbortedError,
    KvNotFoundError,
    KvRelayError,
    LeaseExpiredError,
    PromptMismatchError,
    StaleIncarnationError,
)
from kvrelay.handle import HandleState, KvHandle, KvLayout, KvSegment, Lease, ModelIdentity, PeerLocation, check_compatible
from kvrelay.values import TransferStats
from services.engine.api import PageBytes
from services.relay.copying import gather, run_to_end, wait_through_cancels
from services.relay.leases import LeaseEnd, LeaseTable, refusal
from services.relay.transfer import HANDLE_PREFIX, PullEnd, PullEvent, PullRequest, SegmentChunk, SegmentStart, blocks_per_segment
from services.runtime.clock import Clock
from services.runtime.offloop import assert_off_loop, run_off_loop


class HeldKv:
    """The KV of one prompt while it is held for a taker. The producer's side of it; lives on the event loop.

    The producer reports `progress` and then `commit` or `fail`, waits for `ended()`, and only then reuses the pages. After the end
    those reports do nothing: a taker may go away, or a lease run out, in the middle of prefill. As a context manager it ends the
    handle on exit, if nothing else has, and waits until the pages are free.
    """

    def __init__(self, holder: KvHolder, handle: KvHandle) -> None:
        self.handle = handle
        self.served = TransferStats()
        """What was read so far: bytes, blocks, `wait_s` for blocks not computed, `transfer_s` copying them, bytes sent early."""
        self._holder = holder
        self._pages: tuple[int, ...] | None = None
        self._ready_blocks = 0
        self._tail: PullEnd | None = None
        self._why: LeaseEnd | None = None
        self._error: KvRelayError | None = None
        self._copying = 0
        # A handle is single-use, so at most one reader waits here.
        self._changed = asyncio.Event()
        self._free = asyncio.Event()

    def set_pages(self, pages: Sequence[int]) -> None:
        """Physical pages of the prompt's blocks, in order. They are read until `ended()` says otherwise."""
        assert self._pages is None and len(pages) == self.handle.block_count, f"{len(pages)} pages for {self.handle.block_count} blocks"
        self._pages = tuple(pages)

    def progress(self, computed_tokens: int) -> None:
        """KV of tokens `[0, computed_tokens)` is in the pages; what that completes may be read from now on."""
        if self._why is not None:
            return
        assert self._pages is not None and computed_tokens <= self.handle.token_end
        whole = computed_tokens == self.handle.token_end
        blocks = self.handle.block_count if whole else computed_tokens // self.handle.layout.block_size
        self._ready_blocks = max(self._ready_blocks, blocks)
        self._changed.set()

    def commit(self, first_token_id: int, finished: bool, prefill_end_ns: int) -> None:
        """Every block was reported and the first token is drawn."""
        if self._why is not None:
            return
        assert self._ready_blocks == self.handle.block_count, "commit before the last progress"
        self._tail = PullEnd(first_token_id, finished, prefill_end_ns)
        self.handle = replace(self.handle, state=HandleState.COMMITTED)
        self._changed.set()

    def fail(self, error: KvRelayError) -> None:
        """There will be no more; a waiting reader gets `KvAbortedError` at once."""
        if self._why is None:
            text = f"the producer gave up before the KV was complete: {error.message}"
            self._error = error if isinstance(error, KvAbortedError) else KvAbortedError(text, handle=self.handle.name, cause=error.reason)
            self._holder._end(self, LeaseEnd.FAILED)

    @property
    def committed(self) -> bool:
        """Whether the KV was completed before the handle ended."""
        return self._tail is not None

    async def ended(self) -> LeaseEnd:
        """Why the handle is over. Returns only when no thread reads the pages any more: they may be reused."""
        await self._free.wait()
        assert self._why is not None
        return self._why

    async def revoke(self) -> LeaseEnd:
        """Ends the handle now, if nothing else has, and waits until no thread reads the pages."""
        self._holder._end(self, LeaseEnd.FAILED)
        await wait_through_cancels(self._free)
        return await self.ended()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        await self.revoke()

    # --- the holder's side -------------------------------------------------------------------------------------------------------

    def _ended(self, why: LeaseEnd) -> None:
        self._why = why
        self.handle = replace(self.handle, state=HandleState.RELEASED)
        self._changed.set()
        if self._copying == 0:
            self._free.set()

    def _raise_if_over(self) -> None:
        if self._why is not None:
            raise self._error or refusal(self.handle.name, self._why)

    async def _blocks_beyond(self, block: int) -> int:
        """Waits until more than `block` blocks are ready; how many are."""
        while True:
            self._raise_if_over()
            if self._ready_blocks > block:
                return self._ready_blocks
            self._changed.clear()
            await self._changed.wait()

    async def _committed(self) -> PullEnd:
        while True:
            self._raise_if_over()
            if self._tail is not None:
                return self._tail
            self._changed.clear()
            await self._changed.wait()

    async def _read(self, first_block: int, end_block: int) -> tuple[list[bytes], int]:
        """Copies blocks. What it returns is worth nothing if the handle ended meanwhile."""
        assert self._pages is not None
        views = [self._holder.pages.page_view(page) for page in self._pages[first_block:end_block]]
        self._copying += 1
        try:
            return await run_to_end(lambda: gather(views))
        finally:
            self._copying -= 1
            if self._why is not None and self._copying == 0:
                self._free.set()


class KvHolder:
    """Every handle one worker has given out in this life. Lives on the event loop; `run()` sweeps expired leases."""

    def __init__(
        self,
        identity: ModelIdentity,
        layout: KvLayout,
        incarnation: int,
        address: str,
        pages: PageBytes,
        clock: Clock,
        lease_ttl_s: float = 30.0,
        *,
        max_handles: int = 256,
    ) -> None:
        """`address` (host:port of this worker's KvTransferService) may be set again once the server knows its port."""
        self.identity = identity
        self.layout = layout
        self.incarnation = incarnation
        self.address = address
        self.pages = pages
        self._clock = clock
        self._leases = LeaseTable(lease_ttl_s, max_live=max_handles)
        self._held: dict[str, HeldKv] = {}
        self._root_fingerprint = identity.fingerprint
        self._blocks_per_segment = blocks_per_segment(layout)
        self._sweep_every_s = min(1.0, lease_ttl_s / 8)

    @property
    def held_handles(self) -> int:
        """Live handles."""
        return len(self._leases)

    async def hold(
        self, token_ids: Sequence[int], cache_salt: str = "", pages: Sequence[int] | None = None, *, at_most_s: float = math.inf
    ) -> HeldKv:
        """Gives out a handle for the KV of `token_ids`, computed or not; `pages` may follow by `set_pages`.

        `at_most_s`: the handle's longest life, however often it is renewed and read.

        Raises `OverloadedError` when `max_handles` are live. The caller owns the result and must see it to its end.
        """
        block_size = self.layout.block_size

        def chain() -> tuple[tuple[bytes, ...], bytes]:
            assert_off_loop("hashing a prompt")
            root = hashing.root_hash(self._root_fingerprint, cache_salt)
            return tuple(hashing.block_hashes(root, token_ids, block_size)), hashing.prompt_digest(root, token_ids, block_size)

        hashes, digest = await run_off_loop(chain)
        name, lease_id = HANDLE_PREFIX + secrets.token_hex(16), secrets.token_hex(16)
        blocks = -(-len(token_ids) // block_size)
        handle = KvHandle(
            name=name,
            state=HandleState.WRITING,
            identity=self.identity,
            layout=self.layout,
            token_start=0,
            token_end=len(token_ids),
            block_hashes=hashes,
            prompt_digest=digest,
            segments=(KvSegment(0, blocks, blocks * self.layout.block_bytes),),
            lease=Lease(lease_id, self._leases.ttl_s),
            incarnation=self.incarnation,
            locations=(PeerLocation(self.address),),
        )
        held = HeldKv(self, handle)
        if pages is not None:
            held.set_pages(pages)
        now = self._clock.monotonic()
        self._leases.grant(name, lease_id, now, until=now + at_most_s)
        self._held[name] = held
        return held

    async def pull(self, request: PullRequest) -> AsyncGenerator[PullEvent, None]:
        """Streams blocks `[request.first_block, ...)` in order, each as soon as it is computed, then the end.

        Refuses with the error that names what is wrong with the request; an accepted pull is the handle's one use, so however it
        ends, the handle is over. Close it (`aclosing`) to free the pages at once. Every event that its consumer takes extends the
        lease; a consumer that takes nothing lets it run out like any other.
        """
        held = self._accept(request)
        try:
            block = request.first_block
            while block < held.handle.block_count:
                began = self._clock.monotonic()
                ready = await held._blocks_beyond(block)
                got = self._clock.monotonic()
                end = min(ready, block + self._blocks_per_segment)
                chunks, crc = await held._read(block, end)
                self._check_alive(held)
                early = not held.committed
                segment = KvSegment(block, end - block, sum(map(len, chunks)), crc)
                held.served = replace(
                    held.served,
                    kv_bytes=held.served.kv_bytes + segment.size_bytes,
                    blocks=held.served.blocks + segment.block_count,
                    wait_s=held.served.wait_s + got - began,
                    transfer_s=held.served.transfer_s + self._clock.monotonic() - got,
                    early_bytes=held.served.early_bytes + (segment.size_bytes if early else 0),
                )
                yield SegmentStart(segment, got - began, early)
                self._taken(held)
                offset = 0
                for chunk in chunks:
                    yield SegmentChunk(offset, chunk)
                    self._taken(held)
                    offset += len(chunk)
                block = end
            tail = await held._committed()
            # Everything is copied out: the pages are free before the taker has read the last message.
            self._end(held, LeaseEnd.RELEASED)
            yield tail
        finally:
            self._end(held, LeaseEnd.RELEASED)

    def renew(self, name: str, lease_id: str) -> float | None:
        """Extends a lease: its new time to live in seconds, or None when it is over, unknown, or the secret is wrong."""
        return self._leases.renew(name, lease_id, self._clock.monotonic())

    def release(self, name: str, lease_id: str) -> None:
        """Ends a handle on its taker's word; nothing for one that is over or unknown. Raises `HandleForgedError` for a wrong secret."""
        held = self._held.get(name)
        if held is None:
            return
        try:
            self._leases.check(name, lease_id, self._clock.monotonic())
        except LeaseExpiredError:
            self._end(held, LeaseEnd.EXPIRED)
        else:
            self._end(held, LeaseEnd.RELEASED)

    def sweep(self) -> None:
        """Ends the handles whose lease has run out."""
        for name in self._leases.expire(self._clock.monotonic()):
            self._held.pop(name)._ended(LeaseEnd.EXPIRED)

    async def run(self) -> None:
        """Sweeps until cancelled, on its own timer: leases run out whether or not there is any work."""
        while True:
            await asyncio.sleep(self._sweep_every_s)
            self.sweep()

    async def revoke_all(self) -> None:
        """Ends every handle and waits until no thread reads a page: for shutdown."""
        for held in list(self._held.values()):
            await held.revoke()

    def _accept(self, request: PullRequest) -> HeldKv:
        try:
            self._leases.check(request.name, request.lease_id, self._clock.monotonic())
        except KvNotFoundError:
            if request.incarnation != self.incarnation:
                raise self._stale(request) from None
            raise
        if request.incarnation != self.incarnation:
            raise self._stale(request)
        held = self._held[request.name]
        check_compatible(self.identity, self.layout, request.identity, request.layout)
        if request.prompt_digest != held.handle.prompt_digest:
            raise PromptMismatchError(
                "the handle holds the KV of another prompt",
                handle=request.name,
                expected=request.prompt_digest.hex(),
                actual=held.handle.prompt_digest.hex(),
            )
        if not 0 <= request.first_block <= held.handle.block_count:
            raise InvalidRequestError(f"first_block {request.first_block} of {held.handle.block_count} blocks", field="first_block")
        self._leases.consume(request.name)
        return held

    def _stale(self, request: PullRequest) -> StaleIncarnationError:
        return StaleIncarnationError(
            "the handle was made in another life of its holder",
            handle=request.name,
            handle_incarnation=request.incarnation,
            holder_incarnation=self.incarnation,
        )

    def _check_alive(self, held: HeldKv) -> None:
        if not self._leases.is_live(held.handle.name, self._clock.monotonic()):
            self.sweep()
        held._raise_if_over()

    def _taken(self, held: HeldKv) -> None:
        """The consumer took an event: proof of its life, unless the lease ran out before it came."""
        self._check_alive(held)
        self._leases.touch(held.handle.name, self._clock.monotonic())

    def _end(self, held: HeldKv, why: LeaseEnd) -> None:
        if self._held.pop(held.handle.name, None) is not None:
            self._leases.end(held.handle.name, why, self._clock.monotonic())
            held._ended(why)
