"""The assembler takes any honest stream and no other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import KvTransferError
from kvrelay.handle import KvSegment
from services.relay.segments import SegmentAssembler
from services.relay.transfer import MAX_SEGMENT_BYTES, SegmentChunk, SegmentEvent, SegmentStart

BLOCK = 64


def start(first: int, count: int, *, size: int | None = None, crc: int | None = 1) -> SegmentStart:
    return SegmentStart(KvSegment(first, count, count * BLOCK if size is None else size, crc))


def chunk(offset: int, size: int) -> SegmentChunk:
    return SegmentChunk(offset, bytes(size))


@given(
    st.integers(0, 5),
    st.lists(st.integers(1, 4), max_size=6),
    st.randoms(use_true_random=False),
)
def test_any_cut_into_segments_and_chunks_comes_out_whole(first: int, counts: list[int], rng: object) -> None:
    assembler = SegmentAssembler(first, first + sum(counts), BLOCK)
    whole: list[tuple[int, bytes]] = []
    sent: list[tuple[int, bytes]] = []
    block = first
    for count in counts:
        data = rng.randbytes(count * BLOCK)  # type: ignore[attr-defined]
        sent.append((block, data))
        assert assembler.feed(start(block, count)) is None
        half = rng.randrange(1, len(data))  # type: ignore[attr-defined]
        assert assembler.feed(SegmentChunk(0, data[:half])) is None
        done = assembler.feed(SegmentChunk(half, data[half:]))
        assert done is not None
        whole.append((done.segment.first_block, b"".join(done.chunks)))
        block += count
    assembler.finish()
    assert whole == sent and assembler.next_block == block


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([start(1, 1)], id="gap"),
        pytest.param([start(0, 1), chunk(0, BLOCK), start(0, 1)], id="repeats a block"),
        pytest.param([start(0, 2), chunk(0, 2 * BLOCK), start(1, 2)], id="overlap"),
        pytest.param([start(0, 5)], id="beyond the last block"),
        pytest.param([start(0, 0)], id="no blocks"),
        pytest.param([start(0, 1, size=BLOCK - 1)], id="size too small"),
        pytest.param([start(0, 1, size=BLOCK + 1)], id="size too large"),
        pytest.param([start(0, 1, crc=None)], id="no checksum"),
        pytest.param([start(0, 1), start(0, 1)], id="segment inside a segment"),
        pytest.param([chunk(0, BLOCK)], id="bytes before a segment"),
        pytest.param([start(0, 1), chunk(0, BLOCK), chunk(BLOCK, 1)], id="bytes after a segment"),
        pytest.param([start(0, 1), chunk(1, BLOCK - 1)], id="chunk leaves a hole"),
        pytest.param([start(0, 1), chunk(0, 8), chunk(4, 8)], id="chunks overlap"),
        pytest.param([start(0, 1), chunk(0, BLOCK + 1)], id="chunk beyond the segment"),
        pytest.param([start(0, 1), chunk(0, 0)], id="empty chunk"),
        pytest.param([start(0, 1), *(chunk(i, 1) for i in range(18))], id="confetti"),
    ],
)
def test_a_stream_that_is_not_next_is_refused(events: list[SegmentEvent]) -> None:
    assembler = SegmentAssembler(0, 4, BLOCK)
    for event in events[:-1]:
        assembler.feed(event)
    with pytest.raises(KvTransferError):
        assembler.feed(events[-1])


@pytest.mark.parametrize("events", [[], [start(0, 1)], [start(0, 1), chunk(0, 8)], [start(0, 1), chunk(0, BLOCK)]])
def test_an_early_end_is_refused(events: list[SegmentEvent]) -> None:
    assembler = SegmentAssembler(0, 2, BLOCK)
    for event in events:
        assembler.feed(event)
    with pytest.raises(KvTransferError):
        assembler.finish()


def test_a_segment_of_many_blocks_is_bounded_but_one_block_may_be_as_large_as_it_is() -> None:
    block = MAX_SEGMENT_BYTES
    one = SegmentStart(KvSegment(0, 1, 2 * block, 1))
    assert SegmentAssembler(0, 4, 2 * block).feed(one) is None
    with pytest.raises(KvTransferError):
        SegmentAssembler(0, 4, block).feed(SegmentStart(KvSegment(0, 2, 2 * block, 1)))
