"""Long prompts arrive at an engine whose decodes are under way: what the prompts wait for, and what the decodes suffer."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from bench.machine import Disturbance, Quiet
from bench.subject import random_prompt
from kvrelay.values import StopConditions
from services.engine.api import EngineRequest, EngineStream, TokenDrawn
from services.engine.engine import Engine
from services.engine.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Load:
    """The same for every configuration of a sweep."""

    decodes: int
    """Sequences that decode all the time."""
    context: int
    """Their prompts' tokens."""
    prompt: int
    """Tokens of each arriving prompt."""
    prompts: int
    """How many arrive, each when the one before has its first token and the decodes have drawn `pause` more."""
    pause: int = 8
    quiet: int = 24
    """Tokens of each decode before the first arrival: what it is like without prompts."""


@dataclass(frozen=True, slots=True)
class Suffered:
    """What one configuration did, milliseconds."""

    quiet_itl: Sequence[float]
    """Gaps between tokens before any prompt arrived."""
    itl: Sequence[float]
    """Gaps that lie, at least in part, between a prompt's arrival and its first token."""
    ttft: Sequence[float]
    """Of each prompt."""
    disturbance: Disturbance


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * round(share * 1000) // 1000) - 1)]


def gaps_within(times_ns: Sequence[int], windows: Sequence[tuple[int, int]]) -> list[float]:
    """Milliseconds between neighbouring times, of those pairs that overlap one of the windows."""
    return [
        (after - before) / 1e6
        for before, after in itertools.pairwise(times_ns)
        if any(before < end and after > start for start, end in windows)
    ]


async def suffer(settings: EngineSettings, load: Load, cpus: Sequence[int]) -> Suffered:
    """Starts an engine and loads it. One prompt and a few tokens go before, not counted. Raises what `Engine.start` raises."""
    engine = await Engine.start(settings)
    try:
        return await _Bench(engine, load).run(cpus)
    finally:
        await engine.stop()


class _Bench:
    """One engine under load."""

    def __init__(self, engine: Engine, load: Load) -> None:
        self._engine = engine
        self._load = load
        self._seeds = itertools.count()
        self._drawn: list[list[int]] = [[] for _ in range(load.decodes)]
        """When each decode drew each of its tokens."""
        self._progress = asyncio.Event()

    async def run(self, cpus: Sequence[int]) -> Suffered:
        load = self._load
        tokens = self._engine.max_context_tokens - load.context
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            streams = [await stack.enter_async_context(self._engine.open(self._request(load.context, tokens))) for _ in self._drawn]
            tasks = [group.create_task(self._follow(stream, drawn)) for stream, drawn in zip(streams, self._drawn, strict=True)]
            await self._first_token()
            await self._drawn_by_all(load.pause)
            watch, used = Quiet(cpus), time.process_time()
            quiet_from = time.time_ns()
            await self._drawn_by_all(load.quiet)
            quiet_until = time.time_ns()
            windows = []
            for _ in range(load.prompts):
                windows.append(await self._first_token())
                await self._drawn_by_all(load.pause)
            disturbance = watch.end(time.process_time() - used)
            for task in tasks:
                task.cancel()
        return Suffered(
            quiet_itl=self._gaps([(quiet_from, quiet_until)]),
            itl=self._gaps(windows),
            ttft=[(end - start) / 1e6 for start, end in windows],
            disturbance=disturbance,
        )

    def _request(self, prompt: int, max_tokens: int) -> EngineRequest:
        seed = next(self._seeds)
        stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
        return EngineRequest(str(seed), random_prompt(seed, prompt, self._engine.vocab_size), stop=stop)

    async def _follow(self, stream: EngineStream, drawn: list[int]) -> None:
        async for event in stream:
            if isinstance(event, TokenDrawn):
                drawn.append(event.at_ns)
                self._progress.set()

    async def _drawn_by_all(self, more: int) -> None:
        """Returns when every decode has drawn so many more tokens."""
        wanted = [len(drawn) + more for drawn in self._drawn]
        while any(len(drawn) < count for drawn, count in zip(self._drawn, wanted, strict=True)):
            self._progress.clear()
            await self._progress.wait()

    async def _first_token(self) -> tuple[int, int]:
        """When a fresh prompt arrived, and when its first token was drawn."""
        request = self._request(self._load.prompt, 1)
        arrived = time.time_ns()
        async with self._engine.open(request) as stream:
            drawn = [event.at_ns async for event in stream if isinstance(event, TokenDrawn)]
        return arrived, drawn[0]

    def _gaps(self, windows: Sequence[tuple[int, int]]) -> list[float]:
        return [gap for drawn in self._drawn for gap in gaps_within(drawn, windows)]
