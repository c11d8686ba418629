"""Puts a stream of segments together and trusts nothing about it: pure, bounded, in order or not at all."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import KvTransferError
from kvrelay.handle import KvSegment
from services.relay.transfer import MAX_SEGMENT_BYTES, SegmentChunk, SegmentEvent, SegmentStart

_SMALLEST_CHUNK_BYTES = 4096
_SPARE_CHUNKS = 16
"""Chunks of one segment may not be smaller than this on average, but for a few: a bound on objects, not only on bytes."""


def _broken(text: str) -> KvTransferError:
    return KvTransferError(f"the stream of KV segments is broken: {text}")


class SegmentBuffer:
    """The chunks of one segment, in order, until it is whole."""

    __slots__ = ("_size", "chunks", "segment")

    def __init__(self, segment: KvSegment, block_bytes: int) -> None:
        """Raises `KvTransferError` unless the announced size is that of the announced blocks and a checksum is there."""
        if segment.block_count < 1 or segment.size_bytes != segment.block_count * block_bytes:
            raise _broken(f"{segment.block_count} blocks of {block_bytes} bytes announced as {segment.size_bytes} bytes")
        if segment.block_count > 1 and segment.size_bytes > MAX_SEGMENT_BYTES:
            raise _broken(f"a segment of {segment.size_bytes} bytes, over {MAX_SEGMENT_BYTES}")
        if segment.crc32c is None:
            raise _broken("a segment without checksum")
        self.segment = segment
        self.chunks: list[bytes] = []
        self._size = 0

    @property
    def whole(self) -> bool:
        return self._size == self.segment.size_bytes

    def add(self, chunk: SegmentChunk) -> None:
        """Raises `KvTransferError` for a chunk that doesn't continue the segment, or reaches beyond it."""
        if chunk.offset != self._size:
            raise _broken(f"a chunk at {chunk.offset} where {self._size} comes next")
        if not chunk.data:
            raise _broken("an empty chunk")
        if self._size + len(chunk.data) > self.segment.size_bytes:
            raise _broken(f"a chunk of {len(chunk.data)} bytes at {chunk.offset} of a segment of {self.segment.size_bytes}")
        if len(self.chunks) > _SPARE_CHUNKS + self.segment.size_bytes // _SMALLEST_CHUNK_BYTES:
            raise _broken("too many small chunks")
        self.chunks.append(chunk.data)
        self._size += len(chunk.data)


@dataclass(slots=True)
class SegmentAssembler:
    """Blocks `[next_block, end_block)` in order, without gap, overlap or excess."""

    next_block: int
    """First block not complete yet."""
    end_block: int
    block_bytes: int
    _open: SegmentBuffer | None = None

    @property
    def inside_segment(self) -> bool:
        return self._open is not None

    def feed(self, event: SegmentEvent) -> SegmentBuffer | None:
        """Takes one event; returns the segment that it completes. Raises `KvTransferError` for anything that isn't next."""
        if isinstance(event, SegmentStart):
            segment = event.segment
            if self._open is not None:
                raise _broken(f"a segment begins before blocks from {self._open.segment.first_block} are complete")
            if segment.first_block != self.next_block:
                raise _broken(f"block {segment.first_block} where {self.next_block} comes next")
            if segment.first_block + segment.block_count > self.end_block:
                raise _broken(f"blocks up to {segment.first_block + segment.block_count} of {self.end_block}")
            self._open = SegmentBuffer(segment, self.block_bytes)
            return None
        if self._open is None:
            raise _broken("bytes that belong to no segment")
        self._open.add(event)
        if not self._open.whole:
            return None
        done, self._open = self._open, None
        self.next_block += done.segment.block_count
        return done

    def finish(self) -> None:
        """Raises `KvTransferError` unless every block is complete."""
        if self._open is not None or self.next_block != self.end_block:
            raise _broken(f"it ends before block {self.next_block} of {self.end_block}")
