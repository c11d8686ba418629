"""One fleet behind several routers, so that the same prompt can be sent down every path and the answers compared bit for bit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import kvrelay
from kvrelay.values import Completion, Token
from services.launcher.plan import router_processes
from services.runtime.addresses import reachable_here
from tests.suite import Suite

PATHS = ("split", "local", "colocated")
"""Doors of a `Fleet`: prefill and decode on two workers; both on the decode worker because the prompt is short enough (mode hybrid);
both there because the mode is colocated."""
NEVER_SPLIT = 1 << 20
PATIENCE_S = 100.0
POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    token_ids: Sequence[int]
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer as the client saw it."""

    tokens: tuple[Token, ...]
    """As streamed: ids, pieces of text, log probabilities."""
    completion: Completion
    trace_id: str

    @property
    def ids(self) -> list[int]:
        return [token.token_id for token in self.tokens]

    @property
    def text(self) -> str:
        return "".join(token.text for token in self.tokens)

    @property
    def said(self) -> tuple[object, ...]:
        """All that may not differ between two paths."""
        usage = self.completion.usage
        return self.tokens, self.completion.finish_reason, usage.prompt_tokens, usage.completion_tokens


async def see(client: kvrelay.AsyncClient, prompt: kvrelay.Prompt | Sequence[int], **options: Any) -> Seen:
    """Sends one request and reads it to the end."""
    async with asyncio.timeout(PATIENCE_S), client.generate(prompt, **options) as stream:
        tokens = [token async for token in stream]
    assert stream.completion is not None
    assert [token.index for token in tokens] == list(range(len(tokens)))
    assert stream.completion.usage.completion_tokens == len(tokens)
    return Seen(tuple(tokens), stream.completion, stream.completion.trace_id)


class Fleet:
    """A running `Suite` in mode split, with a router more for each other path. `client[path]` asks through one of them."""

    def __init__(self, suite: Suite, clients: dict[str, kvrelay.AsyncClient]) -> None:
        self.suite = suite
        self.client = clients

    async def all(self, path: str, asks: Iterable[Ask], *, together: int = 8, **options: Any) -> list[Seen]:
        """The answers in order, never more than `together` at once. `options` go with every request."""
        places = asyncio.Semaphore(together)

        async def one(ask: Ask) -> Seen:
            async with places:
                return await see(self.client[path], ask.token_ids, **{**options, **ask.options})

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(ask)) for ask in asks]
        return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def fleet(model: Path, paths: Sequence[str] = PATHS, **settings: Any) -> AsyncIterator[Fleet]:
    """Workers, store and a router for each path; usable in a fixture. The paths beside split are routers of their own."""
    async with kept(Suite(model, mode="split", **settings)) as suite, _clients(suite, paths) as clients:
        yield Fleet(suite, clients)


@contextlib.asynccontextmanager
async def fleet_of_models(
    workers: Mapping[str, Sequence[Mapping[str, Any]]], paths: Sequence[str], **settings: Any
) -> AsyncIterator[Fleet]:
    """A fleet of unlike workers: a role's list has the settings of each; the first decode worker is the suite's own."""
    own, *others = workers["decode"]
    async with kept(Suite(**{"mode": "hybrid", "prefill": 0, "split_threshold_tokens": 0, **settings, **own})) as suite:
        async with asyncio.TaskGroup() as group:
            for index, worker in enumerate(workers["prefill"]):
                group.create_task(suite.start_worker("prefill", index, **worker))
            for index, worker in enumerate(others, 1):
                group.create_task(suite.start_worker("decode", index, **worker))
        async with _clients(suite, paths) as clients:
            yield Fleet(suite, clients)


@contextlib.asynccontextmanager
async def kept(suite: Suite) -> AsyncIterator[Suite]:
    """`async with suite`, for fixtures: pytest enters and leaves those in two tasks, where a task group cannot live."""
    ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    leave = asyncio.Event()

    async def hold() -> None:
        try:
            async with suite:
                ready.set_result(None)
                await leave.wait()
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(error)

    task = asyncio.create_task(hold(), name="suite")
    try:
        await ready
        yield suite
    finally:
        leave.set()
        await task


@contextlib.asynccontextmanager
async def _clients(suite: Suite, paths: Sequence[str]) -> AsyncIterator[dict[str, kvrelay.AsyncClient]]:
    """A client for each path, with routers of their own for local and colocated; every worker is known to all of them."""
    specs = []
    for path in paths:
        if path != "split":
            mode = "hybrid" if path == "local" else path
            settings = replace(suite.settings, mode=mode, port=0, split_threshold_tokens=NEVER_SPLIT)
            (spec,) = router_processes(settings, suite.running.redis_url)
            specs.append(replace(spec, name=f"router-{path}"))
    ready = await suite.supervisor.start(specs)
    addresses = {spec.name.removeprefix("router-"): reachable_here(each.address) for spec, each in zip(specs, ready, strict=True)}
    workers = sum(suite.spec(name).role in ("prefill", "decode") for name in suite.names)
    async with contextlib.AsyncExitStack() as stack:
        clients = {path: await stack.enter_async_context(kvrelay.AsyncClient(address)) for path, address in addresses.items()}
        clients["split"] = suite.client
        for client in clients.values():
            await _sees(client, workers)
        yield clients


async def _sees(client: kvrelay.AsyncClient, workers: int) -> None:
    for _ in range(int(PATIENCE_S / POLL_S)):
        if sum(worker.role in ("prefill", "decode") for worker in (await client.fleet()).workers) >= workers:
            return
        await asyncio.sleep(POLL_S)
    raise TimeoutError(f"the router at {client.target} does not know all of {workers} workers")


def differences(wanted: Sequence[Seen], got: Sequence[Seen]) -> str:
    """Which answers differ, and from which token on; '' for none."""
    found = []
    for number, (one, other) in enumerate(zip(wanted, got, strict=True)):
        if one.said != other.said:
            at = next((i for i, (a, b) in enumerate(zip(one.tokens, other.tokens, strict=False)) if a != b), "the end")
            found.append(f"answer {number} ({one.completion.usage.prompt_tokens} prompt tokens) from {at}: {one.said} / {other.said}")
    return "\n".join(found)
