"""Handles against real processes: single-use, leased, fenced by life, bound to content. Whatever is wrong with one has its own error."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import google_crc32c
import grpc
import pytest
import pytest_asyncio

from kvrelay import wire
from kvrelay.errors import (
    FingerprintMismatchError,
    HandleConsumedError,
    HandleForgedError,
    InvalidRequestError,
    KvAbortedError,
    KvNotFoundError,
    KvRelayError,
    KvTransferError,
    LayoutMismatchError,
    LeaseExpiredError,
    PromptMismatchError,
    StaleIncarnationError,
)
from kvrelay.inference.v1 import decode_service_pb2, prefill_service_pb2
from kvrelay.kv.v1 import handle_pb2, transfer_service_pb2
from tests.integration.suite.fault_kit import (
    SLOW,
    Wire,
    at_rest,
    errors_logged,
    handle_from,
    job_for,
    ledger,
    prompt_of,
    pull_request,
    read_until,
    refusal_of,
    right_answer,
    with_fields,
)
from tests.suite import Suite

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_S = 2.5
PROMPT = prompt_of(100, seed=1)
"""Six full blocks and a part of a seventh."""
OTHER_PROMPT = prompt_of(100, seed=2)


@dataclass(frozen=True, slots=True)
class World:
    suite: Suite
    stubs: Wire
    model: Path
    identity: handle_pb2.ModelIdentity
    layout: handle_pb2.KvLayout

    @property
    def prefill(self) -> str:
        return self.suite.address_of("prefill-0")

    @property
    def decode(self) -> str:
        return self.suite.address_of("decode-0")

    async def handle(self, prompt: list[int] = PROMPT) -> handle_pb2.KvHandle:
        return await handle_from(self.stubs, self.prefill, job_for(self.identity, prompt))

    def pull(self, handle: handle_pb2.KvHandle, **changed: Any) -> Any:
        request = pull_request(handle, self.identity, self.layout, **changed)
        return self.stubs.transfer(self.prefill).PullKv(request, timeout=20)

    def decoding(self, handle: handle_pb2.KvHandle, prompt: list[int] = PROMPT) -> Any:
        job = job_for(self.identity, prompt)
        return self.stubs.decode(self.decode).Decode(decode_service_pb2.DecodeRequest(job=job, handle=handle), timeout=20)

    async def at_rest(self) -> None:
        """Nobody pulls a refused handle: its lease has to run out."""
        await at_rest(self.suite, self.stubs, LEASE_S + 5)


async def world_of(suite: Suite, stubs: Wire, model: Path) -> World:
    info = await ledger(stubs, suite.address_of("prefill-0"))
    return World(suite, stubs, model, info.worker.identity, info.worker.layout)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tiny_model: Path) -> AsyncIterator[World]:
    async with Suite(tiny_model, store=False, mode="split", lease_ttl_s=LEASE_S) as suite, Wire() as stubs:
        yield await world_of(suite, stubs, tiny_model)
        assert errors_logged(suite) == []


async def take(call: Any) -> tuple[int, int]:
    """Reads an honest pull to its end and checks every byte; (bytes, first token)."""
    got = await read_until(call, "end")
    assert await call.read() is grpc.aio.EOF
    size, data, header = 0, b"", None
    for message in got:
        if message.WhichOneof("event") == "chunk":
            assert message.chunk.offset == len(data)
            data += message.chunk.data
            continue
        if header is not None:
            assert (len(data), google_crc32c.value(data)) == (header.size_bytes, header.crc32c)
            size += len(data)
        data, header = b"", message.segment.segment if message.WhichOneof("event") == "segment" else None
    return size, got[-1].end.first_token_id


def other_model(identity: handle_pb2.ModelIdentity) -> handle_pb2.ModelIdentity:
    """Another model's identity, its fingerprint right."""
    value = wire.identity_from_proto(identity)
    return wire.identity_to_proto(replace(value, weights_digest="sha256:" + "0" * 64))


async def test_an_honest_pull_takes_every_byte_once(world: World) -> None:
    handle = await world.handle()
    size, first_token = await take(world.pull(handle))
    blocks = -(-len(PROMPT) // world.layout.block_size)
    assert size == blocks * wire.layout_from_proto(world.layout).block_bytes
    assert first_token == right_answer(world.model, PROMPT, 1)[0]
    refusal = await refusal_of(world.pull(handle))
    assert (refusal.kind, refusal.code) == (HandleConsumedError, grpc.StatusCode.FAILED_PRECONDITION)
    assert refusal.error.fields["handle"] == handle.name
    await at_rest(world.suite, world.stubs)


@pytest.mark.parametrize(
    ("what", "changed", "kind", "code"),
    [
        ("another name", lambda w: {"name": "kvHandles/" + "0" * 32}, KvNotFoundError, "NOT_FOUND"),
        ("no name", lambda w: {"name": ""}, KvNotFoundError, "NOT_FOUND"),
        ("a guessed secret", lambda w: {"lease_id": "0" * 32}, HandleForgedError, "PERMISSION_DENIED"),
        ("no secret", lambda w: {"lease_id": ""}, HandleForgedError, "PERMISSION_DENIED"),
        ("a secret that is no ASCII", lambda w: {"lease_id": "ключ"}, HandleForgedError, "PERMISSION_DENIED"),
        ("another life", lambda w: {"incarnation": 7}, StaleIncarnationError, "ABORTED"),
        ("no life", lambda w: {"incarnation": 0}, StaleIncarnationError, "ABORTED"),
        ("another prompt", lambda w: {"prompt_digest": bytes(32)}, PromptMismatchError, "FAILED_PRECONDITION"),
        ("no prompt", lambda w: {"prompt_digest": b""}, PromptMismatchError, "FAILED_PRECONDITION"),
        ("another model", lambda w: {"identity": other_model(w.identity)}, FingerprintMismatchError, "FAILED_PRECONDITION"),
        ("a false fingerprint", lambda w: {"identity__dtype": "bfloat16"}, FingerprintMismatchError, "FAILED_PRECONDITION"),
        ("another block size", lambda w: {"layout__block_size": 32}, LayoutMismatchError, "FAILED_PRECONDITION"),
        ("no layout", lambda w: {"layout": handle_pb2.KvLayout()}, LayoutMismatchError, "FAILED_PRECONDITION"),
        ("a block beyond the end", lambda w: {"first_block": 8}, InvalidRequestError, "INVALID_ARGUMENT"),
        ("a block far beyond", lambda w: {"first_block": 2**32 - 1}, InvalidRequestError, "INVALID_ARGUMENT"),
    ],
)
async def test_a_pull_with_something_wrong_is_refused_and_uses_nothing_up(
    world: World, what: str, changed: Callable[[World], dict[str, Any]], kind: type[KvRelayError], code: str
) -> None:
    handle = await world.handle()
    refusal = await refusal_of(world.pull(handle, **changed(world)))
    assert (refusal.kind, refusal.code.name) == (kind, code), refusal.error
    _, first_token = await take(world.pull(handle))
    assert first_token == right_answer(world.model, PROMPT, 1)[0]
    await at_rest(world.suite, world.stubs)


async def test_both_values_are_named_where_models_or_layouts_differ(world: World) -> None:
    handle = await world.handle()
    refusal = await refusal_of(world.pull(handle, layout__block_size=32))
    assert refusal.error.fields["block_size"] == "16 != 32"
    refusal = await refusal_of(world.pull(handle, identity=other_model(world.identity)))
    assert refusal.error.fields["weights_digest"] == f"{world.identity.weights_digest} != sha256:{'0' * 64}"
    await take(world.pull(handle))


async def test_a_handle_of_another_prompt_gives_nothing(world: World) -> None:
    handle, other = await world.handle(), await world.handle(OTHER_PROMPT)
    refusal = await refusal_of(world.pull(handle, prompt_digest=other.prompt_digest))
    assert refusal.kind is PromptMismatchError
    refusal = await refusal_of(world.pull(handle, name=other.name))
    assert refusal.kind is HandleForgedError
    await take(world.pull(handle))
    await take(world.pull(other))
    await at_rest(world.suite, world.stubs)


async def test_a_lease_that_ran_out_is_refused_by_that_name_and_its_pages_are_free(world: World) -> None:
    handle = await world.handle()
    held = await ledger(world.stubs, world.prefill)
    assert (held.worker.load.held_handles, held.held_pages) == (1, 7)
    await world.at_rest()
    for _ in range(2):
        refusal = await refusal_of(world.pull(handle))
        assert (refusal.kind, refusal.code) == (LeaseExpiredError, grpc.StatusCode.NOT_FOUND)
    refusal = await refusal_of(world.decoding(handle))
    assert refusal.kind is LeaseExpiredError
    await at_rest(world.suite, world.stubs)


async def test_a_renewed_lease_lives_on_and_only_the_secret_renews_or_ends_it(world: World) -> None:
    handle, stub = await world.handle(), world.stubs.transfer(world.prefill)
    renewals = [
        transfer_service_pb2.LeaseRenewal(name=handle.name, lease_id=lease_id) for lease_id in (handle.lease.lease_id, "0" * 32)
    ] + [transfer_service_pb2.LeaseRenewal(name="kvHandles/none", lease_id=handle.lease.lease_id)]
    for _ in range(4):
        await asyncio.sleep(LEASE_S / 3)
        response = await stub.RenewLeases(transfer_service_pb2.RenewLeasesRequest(renewals=renewals), timeout=5)
        assert [result.renewed for result in response.results] == [True, False, False]
    refusal = await refusal_of(stub.ReleaseKv(transfer_service_pb2.ReleaseKvRequest(name=handle.name, lease_id="0" * 32), timeout=5))
    assert refusal.kind is HandleForgedError
    await take(world.pull(handle))
    release = transfer_service_pb2.ReleaseKvRequest(name=handle.name, lease_id=handle.lease.lease_id)
    for _ in range(2):
        await stub.ReleaseKv(release, timeout=5)
    await at_rest(world.suite, world.stubs)


async def test_a_released_handle_is_over(world: World) -> None:
    handle = await world.handle()
    release = transfer_service_pb2.ReleaseKvRequest(name=handle.name, lease_id=handle.lease.lease_id)
    await world.stubs.transfer(world.prefill).ReleaseKv(release, timeout=5)
    assert (await refusal_of(world.pull(handle))).kind is HandleConsumedError
    assert (await refusal_of(world.decoding(handle))).kind is HandleConsumedError
    await at_rest(world.suite, world.stubs)


async def test_a_second_pull_is_refused_while_the_first_goes_on(world: World) -> None:
    prompt = prompt_of(3000, seed=3)
    job = job_for(world.identity, prompt)
    prefilling = world.stubs.prefill(world.prefill).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=30)
    handle = (await read_until(prefilling, "accepted"))[-1].accepted.handle
    assert handle.state == handle_pb2.HANDLE_STATE_WRITING
    first = world.pull(handle)
    await first.read()
    assert (await refusal_of(world.pull(handle))).kind is HandleConsumedError
    await read_until(first, "end")
    await read_until(prefilling, "done")
    await at_rest(world.suite, world.stubs)


async def test_a_cancelled_prefill_ends_its_handle_and_whoever_pulls_it(world: World) -> None:
    job = job_for(world.identity, prompt_of(4000, seed=4))
    prefilling = world.stubs.prefill(world.prefill).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=30)
    handle = (await read_until(prefilling, "accepted"))[-1].accepted.handle
    pulling = world.pull(handle)
    await pulling.read()
    prefilling.cancel()
    assert (await refusal_of(pulling)).kind is KvAbortedError
    assert (await refusal_of(world.pull(handle))).kind in (KvAbortedError, HandleConsumedError)
    await at_rest(world.suite, world.stubs)


@pytest.mark.parametrize(
    ("what", "changed", "prompt", "kind"),
    [
        ("another name", lambda w: {"name": "kvHandles/" + "0" * 32}, PROMPT, KvNotFoundError),
        ("a name nobody gives out", lambda w: {"name": "kvHandles/../0"}, PROMPT, HandleForgedError),
        ("a guessed secret", lambda w: {"lease__lease_id": "0" * 32}, PROMPT, HandleForgedError),
        ("another life", lambda w: {"incarnation": 7}, PROMPT, StaleIncarnationError),
        ("another prompt", lambda w: {}, OTHER_PROMPT, PromptMismatchError),
        ("a shorter prompt", lambda w: {}, PROMPT[:-1], PromptMismatchError),
        ("another digest", lambda w: {"prompt_digest": bytes(32)}, PROMPT, PromptMismatchError),
        ("another model", lambda w: {"identity": other_model(w.identity)}, PROMPT, FingerprintMismatchError),
        ("another block size", lambda w: {"layout__block_size": 8}, PROMPT, LayoutMismatchError),
        ("another number of layers", lambda w: {"layout__layers": 3}, PROMPT, LayoutMismatchError),
        ("other blocks", lambda w: {"block_hashes": [bytes(32)] * 6}, PROMPT, HandleForgedError),
        ("fewer blocks", lambda w: {"block_hashes": []}, PROMPT, HandleForgedError),
        ("another end", lambda w: {"token_end": 101}, PROMPT, HandleForgedError),
        ("an end in another block", lambda w: {"token_end": 200}, PROMPT, HandleForgedError),
        ("another start", lambda w: {"token_start": 16}, PROMPT, HandleForgedError),
        ("no secret", lambda w: {"lease": handle_pb2.Lease()}, PROMPT, HandleForgedError),
        ("no place", lambda w: {"locations": []}, PROMPT, KvTransferError),
        ("a place where nobody is", lambda w: {"locations": [at("127.0.0.1:1")]}, PROMPT, KvTransferError),
        ("a place that is none", lambda w: {"locations": [at("")]}, PROMPT, HandleForgedError),
        ("a place that holds no KV", lambda w: {"locations": [at(w.decode)]}, PROMPT, KvTransferError),
    ],
)
async def test_a_decode_given_a_handle_with_something_wrong_refuses_and_leaks_nothing(
    world: World, what: str, changed: Callable[[World], dict[str, Any]], prompt: list[int], kind: type[KvRelayError]
) -> None:
    handle = await world.handle()
    refusal = await refusal_of(world.decoding(with_fields(handle, **changed(world)), prompt))
    assert refusal.kind is kind, refusal.error
    assert refusal.code.name == refusal.error.code
    # The decode worker lets go at once; where it could not reach the holder, the lease has to run out.
    await at_rest(world.suite, world.stubs, without=["prefill-0"])
    release = transfer_service_pb2.ReleaseKvRequest(name=handle.name, lease_id=handle.lease.lease_id)
    await world.stubs.transfer(world.prefill).ReleaseKv(release, timeout=5)
    await at_rest(world.suite, world.stubs)


async def test_a_decode_uses_a_handle_up(world: World) -> None:
    handle = await world.handle()
    call = world.decoding(handle)
    tokens = [m.token.token_id for m in await read_until(call, "done") if m.WhichOneof("event") == "token"]
    assert tokens == list(right_answer(world.model, PROMPT, 8)[1:])
    assert (await refusal_of(world.decoding(handle))).kind is HandleConsumedError
    assert (await refusal_of(world.pull(handle))).kind is HandleConsumedError
    await at_rest(world.suite, world.stubs)


def at(address: str) -> handle_pb2.KvLocation:
    return handle_pb2.KvLocation(peer=handle_pb2.PeerLocation(address=address))


async def test_handles_of_an_earlier_life_are_refused_by_the_next(tiny_model: Path) -> None:
    async with Suite(tiny_model, store=False, mode="split", lease_ttl_s=60.0, **SLOW) as suite, Wire() as stubs:
        world = await world_of(suite, stubs, tiny_model)
        committed = await world.handle()
        job = job_for(world.identity, prompt_of(3000, seed=5))
        prefilling = stubs.prefill(world.prefill).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=30)
        writing = (await read_until(prefilling, "accepted"))[-1].accepted.handle
        pulling = world.pull(writing)
        await pulling.read()
        address = world.prefill
        suite.kill("prefill-0")
        await refusal_of(pulling)
        await refusal_of(prefilling)
        await suite.supervisor.child("prefill-0").wait()

        # The same name at the same place: only the life differs.
        spec = suite.spec("prefill-0")
        port = address.rpartition(":")[2]
        flags = tuple(f"--port={port}" if flag.startswith("--port=") else flag for flag in spec.flags)
        await suite.supervisor.start([replace(spec, flags=flags)])
        assert world.prefill == address
        for handle in (committed, writing):
            refusal = await refusal_of(world.pull(handle))
            assert (refusal.kind, refusal.code) == (StaleIncarnationError, grpc.StatusCode.ABORTED)
            assert refusal.error.fields["handle_incarnation"] == str(handle.incarnation)
            assert refusal.error.fields["holder_incarnation"] > str(handle.incarnation)
        assert (await refusal_of(world.decoding(committed))).kind is StaleIncarnationError
        handle = await world.handle()
        await take(world.pull(handle))
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []
