"""The side that takes KV: pulls a handle's blocks into its own pages, and believes nothing that it did not verify."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from kvrelay.errors import HandleForgedError, KvRelayError, KvTransferError, PromptMismatchError
from kvrelay.handle import KvHandle, KvLayout, Location, ModelIdentity, check_compatible
from kvrelay.values import TransferStats
from services.engine.api import PageBytes
from services.relay.copying import land, run_to_end
from services.relay.segments import SegmentAssembler
from services.relay.transfer import PullEnd, PullRequest, SegmentChunk, SegmentStart, TransferPort
from services.runtime.clock import Clock, SystemClock

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 1.0
"""How long a failed or cancelled pull tries to tell the holder; the lease's end is the guarantee."""

Event = TypeVar("Event")


@dataclass(frozen=True, slots=True)
class PullResult:
    """KV of the whole prompt is in the pages."""

    first_token_id: int
    finished: bool
    """Whether the first token already ends the answer: there is nothing to decode."""
    prefill_end_ns: int
    """Prefill's end, nanoseconds since the epoch on the holder's clock."""
    stats: TransferStats


class _Patience:
    """How long the next sign of life may take. Inside a segment only bytes count; between segments, where the holder may be waiting
    for prefill, a renewed lease counts too."""

    def __init__(self, idle_timeout_s: float) -> None:
        self._idle_timeout_s = idle_timeout_s
        self._timeout: asyncio.Timeout | None = None

    async def next(self, events: AsyncGenerator[Event, None], *, inside_segment: bool) -> Event | None:
        """The next event, None at the end of the stream; raises `KvTransferError` for silence."""
        try:
            async with asyncio.timeout(self._idle_timeout_s) as timeout:
                self._timeout = None if inside_segment else timeout
                return await anext(events)
        except StopAsyncIteration:
            return None
        except TimeoutError:
            raise KvTransferError(f"no bytes and no sign of life from the holder for {self._idle_timeout_s} s") from None
        finally:
            self._timeout = None

    def sign_of_life(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time() + self._idle_timeout_s)


class KvPuller:
    """Takes KV from holders through one transport into one pool's pages. Lives on the event loop; one for all pulls of a worker."""

    def __init__(
        self,
        transport: TransferPort,
        identity: ModelIdentity,
        layout: KvLayout,
        pages: PageBytes,
        *,
        idle_timeout_s: float = 10.0,
        clock: Clock | None = None,
    ) -> None:
        """`idle_timeout_s`: longest silence of a holder before a pull gives up."""
        self._transport = transport
        self._identity = identity
        self._layout = layout
        self._pages = pages
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock or SystemClock()

    async def pull(
        self,
        handle: KvHandle,
        *,
        prompt_digest: bytes,
        pages: Sequence[int],
        first_block: int = 0,
        timeout_s: float,
        on_block: Callable[[int], None] | None = None,
    ) -> PullResult:
        """Fills `pages[first_block:]` from the handle; `pages[i]` is the page of the prompt's block i, by position, never by count.

        `prompt_digest` is the taker's own, of the prompt it means to serve. `on_block(n)`: blocks `[0, n)` are verified and in place.
        Raises the `HandleError` that says why the handle is refused (here, before any call, or by its holder),
        `ChecksumMismatchError`, `KvAbortedError`, or `KvTransferError` when bytes stop coming, make no sense or take over `timeout_s`.
        However it ends, no thread touches the pages any more, and after a failure the holder is told to let go.
        """
        location = self._check(handle, prompt_digest, len(pages), first_block)
        try:
            async with asyncio.timeout(timeout_s) as budget:
                return await self._pull(handle, location, prompt_digest, pages, first_block, timeout_s, on_block)
        except BaseException as error:
            await self._let_go(handle, location)
            if isinstance(error, TimeoutError) and budget.expired():
                raise KvTransferError(f"the pull took over {timeout_s} s", handle=handle.name) from None
            raise

    async def release(self, handle: KvHandle) -> None:
        """Tells the holder that nobody will pull the handle. Best effort: bounded, never raises but when cancelled."""
        location = next((x for x in handle.locations if self._transport.reaches(x)), None)
        if location is not None:
            await self._let_go(handle, location)

    @asynccontextmanager
    async def keep_alive(self, handle: KvHandle) -> AsyncIterator[None]:
        """Renews the handle's lease while the context lasts: for the time between receiving a handle and pulling it."""
        location = next((x for x in handle.locations if self._transport.reaches(x)), None)
        if location is None:
            yield
            return
        async with self._renewing(handle, location, lambda: None):
            yield

    async def _pull(
        self,
        handle: KvHandle,
        location: Location,
        prompt_digest: bytes,
        pages: Sequence[int],
        first_block: int,
        timeout_s: float,
        on_block: Callable[[int], None] | None,
    ) -> PullResult:
        lease = handle.lease
        request = PullRequest(handle.name, lease.lease_id, handle.incarnation, self._identity, self._layout, prompt_digest, first_block)
        assembler = SegmentAssembler(first_block, handle.block_count, self._layout.block_bytes)
        patience = _Patience(self._idle_timeout_s)
        began = self._clock.monotonic()
        kv_bytes, early_bytes, wait_s, early = 0, 0, 0.0, False
        end: PullEnd | None = None
        async with (
            self._renewing(handle, location, patience.sign_of_life),
            aclosing(self._transport.pull(location, request, timeout_s=timeout_s)) as events,
        ):
            while True:
                asked = self._clock.monotonic()
                event = await patience.next(events, inside_segment=assembler.inside_segment)
                waited_s = self._clock.monotonic() - asked
                match event:
                    case None:
                        break
                    case _ if end is not None:
                        raise KvTransferError("the holder goes on after the end", handle=handle.name)
                    case PullEnd():
                        assembler.finish()
                        end = event
                        wait_s += waited_s
                    case SegmentStart():
                        assembler.feed(event)
                        early = event.early
                        # The holder waits while we still receive what came before: only the part that we too had to wait counts.
                        wait_s += max(0.0, min(event.wait_s, waited_s))
                    case SegmentChunk():
                        whole = assembler.feed(event)
                        if whole is not None:
                            segment, chunks = whole.segment, whole.chunks
                            views = [self._pages.page_view(page) for page in pages[segment.first_block : assembler.next_block]]
                            await run_to_end(partial(land, segment, chunks, views))
                            kv_bytes += segment.size_bytes
                            early_bytes += segment.size_bytes if early else 0
                            if on_block is not None:
                                on_block(assembler.next_block)
        if end is None:
            raise KvTransferError("the stream was cut off before its end", handle=handle.name)
        stats = TransferStats(
            kv_bytes=kv_bytes,
            blocks=handle.block_count - first_block,
            wait_s=wait_s,
            transfer_s=max(0.0, self._clock.monotonic() - began - wait_s),
            early_bytes=early_bytes,
            transport=self._transport.name,
        )
        return PullResult(end.first_token_id, end.finished, end.prefill_end_ns, stats)

    def _check(self, handle: KvHandle, prompt_digest: bytes, pages: int, first_block: int) -> Location:
        check_compatible(self._identity, self._layout, handle.identity, handle.layout)
        if handle.prompt_digest != prompt_digest or handle.block_count != pages:
            raise PromptMismatchError(
                "the handle holds the KV of another prompt",
                handle=handle.name,
                expected=prompt_digest.hex(),
                actual=handle.prompt_digest.hex(),
            )
        if handle.token_start != 0:
            raise HandleForgedError(f"KV from token {handle.token_start} on instead of the whole prompt", handle=handle.name)
        assert 0 <= first_block <= pages, f"first_block {first_block} of {pages}"
        for location in handle.locations:
            if self._transport.reaches(location):
                return location
        raise KvTransferError(f"no location of the handle can be reached by {self._transport.name}", handle=handle.name)

    @asynccontextmanager
    async def _renewing(self, handle: KvHandle, location: Location, sign_of_life: Callable[[], None]) -> AsyncIterator[None]:
        every_s = max(0.05, min(handle.lease.ttl_s / 3, self._idle_timeout_s / 2))

        async def renew() -> None:
            while True:
                await asyncio.sleep(every_s)
                try:
                    alive = await self._transport.renew(location, handle.name, handle.lease.lease_id, timeout_s=every_s)
                except KvRelayError as error:
                    # The next one may get through; the pull itself notices a holder that stays silent.
                    logger.debug("renewing %s failed: %s", handle.name, error)
                    continue
                if not alive:
                    # Either the last bytes are under way and the lease is used up, or it is lost: the stream says which.
                    return
                sign_of_life()

        # What the body raises must not arrive wrapped into the group's exception.
        raised: Exception | None = None
        async with asyncio.TaskGroup() as group:
            renewal = group.create_task(renew(), name=f"renew {handle.name}")
            try:
                yield
            except Exception as error:  # noqa: BLE001 - raised again below
                raised = error
            finally:
                renewal.cancel()
        if raised is not None:
            raise raised

    async def _let_go(self, handle: KvHandle, location: Location) -> None:
        try:
            async with asyncio.timeout(RELEASE_TIMEOUT_S):
                await self._transport.release(location, handle.name, handle.lease.lease_id, timeout_s=RELEASE_TIMEOUT_S)
        except (KvRelayError, TimeoutError) as error:
            logger.debug("releasing %s failed: %s", handle.name, error)
