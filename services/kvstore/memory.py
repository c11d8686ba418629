"""Blocks as they lie in host memory: the bytes as they came, with the checksum their writer gave them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.handle import KvSegment
from services.relay.copying import verify
from services.relay.transfer import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class Block:
    """One block's bytes, cut for the wire once and for all."""

    chunks: tuple[bytes, ...]
    """All but the last `CHUNK_BYTES` long."""
    crc32c: int
    """Of the whole block; made by the worker that computed it, so it covers every hop since."""

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.chunks))


def verified_block(segment: KvSegment, chunks: Sequence[bytes]) -> Block:
    """Raises `ChecksumMismatchError` unless the bytes are those that were sent. Blocks: not on the event loop."""
    verify(segment, chunks)
    assert segment.crc32c is not None
    if any(len(chunk) != CHUNK_BYTES for chunk in chunks[:-1]) or len(chunks[-1]) > CHUNK_BYTES:
        whole = b"".join(chunks)
        chunks = [whole[start : start + CHUNK_BYTES] for start in range(0, len(whole), CHUNK_BYTES)]
    return Block(tuple(chunks), segment.crc32c)
