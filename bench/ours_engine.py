"""kvrelay's whole engine in one process: runner thread, scheduler, sampler, text and events, as a worker has it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence

import torch

from bench.cells import Cell
from bench.ours import settings_for
from bench.subject import NotMeasured, Setup, random_prompt, serve
from kvrelay.values import StopConditions
from services.engine.api import EngineRequest, TokenDrawn
from services.engine.engine import Engine

BUDGET = 4096
"""Tokens of a step: prompts are computed whole, as the peers are told to."""


class WholeEngine:
    """One `Engine` on an event loop that runs only while a cell does."""

    def __init__(self, setup: Setup) -> None:
        self._loop = asyncio.Runner()
        self._engine = self._loop.run(Engine.start(settings_for(setup, max_num_batched_tokens=BUDGET)))
        self._ids = itertools.count()

    def close(self) -> None:
        """Ends the engine's thread; a process of its own need not."""
        self._loop.run(self._engine.stop())
        self._loop.close()

    def versions(self) -> Mapping[str, str]:
        return {"torch": torch.__version__, "settings": f"budget {BUDGET} tokens, prefix caching"}

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            return sum(self._loop.run(self._prefill(cell.prompt)) for _ in range(cell.prompts))
        if cell.phase == "decode":
            return self._loop.run(self._decode(cell))
        raise NotMeasured("measured by bench.chunk_budget")

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        return [token_id for token_id, _ in self._loop.run(self._answer(token_ids, count))]

    async def _prefill(self, length: int) -> float:
        prompt = random_prompt(1_000_000 + next(self._ids), length, self._engine.vocab_size)
        started = time.perf_counter()
        await self._answer(prompt, 1)
        return time.perf_counter() - started

    async def _decode(self, cell: Cell) -> float:
        """The same prompts every time: from the second run on their prefix is cached, and all begin in one step."""
        prompts = [random_prompt(number, cell.context, self._engine.vocab_size) for number in range(cell.batch)]
        async with asyncio.TaskGroup() as group:
            answers = [group.create_task(self._answer(prompt, cell.steps + 1)) for prompt in prompts]
        last_to_begin = max((answer.result() for answer in answers), key=lambda answer: answer[0][1])
        return (last_to_begin[-1][1] - last_to_begin[0][1]) / 1e9

    async def _answer(self, token_ids: Sequence[int], count: int) -> list[tuple[int, int]]:
        """(token id, nanoseconds at which it was drawn) of each token."""
        stop = StopConditions(max_tokens=count, ignore_eos=True)
        async with self._engine.open(EngineRequest(str(next(self._ids)), token_ids, stop=stop)) as stream:
            return [(event.token.token_id, event.at_ns) async for event in stream if isinstance(event, TokenDrawn)]


if __name__ == "__main__":
    serve(WholeEngine)
