"""The registry on a real Valkey: fencing, expiry, block holders."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from kvrelay.errors import StaleIncarnationError, UnavailableError
from kvrelay.handle import KvLayout, ModelIdentity
from services.runtime.ports import Topology, WorkerInfo, WorkerLoad
from services.runtime.registry.codec import Keys
from services.runtime.registry.embedded_redis import EmbeddedRedis
from services.runtime.registry.workers import RedisRegistry

# An incarnation that a floating-point number cannot tell from its neighbour.
LIFE = 1_800_000_000_000_000_001
WORKER = WorkerInfo(
    worker_id="prefill-0",
    role="prefill",
    address="127.0.0.1:7000",
    incarnation=LIFE,
    identity=ModelIdentity("smol", "sha256:aa", "sha256:bb", "bfloat16", "bfloat16", "theta=1e4", "native-1"),
    layout=KvLayout(30, 3, 64, 16, "bfloat16"),
    max_context_tokens=8192,
    vocab_size=49152,
    topology=Topology("host", "rack", "zone"),
    load=WorkerLoad(running=3, total_pages=100, available_pages=60),
)


def block(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest()


BLOCKS = [block(number) for number in range(600)]


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture
async def redis(server: EmbeddedRedis) -> AsyncIterator[Any]:
    client = Redis.from_url(server.url, protocol=2)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
async def registry(server: EmbeddedRedis, redis: Any) -> AsyncIterator[RedisRegistry]:
    made = RedisRegistry(server.url, "test")
    yield made
    await made.close()


async def test_the_first_registration_is_fresh_and_a_renewal_is_not(registry: RedisRegistry) -> None:
    first, second = await registry.renew(WORKER), await registry.renew(replace(WORKER, load=WorkerLoad(running=4)))
    assert (first.fresh, first.replaced, second.fresh) == (True, None, False)


async def test_every_key_has_the_namespace_and_expires(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:3], [])
    keys = await redis.keys("*")
    assert len(keys) >= 8 and all(key.startswith(b"{test}:") for key in keys)
    assert all([await redis.pttl(key) > 0 for key in keys])


async def test_an_older_life_cannot_overwrite_publish_for_or_remove_a_newer_one(registry: RedisRegistry, redis: Any) -> None:
    newer = replace(WORKER, incarnation=LIFE + 1, address="127.0.0.1:7001")
    await registry.register(newer)
    with pytest.raises(StaleIncarnationError):
        await registry.register(WORKER)
    with pytest.raises(StaleIncarnationError):
        await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:1], [])
    await registry.deregister(WORKER.worker_id, LIFE)
    assert int(await redis.hget(Keys("test").worker(WORKER.worker_id), "incarnation")) == LIFE + 1


async def test_an_older_life_stays_out_even_after_the_newer_ones_entry_expired(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(replace(WORKER, incarnation=LIFE + 1))
    await redis.delete(Keys("test").worker(WORKER.worker_id))
    with pytest.raises(StaleIncarnationError) as caught:
        await registry.register(WORKER)
    assert caught.value.fields["registered_incarnation"] == str(LIFE + 1)


async def test_a_newer_life_replaces_an_older_one_and_its_blocks_can_be_cleared(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS, [])
    renewal = await registry.renew(replace(WORKER, incarnation=LIFE + 1))
    assert (renewal.fresh, renewal.replaced) == (True, LIFE)
    assert (await registry.holders(BLOCKS[:1]))[BLOCKS[0]] == []
    await registry.publish_blocks(WORKER.worker_id, LIFE + 1, BLOCKS[:5], [])
    await registry.clear(WORKER.worker_id, LIFE)
    assert [await registry.holders(BLOCKS[:6])] == [{block: ["prefill-0"] * (index < 5) for index, block in enumerate(BLOCKS[:6])}]
    assert len(await redis.keys("{test}:block:*")) == 5


async def test_blocks_are_published_over_several_batches_and_removed(registry: RedisRegistry) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS, [])
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:1], BLOCKS[1:300])
    holders = await registry.holders(BLOCKS)
    assert [bool(holders[block]) for block in BLOCKS] == [True] + [False] * 299 + [True] * 300


async def test_publishing_again_renews_without_an_event(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:4], [])
    before = await redis.xlen(Keys("test").events)
    await redis.pexpire(Keys("test").block(BLOCKS[0]), 1_000)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:4], [])
    assert await redis.xlen(Keys("test").events) == before
    assert await redis.pttl(Keys("test").block(BLOCKS[0])) > 10_000


async def test_publishing_without_a_registration_is_refused(registry: RedisRegistry) -> None:
    with pytest.raises(UnavailableError, match="not registered"):
        await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS[:1], [])


async def test_deregistering_leaves_nothing_of_the_worker_but_its_fence(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS, [])
    await registry.deregister(WORKER.worker_id, LIFE)
    assert sorted(await redis.keys("*")) == [b"{test}:events", b"{test}:fence:prefill-0", b"{test}:sequence"]


async def test_anyone_clears_after_a_worker_whose_entry_expired(registry: RedisRegistry, redis: Any) -> None:
    await registry.register(WORKER)
    await registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS, [])
    await registry.register(replace(WORKER, worker_id="decode-0"))
    await registry.publish_blocks("decode-0", LIFE, BLOCKS[:2], [])
    await redis.delete(Keys("test").worker(WORKER.worker_id))
    assert await registry.reap() == 1
    assert await registry.reap() == 0
    assert len(await redis.keys("{test}:block:*")) == 2
    assert (await registry.holders(BLOCKS[:1]))[BLOCKS[0]] == ["decode-0"]


async def test_a_silent_worker_expires(server: EmbeddedRedis, redis: Any) -> None:
    registry = RedisRegistry(server.url, "test", ttl_s=0.05)
    await registry.register(WORKER)
    await asyncio.sleep(0.1)
    assert await redis.exists(Keys("test").worker(WORKER.worker_id)) == 0
    assert (await registry.renew(WORKER)).fresh
    await registry.close()


async def test_namespaces_do_not_see_each_other(server: EmbeddedRedis, registry: RedisRegistry) -> None:
    other = RedisRegistry(server.url, "other")
    await registry.register(replace(WORKER, incarnation=LIFE + 1))
    assert (await other.renew(WORKER)).fresh
    await other.close()


async def test_a_redis_that_is_not_there_or_hangs_is_unavailable_in_bounded_time() -> None:
    with EmbeddedRedis() as own:
        registry = RedisRegistry(own.url, "test")
        await registry.register(WORKER)
        own.pause()
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError):
                await registry.register(WORKER)
        own.resume()
        await registry.register(WORKER)
        await asyncio.to_thread(own.kill)
        async with asyncio.timeout(5):
            with pytest.raises(UnavailableError):
                await registry.register(WORKER)
        await asyncio.to_thread(own.start)
        assert (await registry.renew(WORKER)).fresh
        await registry.close()


async def test_a_cancelled_operation_leaves_the_client_usable(registry: RedisRegistry) -> None:
    for _ in range(20):
        task = asyncio.create_task(registry.publish_blocks(WORKER.worker_id, LIFE, BLOCKS, []))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await registry.register(WORKER)
        assert (await registry.holders([block(9_999)])) == {block(9_999): []}
