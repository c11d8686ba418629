"""What may happen to a stream of segments on its way, whoever sends it: a hand-over's or a block store's."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from typing import TypeVar

from services.relay.transfer import SegmentChunk

Event = TypeVar("Event")
BEFORE = 5
"""Events that arrive before the stream is cut or stalls: of segments of one chunk, two and the start of a third."""


async def flip(events: AsyncIterator[Event]) -> AsyncGenerator[Event | SegmentChunk, None]:
    """One bit of the third chunk is another."""
    rng, count = random.Random(4), 0
    async for event in events:
        if isinstance(event, SegmentChunk):
            count += 1
            if count == 3:
                data = bytearray(event.data)
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
                yield replace(event, data=bytes(data))
                continue
        yield event


async def cut(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """It ends in the middle."""
    for _ in range(BEFORE):
        yield await anext(events)


async def stall(events: AsyncIterator[Event]) -> AsyncGenerator[Event, None]:
    """It goes silent in the middle."""
    for _ in range(BEFORE):
        yield await anext(events)
    await asyncio.Event().wait()
