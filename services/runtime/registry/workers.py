"""The workers' side of the registry in Redis: who is alive, with what load, holding which blocks.

Keys (`codec.Keys`) carry a namespace and expire by themselves. An older life of a worker can neither overwrite nor remove a
newer one (`scripts`). Nothing here is awaited by a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from kvrelay.errors import ConfigError, StaleIncarnationError, UnavailableError
from services.runtime.ports import WorkerInfo
from services.runtime.registry import scripts
from services.runtime.registry.codec import Keys, padded, worker_to_json
from services.runtime.registry.heartbeat import Heartbeat

__all__ = ["DEFAULT_NAMESPACE", "DEFAULT_TTL_S", "Heartbeat", "RedisRegistry", "Registration", "redis_client", "redis_errors"]

DEFAULT_NAMESPACE = "kvrelay"
DEFAULT_TTL_S = 6.0
OPERATION_TIMEOUT_S = 1.5
CONNECT_TIMEOUT_S = 1.0
KEEP_FACTOR = 20
"""Everything but a worker's entry lives this many times longer: fences, block holders, the stream."""
MAX_EVENTS = 8_192
BATCH_BLOCKS = 256
"""Blocks an atomic write: a bound on how long the server is busy and on an event's size."""


@dataclass(frozen=True, slots=True)
class Registration:
    """What the registry knew of a worker before this renewal."""

    fresh: bool
    """Its entry was not there, so neither may its blocks be: first registration, expiry, or a Redis that lost its data."""
    replaced: int | None
    """The incarnation of an earlier life that was still listed; its blocks are to be cleared."""


def redis_client(url: str) -> Redis:
    """A client that leaves retrying to its user; every use belongs inside `redis_errors`, which bounds it.

    Connects to nothing yet; `ConfigError` for a URL that is none of Redis.
    """
    try:
        return Redis.from_url(
            url,
            # Said outright because the default protocol changed with redis-py 8, and replies with it.
            protocol=2,
            # None: with a timeout redis-py sends by `asyncio.wait_for`, which before Python 3.12 can swallow the caller's cancellation.
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            health_check_interval=0,
        )
    except ValueError as error:
        # Without the URL itself, which may hold a password.
        raise ConfigError(f"--redis-url is not the address of a Redis: {error}", setting="redis_url") from None


@asynccontextmanager
async def redis_errors(timeout_s: float) -> AsyncIterator[None]:
    """Bounds what is inside; every way in which Redis fails becomes `UnavailableError`."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except (AuthenticationError, AuthorizationError, NoPermissionError) as error:
        raise UnavailableError(f"Redis refuses this client: {error}", refused=True) from error
    except TimeoutError as error:
        raise UnavailableError(f"Redis does not answer within {timeout_s:g} s") from error
    except (RedisError, OSError) as error:
        raise UnavailableError(f"Redis: {type(error).__name__}: {error}") from error


class RedisRegistry:
    """A registry on Redis or Valkey. Every method ends within a few times `OPERATION_TIMEOUT_S`: by its result, or by
    `UnavailableError`. `StaleIncarnationError` means that a newer life of the worker is registered.
    """

    def __init__(self, url: str, namespace: str = DEFAULT_NAMESPACE, ttl_s: float = DEFAULT_TTL_S) -> None:
        """`ttl_s`: a worker silent for that long is gone."""
        self._redis = redis_client(url)
        self._keys = Keys(namespace)
        self._ttl_ms = round(ttl_s * 1e3)
        self._keep_ms = KEEP_FACTOR * self._ttl_ms
        self._register = self._redis.register_script(scripts.REGISTER)
        self._deregister = self._redis.register_script(scripts.DEREGISTER)
        self._publish = self._redis.register_script(scripts.PUBLISH_BLOCKS)
        self._clear = self._redis.register_script(scripts.CLEAR)
        self._dead = self._redis.register_script(scripts.DEAD)

    @property
    def keep_s(self) -> float:
        """How long published blocks stay without being published again."""
        return self._keep_ms / 1e3

    async def ping(self) -> None:
        """Returns if the server answers; `UnavailableError` has the field `refused` where it does not let us in."""
        async with redis_errors(OPERATION_TIMEOUT_S):
            await self._redis.ping()

    async def register(self, worker: WorkerInfo) -> None:
        await self.renew(worker)

    async def renew(self, worker: WorkerInfo) -> Registration:
        """`register`, telling what was there before."""
        keys = self._keys
        async with redis_errors(OPERATION_TIMEOUT_S):
            reply: Any = await self._register(
                keys=[keys.worker(worker.worker_id), keys.index, keys.fence(worker.worker_id), keys.events, keys.sequence],
                args=[worker.worker_id, padded(worker.incarnation), worker_to_json(worker), self._ttl_ms, self._keep_ms, MAX_EVENTS],
            )
        if reply[0] == b"stale":
            raise _stale(worker.worker_id, worker.incarnation, int(reply[1]))
        return Registration(fresh=reply[1] == 1, replaced=int(reply[2]) if reply[2] else None)

    async def deregister(self, worker_id: str, incarnation: int) -> None:
        """Tells at once that this life is over; does nothing if another life is registered."""
        keys = self._keys
        async with redis_errors(OPERATION_TIMEOUT_S):
            await self._deregister(
                keys=[keys.worker(worker_id), keys.events, keys.sequence], args=[worker_id, padded(incarnation), self._keep_ms, MAX_EVENTS]
            )
        await self.clear(worker_id, incarnation)

    async def publish_blocks(self, worker_id: str, incarnation: int, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        """Idempotent; blocks published before are renewed without an event. `UnavailableError` also if the worker is not registered."""
        changes = [(block, True) for block in stored] + [(block, False) for block in removed]
        for start in range(0, len(changes), BATCH_BLOCKS):
            await self._publish_batch(worker_id, incarnation, changes[start : start + BATCH_BLOCKS])

    async def clear(self, worker_id: str, incarnation: int) -> None:
        """Takes all blocks of one life off the registry, and the life off the index if its entry is gone."""
        keys, left = self._keys, 1
        while left:
            async with redis_errors(OPERATION_TIMEOUT_S):
                left = await self._clear(
                    keys=[keys.worker(worker_id), keys.index, keys.held(worker_id, incarnation)],
                    args=[worker_id, padded(incarnation), keys.block_prefix, BATCH_BLOCKS],
                )

    async def reap(self) -> int:
        """Clears after workers whose entry expired, any worker's; returns how many there were. Safe to run in several places at once."""
        async with redis_errors(OPERATION_TIMEOUT_S):
            found: Any = await self._dead(keys=[self._keys.index], args=[self._keys.worker("")])
        dead = list(zip(found[::2], found[1::2], strict=True))
        for worker_id, incarnation in dead:
            await self.clear(worker_id.decode(), int(incarnation))
        return len(dead)

    async def holders(self, block_hashes: Sequence[bytes]) -> Mapping[bytes, Sequence[str]]:
        """Which live workers hold each block, for tools; routers know it from the feed."""
        async with redis_errors(OPERATION_TIMEOUT_S):
            found: list[Any] = [await self._redis.hgetall(self._keys.block(block)) for block in block_hashes]
            lives = {
                worker_id: await self._redis.hget(self._keys.worker(worker_id.decode()), "incarnation")
                for worker_id in {worker_id for holders in found for worker_id in holders}
            }
        return {
            block: sorted(worker_id.decode() for worker_id, incarnation in holders.items() if lives[worker_id] == incarnation)
            for block, holders in zip(block_hashes, found, strict=True)
        }

    async def close(self) -> None:
        """Closes the connections."""
        async with redis_errors(OPERATION_TIMEOUT_S):
            await self._redis.aclose()

    async def _publish_batch(self, worker_id: str, incarnation: int, changes: Sequence[tuple[bytes, bool]]) -> None:
        keys = self._keys
        async with redis_errors(OPERATION_TIMEOUT_S):
            reply: Any = await self._publish(
                keys=[
                    keys.worker(worker_id), keys.held(worker_id, incarnation), keys.events, keys.sequence,
                    *(keys.block(block) for block, _ in changes),
                ],
                args=[
                    worker_id, padded(incarnation), self._keep_ms, MAX_EVENTS, sum(stored for _, stored in changes),
                    *(block for block, _ in changes),
                ],
            )  # fmt: skip
        if reply == b"stale":
            raise _stale(worker_id, incarnation, None)
        if reply != b"ok":
            raise UnavailableError(f"worker {worker_id} is not registered in this life", worker=worker_id)


def _stale(worker_id: str, ours: int, newest: int | None) -> StaleIncarnationError:
    return StaleIncarnationError(
        f"a newer life of worker {worker_id} is registered", incarnation=ours, registered_incarnation=newest or "newer"
    )
