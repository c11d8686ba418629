"""What the end-to-end tests of faults share: raw stubs to every process, its page ledger, right answers, and typed refusals."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from kvrelay import wire
from kvrelay.errors import KvRelayError
from kvrelay.inference.v1 import (
    decode_service_pb2_grpc,
    generation_pb2,
    prefill_service_pb2,
    prefill_service_pb2_grpc,
    router_service_pb2_grpc,
    worker_service_pb2,
    worker_service_pb2_grpc,
)
from kvrelay.kv.v1 import handle_pb2, kv_store_service_pb2, kv_store_service_pb2_grpc, transfer_service_pb2, transfer_service_pb2_grpc
from services.engine.model.llama import ModelOptions, load_model
from tests.engine_runs import PagedRun
from tests.suite import Suite

SLOW: dict[str, Any] = {"max_num_batched_tokens": 2, "max_num_seqs": 2}
"""Worker settings that make prefill of a tiny model slow enough to be met in the middle."""
SHORT_WAIT_S = 8.0
"""Pages and leases are back within this, unless a lease has to run out first."""
POLL_S = 0.05

Message = TypeVar("Message")


# --- prompts and right answers -------------------------------------------------------------------------------------------------


def prompt_of(tokens: int, seed: int) -> list[int]:
    """Reproducible ids of ordinary tokens; different seeds share no block."""
    draw = random.Random(seed)
    return [draw.randrange(3, 299) for _ in range(tokens)]


@lru_cache(maxsize=16)
def _model(folder: Path, dtype: torch.dtype, kernels: str) -> Any:
    return load_model(folder, ModelOptions(dtype, kernels=kernels))


@lru_cache(maxsize=256)
def _greedy(folder: Path, dtype: torch.dtype, kernels: str, block_size: int, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    pages = -(-(len(prompt) + count) // block_size)
    run = PagedRun(_model(folder, dtype, kernels), num_pages=pages, page_size=block_size)
    return tuple(run.greedy(run.prefill(prompt, room=count), count))


def right_answer(
    folder: Path, prompt: Sequence[int], count: int, *, dtype: torch.dtype = torch.float32, kernels: str = "auto", block_size: int = 16
) -> tuple[int, ...]:
    """The greedy answer, end tokens ignored, computed here by the model alone: no suite, no cache, no hand-over."""
    return _greedy(folder, dtype, kernels, block_size, tuple(prompt), count)


# --- raw access to processes ---------------------------------------------------------------------------------------------------


class Wire:
    """Plain stubs to any process of a suite, without the SDK's checks. Close it with its context."""

    def __init__(self) -> None:
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Wire:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            options = [("grpc.max_receive_message_length", 64 << 20), ("grpc.max_send_message_length", 64 << 20)]
            self._channels[address] = grpc.aio.insecure_channel(address, options=options)
        return self._channels[address]

    def router(self, address: str) -> Any:
        return router_service_pb2_grpc.RouterServiceStub(self._channel(address))

    def prefill(self, address: str) -> Any:
        return prefill_service_pb2_grpc.PrefillServiceStub(self._channel(address))

    def decode(self, address: str) -> Any:
        return decode_service_pb2_grpc.DecodeServiceStub(self._channel(address))

    def transfer(self, address: str) -> Any:
        return transfer_service_pb2_grpc.KvTransferServiceStub(self._channel(address))

    def worker(self, address: str) -> Any:
        return worker_service_pb2_grpc.WorkerServiceStub(self._channel(address))

    def store(self, address: str) -> Any:
        return kv_store_service_pb2_grpc.KvStoreServiceStub(self._channel(address))


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a call failed."""

    error: KvRelayError
    code: grpc.StatusCode

    @property
    def kind(self) -> type[KvRelayError]:
        return type(self.error)


async def refusal_of(call: Any, timeout_s: float = 10.0) -> Refusal:
    """Reads a call (unary, or a stream to its end) that must fail, and how it did; AssertionError when it does not."""
    got: list[Any] = []
    try:
        async with asyncio.timeout(timeout_s):
            if hasattr(call, "read"):
                while (message := await call.read()) is not grpc.aio.EOF:
                    got.append(message)
            else:
                got.append(await call)
    except grpc.aio.AioRpcError as failure:
        return Refusal(wire.error_from_rpc(failure), failure.code())
    raise AssertionError(f"not refused: {[message.WhichOneof('event') if hasattr(message, 'WhichOneof') else message for message in got]}")


async def read_until(call: Any, event: str, timeout_s: float = 30.0) -> list[Any]:
    """The messages of a stream up to the first whose `event` is the named one."""
    got: list[Any] = []
    async with asyncio.timeout(timeout_s):
        while True:
            message = await call.read()
            assert message is not grpc.aio.EOF, f"ended before {event}: {[m.WhichOneof('event') for m in got]}"
            got.append(message)
            if message.WhichOneof("event") == event:
                return got


def job_for(
    identity: handle_pb2.ModelIdentity, prompt: Sequence[int], request_id: str = "raw", max_tokens: int = 8, **more: Any
) -> generation_pb2.WorkerJob:
    """A greedy job for a worker of that model."""
    return generation_pb2.WorkerJob(
        request_id=request_id,
        fingerprint=identity.fingerprint,
        prompt=generation_pb2.TokenIds(ids=prompt),
        sampling=generation_pb2.SamplingParams(seed=1),
        stop=generation_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True),
        **more,
    )


async def handle_from(stubs: Wire, address: str, job: generation_pb2.WorkerJob) -> handle_pb2.KvHandle:
    """A COMMITTED prompt's handle: the prefill stream is read to its end."""
    call = stubs.prefill(address).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=30)
    got = await read_until(call, "done")
    assert [message.WhichOneof("event") for message in got] == ["queued", "accepted", "first_token", "done"]
    assert await call.read() is grpc.aio.EOF
    handle: handle_pb2.KvHandle = got[1].accepted.handle
    return handle


def pull_request(
    handle: handle_pb2.KvHandle, identity: handle_pb2.ModelIdentity, layout: handle_pb2.KvLayout, /, **changed: Any
) -> transfer_service_pb2.PullKvRequest:
    """What an honest taker would send, but for `changed`."""
    request = transfer_service_pb2.PullKvRequest(
        name=handle.name,
        lease_id=handle.lease.lease_id,
        incarnation=handle.incarnation,
        identity=identity,
        layout=layout,
        prompt_digest=handle.prompt_digest,
    )
    return with_fields(request, **changed)


def with_fields(message: Message, /, **changed: Any) -> Message:
    """A copy of a message with fields replaced; `a__b` reaches into part `a`."""
    copy = type(message)()
    copy.CopyFrom(message)  # type: ignore[attr-defined]
    for path, value in changed.items():
        *parts, name = path.split("__")
        target: Any = copy
        for part in parts:
            target = getattr(target, part)
        if hasattr(value, "DESCRIPTOR"):
            getattr(target, name).CopyFrom(value)
        elif isinstance(value, list):
            target.ClearField(name)
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return copy


# --- ledgers -------------------------------------------------------------------------------------------------------------------


async def ledger(stubs: Wire, address: str) -> worker_service_pb2.GetWorkerInfoResponse:
    """What a worker says of itself; its pages always add up."""
    info: worker_service_pb2.GetWorkerInfoResponse
    info = await stubs.worker(address).GetWorkerInfo(worker_service_pb2.GetWorkerInfoRequest(), timeout=5)
    total = info.worker.load.total_pages
    assert info.free_pages + info.cached_pages + info.held_pages == total > 0, f"pages do not add up: {info}"
    return info


async def store_info(stubs: Wire, address: str) -> kv_store_service_pb2.GetStoreInfoResponse:
    info: kv_store_service_pb2.GetStoreInfoResponse
    info = await stubs.store(address).GetStoreInfo(kv_store_service_pb2.GetStoreInfoRequest(), timeout=5)
    assert info.used_bytes <= info.limit_bytes
    return info


async def at_rest(suite: Suite, stubs: Wire, within_s: float = SHORT_WAIT_S, *, without: Iterable[str] = ()) -> None:
    """Waits until no process holds anything for anybody; AssertionError, saying who holds what, when that takes longer.

    `without`: processes that are known to be dead or frozen.
    """
    gone = {*without, *(name for name in suite.names if suite.supervisor.child(name).returncode is not None)}
    names = [name for name in suite.names if name not in gone]
    deadline = asyncio.get_running_loop().time() + within_s
    while held := [what for name in names if (what := await _held(suite, stubs, name))]:
        assert asyncio.get_running_loop().time() < deadline, f"not at rest after {within_s} s: {'; '.join(held)}"
        await asyncio.sleep(POLL_S)


async def _held(suite: Suite, stubs: Wire, name: str) -> str:
    """What a process holds; '' for nothing."""
    if name.startswith("router"):
        fleet = await suite.client.fleet(timeout=5)
        return f"{name} has {fleet.in_flight} requests" if fleet.in_flight else ""
    address = suite.address_of(name)
    if name.startswith("kvstore"):
        info = await store_info(stubs, address)
        return f"{name} has {info.leases} leases" if info.leases else ""
    details = await ledger(stubs, address)
    load = details.worker.load
    busy = (load.running, load.waiting, load.held_handles, details.held_pages, load.prefill_backlog_tokens, load.decode_backlog_tokens)
    names = ("running", "waiting", "handles", "held pages", "prefill backlog", "decode backlog")
    return f"{name}: " + ", ".join(f"{n} {what}" for what, n in zip(names, busy, strict=True) if n) if any(busy) else ""


async def eventually(condition: Callable[[], Awaitable[Any]], within_s: float, what: str) -> Any:
    """Polls an async callable until its result is true, and returns that."""
    deadline = asyncio.get_running_loop().time() + within_s
    while not (result := await condition()):
        assert asyncio.get_running_loop().time() < deadline, f"not within {within_s} s: {what}"
        await asyncio.sleep(POLL_S)
    return result


async def in_the_middle(stubs: Wire, address: str, prompt_tokens: int, within_s: float = 20.0) -> None:
    """Returns while that worker computes a prompt: some of it done, some of it not."""

    async def begun() -> bool:
        load = (await ledger(stubs, address)).worker.load
        return 0 < load.prefill_backlog_tokens < 0.95 * prompt_tokens

    await eventually(begun, within_s, f"{address} computes a prompt")


# --- requests ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it: an answer, or exactly one typed error after some tokens."""

    token_ids: tuple[int, ...]
    error: KvRelayError | None
    path: str = ""
    decision: str = ""
    cached_tokens: int = 0


async def ask(suite: Suite, prompt: Sequence[int], max_tokens: int = 8, *, within_s: float = 60.0, **options: Any) -> Outcome:
    """A greedy request through the SDK, which must end within `within_s` seconds, one way or the other."""
    stream = suite.client.generate(token_ids=prompt, max_tokens=max_tokens, ignore_eos=True, **options)
    try:
        async with asyncio.timeout(within_s):
            completion = await stream.completion_or_raise()
    except KvRelayError as error:
        return Outcome(tuple(stream.token_ids), error)
    assert completion.usage.prompt_tokens == len(prompt)
    assert completion.usage.completion_tokens == len(stream.token_ids) == max_tokens
    return Outcome(tuple(stream.token_ids), None, completion.path, stream.decision, completion.usage.cached_tokens)


async def answers_rightly(suite: Suite, folder: Path, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Outcome:
    """Asks, and holds the answer against the right one."""
    outcome = await ask(suite, prompt, max_tokens, **options)
    assert outcome.error is None, f"{outcome.error!r} {outcome.error.fields}"
    assert outcome.token_ids == right_answer(folder, prompt, max_tokens)
    return outcome


@asynccontextmanager
async def running(work: Awaitable[Any]) -> AsyncIterator[asyncio.Task[Any]]:
    """Runs something beside the body; ended, at the latest, with it."""
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- logs ----------------------------------------------------------------------------------------------------------------------


def errors_logged(suite: Suite) -> list[str]:
    """Lines of level error in any log, and everything that is not a log line: tracebacks, warnings of the interpreter.

    Not what grpc's core only mentions (its lines begin with a letter for the level and the date): peers that went away.
    """
    found = []
    for name in suite.names:
        for line in suite.log(name).splitlines():
            try:
                level = json.loads(line)["level"]
            except (ValueError, KeyError, TypeError):
                level = "info" if re.match(r"[IW]\d{4} \d\d:", line) else "error"
            if level in ("error", "critical"):
                found.append(f"{name}: {line}")
    return found
