"""Keeps a worker registered: renews its entry, publishes what its prefix cache gained and lost, comes back after an outage."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import random
from collections.abc import Callable, Sequence
from typing import Protocol

from kvrelay.errors import KvRelayError, StaleIncarnationError, UnavailableError
from services.runtime.ports import WorkerInfo

log = logging.getLogger(__name__)

DEFAULT_INTERVAL_S = 2.0
MIN_PAUSE_S = 0.2
"""Beats are never closer than this, however often nudged."""
RETRY_S = 1.0
"""While Redis does not answer."""
DEREGISTER_TIMEOUT_S = 1.0
REAP_EVERY_BEATS = 5
BATCH_BLOCKS = 1_024
"""Blocks published a call; what is sent is not sent again if a later call fails."""


class BlockChanges(Protocol):
    """What the engine's prefix cache gained and lost since it was asked last."""

    @property
    def stored(self) -> Sequence[bytes]: ...
    @property
    def removed(self) -> Sequence[bytes]: ...


class Renewal(Protocol):
    """See `registry.Registration`."""

    @property
    def fresh(self) -> bool: ...
    @property
    def replaced(self) -> int | None: ...


class HeartbeatRegistry(Protocol):
    """The part of a registry that a heartbeat drives."""

    @property
    def keep_s(self) -> float: ...
    async def renew(self, worker: WorkerInfo) -> Renewal: ...
    async def publish_blocks(self, worker_id: str, incarnation: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None: ...
    async def clear(self, worker_id: str, incarnation: int) -> None: ...
    async def reap(self) -> int: ...
    async def deregister(self, worker_id: str, incarnation: int) -> None: ...
    async def close(self) -> None: ...


class Heartbeat:
    """One worker's presence. Run `run()` as a task and cancel it to leave; read `registered` and `fenced` for status."""

    def __init__(
        self,
        registry: HeartbeatRegistry,
        describe: Callable[[], WorkerInfo],
        take_block_changes: Callable[[], BlockChanges] | None = None,
        interval_s: float = DEFAULT_INTERVAL_S,
        rng: random.Random | None = None,
    ) -> None:
        """`describe` gives the entry as of now; `take_block_changes` hands over what changed since its last call. Both run on the loop."""
        self._registry = registry
        self._describe = describe
        self._take_block_changes = take_block_changes
        self._interval_s = interval_s
        self._rng = rng or random.Random()
        self._ledger = BlockLedger()
        self._nudged = asyncio.Event()
        self._beats = 0
        self.registered = False
        """Whether the last beat reached the registry."""
        self.fenced = False
        """Whether a newer life of this worker is registered: this one is no longer routed to."""

    def nudge(self) -> None:
        """Asks for a beat soon: the state or the load changed much."""
        self._nudged.set()

    async def run(self) -> None:
        """Beats until cancelled, then deregisters (briefly) and closes the registry. Never raises for a lost Redis."""
        try:
            while True:
                await self._pause(await self.beat())
        finally:
            await self._leave()

    async def beat(self) -> float:
        """One round; returns the pause after it in seconds."""
        if self._take_block_changes is not None:
            changes = self._take_block_changes()
            self._ledger.record(changes.stored, changes.removed)
        worker = self._describe()
        try:
            await self._renew(worker)
        except UnavailableError as error:
            if self.registered or self._beats == 0:
                log.warning("the registry does not answer; serving goes on: %s", error)
            self._set(registered=False)
            return self._jittered(RETRY_S)
        except StaleIncarnationError as error:
            if not self.fenced:
                log.error("%s; this process is not routed to any more", error)
            self._set(registered=False, fenced=True)
            return self._jittered(self._interval_s)
        if not self.registered:
            log.info("registered as %s in life %d", worker.worker_id, worker.incarnation)
        self._set(registered=True)
        return self._jittered(self._interval_s)

    async def _renew(self, worker: WorkerInfo) -> None:
        renewal = await self._registry.renew(worker)
        if renewal.fresh:
            self._ledger.forget_published()
        while batch := self._ledger.pending(BATCH_BLOCKS):
            await self._publish(worker, batch)
        await self._publish(worker, self._ledger.slice_to_renew(self._beats_to_renew()))
        if renewal.replaced is not None:
            await self._registry.clear(worker.worker_id, renewal.replaced)
        if self._beats % REAP_EVERY_BEATS == 0:
            await self._registry.reap()

    async def _publish(self, worker: WorkerInfo, blocks: Sequence[bytes]) -> None:
        stored = [block for block in blocks if self._ledger.holds(block)]
        removed = [block for block in blocks if not self._ledger.holds(block)]
        if blocks:
            await self._registry.publish_blocks(worker.worker_id, worker.incarnation, stored, removed)
            self._ledger.published(stored, removed)

    def _beats_to_renew(self) -> int:
        """All published blocks are published again within a third of the time after which the registry forgets them."""
        return max(1, math.floor(self._registry.keep_s / 3 / self._interval_s))

    def _set(self, *, registered: bool, fenced: bool = False) -> None:
        self._beats += 1
        self.registered, self.fenced = registered, fenced

    def _jittered(self, seconds: float) -> float:
        return seconds * self._rng.uniform(0.75, 1.0)

    async def _pause(self, seconds: float) -> None:
        least = min(seconds, MIN_PAUSE_S)
        await asyncio.sleep(least)
        try:
            async with asyncio.timeout(seconds - least):
                await self._nudged.wait()
        except TimeoutError:
            return
        finally:
            self._nudged.clear()

    async def _leave(self) -> None:
        worker = self._describe()
        deregister = functools.partial(self._registry.deregister, worker.worker_id, worker.incarnation)
        for leave in (deregister, self._registry.close):
            try:
                async with asyncio.timeout(DEREGISTER_TIMEOUT_S):
                    await leave()
            except (KvRelayError, TimeoutError) as error:
                log.info("left without deregistering, the entry will expire: %s", error)
        self.registered = False


class BlockLedger:
    """What the cache holds against what the registry was told. Bounded by the two: changes that cancel out leave no trace."""

    def __init__(self) -> None:
        self._held: dict[bytes, None] = {}
        self._published: dict[bytes, None] = {}
        self._dirty: dict[bytes, None] = {}

    def record(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The cache lost `removed` and gained `stored` since the last call; a block in both is held."""
        for block in removed:
            self._held.pop(block, None)
            self._mark(block)
        for block in stored:
            self._held[block] = None
            self._mark(block)

    def holds(self, block: bytes) -> bool:
        """Whether the cache holds it now."""
        return block in self._held

    def pending(self, limit: int) -> list[bytes]:
        """Up to `limit` blocks of which the registry's idea is wrong, oldest change first."""
        return [block for block, _ in zip(self._dirty, range(limit), strict=False)]

    def published(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """The registry now knows these."""
        for block in stored:
            # To the end, so that the next slice begins with the one renewed longest ago.
            self._published.pop(block, None)
            self._published[block] = None
            self._mark(block)
        for block in removed:
            self._published.pop(block, None)
            self._mark(block)

    def forget_published(self) -> None:
        """The registry knows nothing: everything held is to be published again."""
        self._published.clear()
        self._dirty = dict(self._held)

    def slice_to_renew(self, parts: int) -> list[bytes]:
        """A `parts`-th of what is held and published, the longest ago first, with what lies between and is not held any more.

        Sized by what is held, which renewing does not change: `parts` slices reach every published block.
        """
        room = math.ceil(sum(block in self._held for block in self._published) / parts)
        found = []
        for block in self._published:
            if block in self._held:
                if room == 0:
                    break
                room -= 1
            found.append(block)
        return found

    def _mark(self, block: bytes) -> None:
        if (block in self._held) == (block in self._published):
            self._dirty.pop(block, None)
        else:
            self._dirty[block] = None
