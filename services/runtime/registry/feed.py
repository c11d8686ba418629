"""The routers' side of the registry: a snapshot, then changes, for ever; a gap, a reconnect or an emptied Redis means another snapshot."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from redis.asyncio import Redis

from kvrelay.errors import UnavailableError
from services.runtime.clock import Clock, SystemClock
from services.runtime.ports import BlocksChanged, FleetEvent, FleetSnapshot, RegistryLost, WorkerGone, WorkerInfo, WorkerSeen
from services.runtime.registry import scripts
from services.runtime.registry.codec import Keys, split_hashes, worker_from_json
from services.runtime.registry.workers import DEFAULT_NAMESPACE, DEFAULT_TTL_S, OPERATION_TIMEOUT_S, redis_client, redis_errors

log = logging.getLogger(__name__)

POLL_S = 0.5
"""How long one read waits for events."""
CHECK_EVERY_POLLS = 2
RECONNECT_S = 0.5
REREAD_S = 0.05
READ_EVENTS = 512
SCAN_COUNT = 1_000


class RedisFleetFeed:
    """`FleetFeedPort` on Redis or Valkey. One consumer; make another feed for another."""

    def __init__(
        self,
        url: str,
        namespace: str = DEFAULT_NAMESPACE,
        ttl_s: float = DEFAULT_TTL_S,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """`ttl_s`: how long after an outage a worker known before may take to register again before it counts as gone.

        `ConfigError` for a URL that is none of Redis.
        """
        redis_client(url)  # refuses a wrong URL here, where the caller sees it
        self._url = url
        self._keys = Keys(namespace)
        self._ttl_s = ttl_s
        self._clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._poll_s = poll_s
        self._known: dict[str, WorkerInfo] = {}
        self._excused_until: dict[str, float] = {}
        self._epoch = ""
        self._sequence = 0
        self._last_id = "0-0"

    async def events(self) -> AsyncIterator[FleetEvent]:
        """Never ends, never raises for Redis; close the generator to stop."""
        outage = False
        while True:
            redis = redis_client(self._url)
            try:
                yield await self._snapshot(redis, outage)
                outage = False
                async with aclosing(self._follow(redis)) as changes:
                    async for change in changes:
                        yield change
            except UnavailableError as error:
                if not outage:
                    log.warning("the registry does not answer; routing goes on with what is known: %s", error)
                    yield RegistryLost()
                outage, pause_s = True, RECONNECT_S
            except _DataLostError as lost:
                log.warning("the registry lost its data; waiting for workers to register again: %s", lost)
                outage, pause_s = True, REREAD_S
            except _GapError as gap:
                log.info("reading the registry anew: %s", gap)
                pause_s = REREAD_S
            finally:
                await _close(redis)
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * pause_s)

    async def _snapshot(self, redis: Redis, outage: bool) -> FleetSnapshot:
        keys = self._keys
        async with redis_errors(OPERATION_TIMEOUT_S):
            script = redis.register_script(scripts.SNAPSHOT)
            epoch, sequence, last_id, infos = await script(keys=[keys.index, keys.events, keys.sequence], args=[keys.worker("")])
        self._epoch, self._sequence, self._last_id = epoch.decode(), int(sequence), last_id.decode()
        workers = {worker.worker_id: worker for worker in map(_worker, infos) if worker is not None}
        self._excuse_missing(workers, outage)
        # Read after the position: changes since then are in the sets already, and applying them again, in order, changes nothing.
        holders = {worker.worker_id: await self._held(redis, worker) for worker in workers.values()}
        self._known = workers
        return FleetSnapshot(tuple(workers.values()), holders)

    def _excuse_missing(self, workers: dict[str, WorkerInfo], outage: bool) -> None:
        """After an outage entries are missing because nobody could renew them, not because workers died: keep those known before.

        Without this, a Redis that comes back empty would make every request fail until the workers register again.
        """
        excused: dict[str, float] = {}
        for worker_id, worker in self._known.items():
            until_s = self._clock.monotonic() + self._ttl_s if outage else self._excused_until.get(worker_id)
            if worker_id not in workers and until_s is not None:
                workers[worker_id] = worker
                excused[worker_id] = until_s
        self._excused_until = excused

    async def _held(self, redis: Redis, worker: WorkerInfo) -> tuple[bytes, ...]:
        async with redis_errors(4 * OPERATION_TIMEOUT_S):
            key = self._keys.held(worker.worker_id, worker.incarnation)
            # A scan may give a member twice.
            return tuple(dict.fromkeys([member async for member in redis.sscan_iter(key, count=SCAN_COUNT)]))

    async def _follow(self, redis: Redis) -> AsyncGenerator[FleetEvent, None]:
        """Changes after the snapshot; raises when they cannot be followed any further."""
        check = redis.register_script(scripts.CHECK)
        next_check_s = self._clock.monotonic() + CHECK_EVERY_POLLS * self._poll_s
        behind = False
        while True:
            async with redis_errors(OPERATION_TIMEOUT_S + self._poll_s):
                reply: Any = await redis.xread({self._keys.events: self._last_id}, count=READ_EVENTS, block=round(self._poll_s * 1e3))
            for _, entries in reply or ():
                for entry_id, fields in entries:
                    change = self._apply(entry_id, fields)
                    if change is not None:
                        yield change
            if self._clock.monotonic() < next_check_s:
                continue
            next_check_s = self._clock.monotonic() + CHECK_EVERY_POLLS * self._poll_s
            worker_ids = list(self._known)
            async with redis_errors(OPERATION_TIMEOUT_S):
                epoch, sequence, gone = await check(keys=[self._keys.sequence, *map(self._keys.worker, worker_ids)])
            behind = self._check_position(epoch.decode(), int(sequence), was_behind=behind and not reply)
            for worker_id in [worker_ids[position - 1] for position in gone]:
                expired = self._expire(worker_id)
                if expired is not None:
                    yield expired

    def _check_position(self, epoch: str, sequence: int, *, was_behind: bool) -> bool:
        """Whether events exist that were not read yet. Twice in a row without reading any: they are lost to us."""
        # Numbering begins with the first registration: an empty Redis has no epoch yet.
        self._epoch = self._epoch or epoch
        if epoch != self._epoch:
            raise _DataLostError(f"epoch {self._epoch} became {epoch or 'none'}")
        if sequence < self._sequence:
            raise _DataLostError(f"numbering fell from {self._sequence} to {sequence}")
        if was_behind and sequence > self._sequence:
            raise _GapError(f"events up to {sequence} exist, read up to {self._sequence}")
        return sequence > self._sequence

    def _apply(self, entry_id: bytes, fields: Mapping[bytes, bytes]) -> FleetEvent | None:
        number = int(fields.get(b"n", b"0"))
        if number != self._sequence + 1:
            raise _GapError(f"event {number} came after {self._sequence}")
        self._sequence, self._last_id = number, entry_id.decode()
        match fields.get(b"kind"):
            case b"seen":
                return self._seen(_worker(fields.get(b"info", b"")))
            case b"gone":
                return self._gone(fields[b"worker_id"].decode(), int(fields[b"incarnation"]))
            case b"blocks":
                stored, removed = split_hashes(fields[b"stored"]), split_hashes(fields[b"removed"])
                return BlocksChanged(fields[b"worker_id"].decode(), int(fields[b"incarnation"]), stored, removed)
            case _:
                return None

    def _seen(self, worker: WorkerInfo | None) -> WorkerSeen | None:
        if worker is None or self._is_older(worker.worker_id, worker.incarnation):
            return None
        self._known[worker.worker_id] = worker
        self._excused_until.pop(worker.worker_id, None)
        return WorkerSeen(worker)

    def _gone(self, worker_id: str, incarnation: int) -> WorkerGone | None:
        if worker_id not in self._known or self._is_older(worker_id, incarnation):
            return None
        del self._known[worker_id]
        self._excused_until.pop(worker_id, None)
        return WorkerGone(worker_id, incarnation)

    def _expire(self, worker_id: str) -> WorkerGone | None:
        worker = self._known.get(worker_id)
        if worker is None or self._clock.monotonic() < self._excused_until.get(worker_id, 0.0):
            return None
        return self._gone(worker_id, worker.incarnation)

    def _is_older(self, worker_id: str, incarnation: int) -> bool:
        known = self._known.get(worker_id)
        return known is not None and incarnation < known.incarnation


class _GapError(Exception):
    """Events were missed."""


class _DataLostError(Exception):
    """The server began anew."""


def _worker(info: bytes) -> WorkerInfo | None:
    try:
        return worker_from_json(info)
    except ValueError as error:
        log.warning("an entry of the registry is not a worker: %s", error)
        return None


async def _close(redis: Redis) -> None:
    try:
        async with redis_errors(OPERATION_TIMEOUT_S):
            await redis.aclose()
    except UnavailableError:
        return
