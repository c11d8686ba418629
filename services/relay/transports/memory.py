"""Holder and taker in one process: the transport that every other one must behave like."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing

from kvrelay.errors import KvTransferError
from kvrelay.handle import Location, PeerLocation
from services.relay.holder import KvHolder
from services.relay.transfer import PullEvent, PullRequest


class MemoryTransfer:
    """`TransferPort` to the holders in a mapping of address to holder."""

    name = "memory"

    def __init__(self, holders: Mapping[str, KvHolder]) -> None:
        self._holders = holders

    def reaches(self, location: Location) -> bool:
        return isinstance(location, PeerLocation)

    async def pull(self, location: Location, request: PullRequest, *, timeout_s: float) -> AsyncGenerator[PullEvent, None]:
        async with aclosing(self._holder(location).pull(request)) as events:
            async for event in events:
                yield event

    async def renew(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> bool:
        return self._holder(location).renew(name, lease_id) is not None

    async def release(self, location: Location, name: str, lease_id: str, *, timeout_s: float) -> None:
        self._holder(location).release(name, lease_id)

    def _holder(self, location: Location) -> KvHolder:
        try:
            return self._holders[location.address]
        except KeyError:
            raise KvTransferError(f"nobody holds KV at {location.address}") from None
