"""What passes between a holder and a taker of KV, as values, and the port it passes through."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrelay.handle import KvHandle, KvLayout, KvSegment, Location, ModelIdentity

CHUNK_BYTES = 1 << 20
"""Most bytes of one chunk, and the size up to which small blocks are grouped into one segment."""

MAX_SEGMENT_BYTES = 16 << 20
"""Most bytes a taker accepts in one segment of several blocks: what it has to buffer until the checksum is verified."""

HANDLE_PREFIX = "kvHandles/"


def blocks_per_segment(layout: KvLayout) -> int:
    """Blocks a sender puts into one segment: one, or as many small ones as fit a chunk."""
    return max(1, CHUNK_BYTES // layout.block_bytes)


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Proof of the right to pull, and what exactly is wanted. All but the first three are the taker's own, never the handle's."""

    name: str
    lease_id: str
    incarnation: int
    identity: ModelIdentity
    layout: KvLayout
    prompt_digest: bytes
    first_block: int = 0
    """Blocks before this one are not sent."""


@dataclass(frozen=True, slots=True)
class SegmentStart:
    """A segment begins; chunks of exactly `segment.size_bytes` bytes follow."""

    segment: KvSegment
    """Its checksum is present."""
    wait_s: float = 0.0
    """How long the holder waited for the segment to be computed."""
    early: bool = False
    """Whether prefill was still running when it was sent."""


@dataclass(frozen=True, slots=True)
class SegmentChunk:
    """Bytes of the segment begun last."""

    offset: int
    data: bytes
    """At most `CHUNK_BYTES`."""


@dataclass(frozen=True, slots=True)
class PullEnd:
    """The tail of a pull: all blocks were sent."""

    first_token_id: int
    finished: bool
    """Whether the first token already ends the answer."""
    prefill_end_ns: int
    """Prefill's end, nanoseconds since the epoch on the holder's clock."""


@dataclass(frozen=True, slots=True)
class ReadEnd:
    """The tail of a read from a block store."""

    blocks: int
    """Blocks sent."""


SegmentEvent = SegmentStart | SegmentChunk
PullEvent = SegmentStart | SegmentChunk | PullEnd
ReadEvent = SegmentStart | SegmentChunk | ReadEnd


class TransferPort(Protocol):
    """A taker's way to the holders of KV. Refusals arrive as `kvrelay.errors.HandleError`, a broken way as `KvTransferError`.

    Closing a pull's generator early cancels it at the holder at once.
    """

    name: str
    """For `TransferStats.transport`."""

    def reaches(self, location: Location) -> bool: ...

    def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]: ...

    async def renew(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> bool:
        """Whether the lease lives, and is extended."""
        ...

    async def release(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> None: ...


@dataclass(frozen=True, slots=True)
class StoreWrite:
    """An open write to a block store."""

    name: str
    lease_id: str
    missing: Sequence[int]
    """Indexes of the blocks the store lacks, ascending."""


class StorePort(Protocol):
    """A worker's way to one block store. Errors as with `TransferPort`."""

    async def lookup(
        self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float
    ) -> KvHandle | None:
        """A leased handle of the longest stored prefix; None when not even the first block is stored."""
        ...

    def read(self, handle: KvHandle, first_block: int, *, timeout_s: float) -> AsyncGenerator[ReadEvent, None]: ...

    async def create(self, identity: ModelIdentity, layout: KvLayout, block_hashes: Sequence[bytes], *, timeout_s: float) -> StoreWrite: ...

    async def write(self, write: StoreWrite, segments: AsyncIterator[SegmentEvent], *, timeout_s: float) -> int:
        """Sends segments of one block each and returns how many blocks the store verified. `segments` is iterated in the calling task
        and not touched any more once this returns or raises."""
        ...

    async def commit(self, write: StoreWrite, *, timeout_s: float) -> int:
        """Makes the written blocks visible; how many became so."""
        ...

    async def release(self, name: str, lease_id: str, *, timeout_s: float) -> None: ...
