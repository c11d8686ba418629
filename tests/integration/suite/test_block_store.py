"""The shared block store behind real workers: blocks written behind, prefixes taken by cold workers, a limit, and its loss."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay import hashing, wire
from kvrelay.errors import FingerprintMismatchError
from kvrelay.kv.v1 import handle_pb2, kv_store_service_pb2
from tests.integration.suite.fault_kit import (
    Outcome,
    Wire,
    answers_rightly,
    ask,
    at_rest,
    errors_logged,
    eventually,
    ledger,
    prompt_of,
    refusal_of,
    right_answer,
    running,
    store_info,
    with_fields,
)
from tests.suite import Suite
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.timeout(300)

BLOCK = 16


async def lookup(
    stubs: Wire, address: str, identity: handle_pb2.ModelIdentity, layout: handle_pb2.KvLayout, hashes: Sequence[bytes]
) -> int:
    """Leading blocks of a chain that the store has for that model; the lease is given back."""
    request = kv_store_service_pb2.LookupPrefixRequest(identity=identity, layout=layout, block_hashes=hashes)
    found = await stubs.store(address).LookupPrefix(request, timeout=5)
    if found.HasField("handle"):
        release = kv_store_service_pb2.KvStoreServiceReleaseKvRequest(name=found.handle.name, lease_id=found.handle.lease.lease_id)
        await stubs.store(address).ReleaseKv(release, timeout=5)
    blocks: int = found.blocks
    return blocks


def chain(identity: handle_pb2.ModelIdentity, prompt: Sequence[int], salt: str = "") -> list[bytes]:
    return hashing.block_hashes(hashing.root_hash(identity.fingerprint, salt), prompt, BLOCK)


class Store:
    """The store of a suite, as its workers' model sees it."""

    def __init__(self, suite: Suite, stubs: Wire, identity: handle_pb2.ModelIdentity, layout: handle_pb2.KvLayout) -> None:
        self._suite, self._stubs = suite, stubs
        self.identity, self.layout = identity, layout

    @classmethod
    async def of(cls, suite: Suite, stubs: Wire) -> Store:
        worker = (await ledger(stubs, suite.address_of("decode-0"))).worker
        return cls(suite, stubs, worker.identity, worker.layout)

    @property
    def address(self) -> str:
        return self._suite.address_of("kvstore-0")

    async def info(self) -> kv_store_service_pb2.GetStoreInfoResponse:
        return await store_info(self._stubs, self.address)

    async def has(self, prompt: Sequence[int], salt: str = "") -> int:
        return await lookup(self._stubs, self.address, self.identity, self.layout, chain(self.identity, prompt, salt))

    async def until_it_has(self, prompt: Sequence[int], salt: str = "") -> None:
        """Waits until every full block of a prompt was written behind."""

        async def complete() -> bool:
            return await self.has(prompt, salt) == len(prompt) // BLOCK

        await eventually(complete, 10, "the blocks are written behind")


async def alone(suite: Suite, role: str, old: str, index: int) -> str:
    """Replaces a worker by a new one, whose cache is cold; the router knows."""
    name = await suite.start_worker(role, index)
    await suite.stop(old)

    async def known() -> bool:
        states = {worker.worker_id: worker.state for worker in (await suite.client.fleet()).workers}
        return states.get(name) == "ready" and old not in states

    await eventually(known, 10, f"{name} has taken the place of {old}")
    return name


async def test_a_cold_worker_takes_a_prefix_from_the_store(tiny_model: Path, tmp_path: Path) -> None:
    other_model = write_tiny_model(tmp_path / tiny_model.name, "llama", seed=1)
    async with Suite(tiny_model, split_threshold_tokens=64) as suite, Wire() as stubs:
        store = await Store.of(suite, stubs)
        prompt, short = prompt_of(200, seed=1), prompt_of(50, seed=2)
        first = await answers_rightly(suite, tiny_model, prompt)
        assert (first.path, first.cached_tokens) == ("split", 0)
        assert (await answers_rightly(suite, tiny_model, short)).path == "local"
        for written in (prompt, short):
            await store.until_it_has(written)
        # Nothing that was not computed: neither the partial block nor the answer, and under its own salt only.
        assert (await store.info()).blocks == 200 // BLOCK + 50 // BLOCK
        assert await store.has(prompt, salt="another tenant's") == 0
        assert await store.has(prompt_of(200, seed=3)) == 0

        # A prefill worker and a decode worker that have computed nothing yet.
        await alone(suite, "prefill", "prefill-0", 1)
        await alone(suite, "decode", "decode-0", 1)
        before = await store.info()
        again = await answers_rightly(suite, tiny_model, prompt)
        assert (again.path, again.cached_tokens) == ("split", 192)
        assert (await store.info()).hits == before.hits + 1
        longer = prompt + prompt_of(100, seed=4)
        assert (await answers_rightly(suite, tiny_model, longer)).cached_tokens == 192
        local = await answers_rightly(suite, tiny_model, short)
        assert (local.path, local.cached_tokens) == ("local", 48)
        # One for each: of the longer prompt, too, the store had the beginning.
        assert (await store.info()).hits == before.hits + 3
        # Another salt is another tenant: it gets nothing of this one's.
        salted = await ask(suite, prompt, cache_salt="another tenant's")
        assert (salted.error, salted.cached_tokens) == (None, 0)
        assert salted.token_ids == right_answer(tiny_model, prompt, 8)
        await at_rest(suite, stubs)

        # Blocks of one model are never another's, not even asked for by their hashes.
        value = wire.identity_from_proto(store.identity)
        hashes = chain(store.identity, prompt)
        for changed in ({"weights_digest": "sha256:0"}, {"numerics": "native-0"}):
            stranger = wire.identity_to_proto(replace(value, **changed))
            assert await lookup(stubs, store.address, stranger, store.layout, hashes) == 0
        assert await lookup(stubs, store.address, store.identity, with_fields(store.layout, block_size=32), hashes) == 0
        false = kv_store_service_pb2.LookupPrefixRequest(
            identity=with_fields(store.identity, dtype="bfloat16"), layout=store.layout, block_hashes=hashes
        )
        refusal = await refusal_of(stubs.store(store.address).LookupPrefix(false, timeout=5))
        assert refusal.kind is FingerprintMismatchError

        # Nor when a worker of the other model serves the same name and the same prompt.
        await suite.start_worker("decode", 2, model=str(other_model))
        await suite.stop("decode-1")
        await suite.stop("prefill-1")

        async def by_the_other() -> Outcome | None:
            outcome = await ask(suite, prompt)
            return outcome if outcome.decision.startswith("local on decode-2") else None

        outcome: Outcome = await eventually(by_the_other, 10, "the other model answers")
        assert outcome.token_ids == right_answer(other_model, prompt, 8) != right_answer(tiny_model, prompt, 8)
        assert errors_logged(suite) == []


async def test_the_store_keeps_its_limit_and_may_be_lost(tiny_model: Path) -> None:
    limit_blocks = (1 << 20) // 4096
    room = limit_blocks // 12  # prompts
    async with Suite(tiny_model, mode="colocated", store_mib=1, kv_cache_mib=1) as suite, Wire() as stubs:
        store = await Store.of(suite, stubs)
        prompts = [prompt_of(200, seed) for seed in range(2 * room + 2)]
        for start in range(0, len(prompts), 4):
            group = prompts[start : start + 4]
            await asyncio.gather(*(answers_rightly(suite, tiny_model, prompt) for prompt in group))
            for prompt in group:
                await store.until_it_has(prompt)
        info = await store.info()
        assert 0.8 * limit_blocks < info.blocks <= limit_blocks
        assert info.evicted == len(prompts) * 12 - info.blocks
        # The ones used last are there in full; the ones used longest ago are gone.
        assert [await store.has(prompt) for prompt in prompts[1 - room :]] == [12] * (room - 1)
        assert [await store.has(prompt) for prompt in prompts[:room]] == [0] * room
        # Using a prefix keeps it: it is looked up while others come.
        kept = prompts[1 - room]
        for seed in range(100, 106):
            assert await store.has(kept) == 12
            await answers_rightly(suite, tiny_model, prompt_of(200, seed))
            await store.until_it_has(prompt_of(200, seed))
        assert await store.has(kept) == 12
        assert await store.has(prompts[2 - room]) < 12
        await at_rest(suite, stubs)

        # Killed under load: nobody but the store notices.
        async with running(_load(suite, tiny_model, 200, 16)) as load:
            await asyncio.sleep(0.2)
            suite.kill("kvstore-0")
            await load
            load.result()
        await at_rest(suite, stubs, without=["kvstore-0"])
        await answers_rightly(suite, tiny_model, prompt_of(200, seed=300))
        await suite.restart("kvstore-0")
        assert (await store.info()).blocks == 0
        prompt = prompt_of(200, seed=301)

        async def written_again() -> bool:
            # The worker's connection comes back within a second; until then blocks are simply not stored.
            fresh = prompt_of(200, seed=int(asyncio.get_running_loop().time() * 1000))
            await answers_rightly(suite, tiny_model, fresh)
            return (await store.info()).blocks > 0

        await eventually(written_again, 15, "the store is used again")
        await answers_rightly(suite, tiny_model, prompt)
        await store.until_it_has(prompt)
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def _load(suite: Suite, model: Path, first_seed: int, count: int) -> None:
    """Requests, four at a time; raises for the first that is not answered rightly."""
    for start in range(first_seed, first_seed + count, 4):
        await asyncio.gather(*(answers_rightly(suite, model, prompt_of(200, seed)) for seed in range(start, start + 4)))
