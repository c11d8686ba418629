"""What relay and store tests share: a small pool of bytes, a model's identity, transports that go wrong on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar

from kvrelay.errors import KvRelayError
from kvrelay.handle import KvHandle, KvLayout, Location, ModelIdentity
from services.kvstore.keeper import StoreKeeper
from services.relay.holder import HeldKv, KvHolder
from services.relay.transfer import PullEvent, PullRequest, ReadEvent, SegmentEvent, StoreWrite, TransferPort
from services.runtime.clock import Clock, ManualClock

T = TypeVar("T")

IDENTITY = ModelIdentity(
    model="tiny",
    weights_digest="sha256:" + "a" * 64,
    tokenizer_digest="sha256:" + "b" * 64,
    dtype="float32",
    kv_dtype="float32",
    rope="theta=10000",
    numerics="native-1",
)
LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=4, block_size=4, dtype="float32")
"""Blocks of 512 bytes: many fit one segment."""
BIG_LAYOUT = KvLayout(layers=3, kv_heads=4, head_dim=32, block_size=1024, dtype="float32")
"""Blocks of 3 MiB: each is a segment of three chunks."""
WIDE_LAYOUT = KvLayout(layers=2, kv_heads=4, head_dim=32, block_size=512, dtype="float32")
"""Blocks of 1 MiB: each is a segment of one chunk."""


class FakePages:
    """`PageBytes` over a bytearray."""

    def __init__(self, count: int, layout: KvLayout = LAYOUT, seed: int | None = None) -> None:
        self.page_bytes = layout.block_bytes
        size = count * self.page_bytes
        self.buffer = bytearray(random.Random(seed).randbytes(size)) if seed is not None else bytearray(size)
        self.viewed: list[int] = []
        """Pages that were asked for, in order."""

    def page_view(self, page: int) -> memoryview:
        self.viewed.append(page)
        return memoryview(self.buffer)[page * self.page_bytes : (page + 1) * self.page_bytes]

    def bytes_of(self, page: int) -> bytes:
        return bytes(self.buffer[page * self.page_bytes : (page + 1) * self.page_bytes])


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1000) for _ in range(count)]


def make_holder(
    pages: FakePages, clock: Clock | None = None, *, layout: KvLayout = LAYOUT, ttl_s: float = 30.0, max_handles: int = 256
) -> KvHolder:
    return KvHolder(IDENTITY, layout, 77, "holder", pages, clock or ManualClock(), ttl_s, max_handles=max_handles)


def request_of(handle: KvHandle, **changes: object) -> PullRequest:
    request = PullRequest(handle.name, handle.lease.lease_id, handle.incarnation, handle.identity, handle.layout, handle.prompt_digest, 0)
    return replace(request, **changes)


def complete(held: HeldKv, first_token_id: int = 7, *, finished: bool = False) -> None:
    """The producer is done, all at once."""
    held.progress(held.handle.token_end)
    held.commit(first_token_id, finished, 123)


async def outcome(awaitable: Awaitable[T]) -> T | KvRelayError:
    """What came of it: for tasks of a group that must not end the group."""
    try:
        return await awaitable
    except KvRelayError as error:
        return error


async def spin(turns: int = 30) -> None:
    """Lets every ready task run; no time passes."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """For what other threads and sockets bring about."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


Warp = Callable[[AsyncIterator[PullEvent]], AsyncGenerator[PullEvent, None]]


class FaultyTransfer:
    """Another transport with a fault in its stream of events, or with renewals and releases that do not get through."""

    def __init__(self, inner: TransferPort, warp: Warp | None = None, *, renewals: bool = True, releases: bool = True) -> None:
        self.inner = inner
        self.name = inner.name
        self._warp = warp
        self._renewals = renewals
        self._releases = releases
        self.released: list[str] = []
        self.renewed = 0

    def reaches(self, location: Location) -> bool:
        return self.inner.reaches(location)

    async def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]:
        async with (
            aclosing(self.inner.pull(location, request, timeout_s=timeout_s)) as events,
            aclosing(self._warp(events) if self._warp else events) as warped,
        ):
            async for event in warped:
                yield event

    async def renew(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> bool:
        self.renewed += 1
        if not self._renewals:
            await asyncio.sleep(timeout_s)
            return False
        return await self.inner.renew(location, name, lease_id, timeout_s=timeout_s)

    async def release(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> None:
        self.released.append(name)
        if not self._releases:
            await asyncio.Event().wait()
        await self.inner.release(location, name, lease_id, timeout_s=timeout_s)


class MemoryStore:
    """`StorePort` to a keeper in this process; `warp` puts a fault into what is read."""

    def __init__(
        self, keeper: StoreKeeper, warp: Callable[[AsyncIterator[ReadEvent]], AsyncGenerator[ReadEvent, None]] | None = None
    ) -> None:
        self.keeper = keeper
        self.warp = warp

    async def lookup(
        self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float
    ) -> KvHandle | None:
        return self.keeper.lookup(identity, layout, block_hashes)

    async def read(self, handle: KvHandle, first_block: int, *, timeout_s: float) -> AsyncGenerator[ReadEvent, None]:
        async with (
            aclosing(self.keeper.read(handle.name, handle.lease.lease_id, handle.incarnation, first_block)) as events,
            aclosing(self.warp(events) if self.warp else events) as warped,
        ):
            async for event in warped:
                yield event

    async def create(self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float) -> StoreWrite:
        handle, missing = self.keeper.create(identity, layout, block_hashes)
        return StoreWrite(handle.name, handle.lease.lease_id, missing)

    async def write(self, write: StoreWrite, segments: AsyncIterator[SegmentEvent], *, timeout_s: float) -> int:
        return (await self.keeper.write(write.name, write.lease_id, segments))[0]

    async def commit(self, write: StoreWrite, *, timeout_s: float) -> int:
        return self.keeper.commit(write.name, write.lease_id)

    async def release(self, name: str, lease_id: str, *, timeout_s: float) -> None:
        self.keeper.release(name, lease_id)
