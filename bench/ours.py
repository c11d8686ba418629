"""kvrelay's model path: one `LlamaModel.forward` a step over the paged pool, without scheduler, sampler and text."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cells import Cell
from bench.subject import Setup, random_prompt, serve
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import load_model
from services.engine.settings import EngineSettings

PAGE = 16


def settings_for(setup: Setup, **others: Any) -> EngineSettings:
    """The engine's settings for a class of arithmetic."""
    quantized = setup.kind == "int8"
    return EngineSettings(
        Path(setup.model),
        dtype="bfloat16" if quantized else setup.kind,
        quantization="int8" if quantized else "none",
        kernels=setup.kernels,
        threads=setup.threads,
        block_size=PAGE,
        num_pages=-(-setup.room // PAGE),
        **others,
    )


class ModelPath:
    """Sequences are page tables: each run takes fresh pages from the start of the pool."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        settings = settings_for(setup)
        options = settings.check()
        self._model = load_model(settings.model_path, options)
        self._pool = KvPool(self._model.config, settings.num_pages, PAGE, options.kv_dtype)
        self._kept = 0
        """Sequences at the start of the pool whose first `context` tokens are computed."""
        self._context = 0
        self._options = options

    def versions(self) -> Mapping[str, str]:
        kv = str(self._options.kv_dtype).removeprefix("torch.")
        return {"torch": torch.__version__, "settings": f"{self._model.decoder.name} kernels, {kv} KV, pages of {PAGE}"}

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            prompts = [self._prompt(number, cell.prompt) for number in range(cell.prompts)]
            pages = self._pages(0, cell.prompt)
            self._kept = 0
            started = time.perf_counter()
            for prompt in prompts:
                self._model.forward([ForwardEntry(prompt, 0, pages, True)], self._pool)
            return time.perf_counter() - started
        tables = self._sequences(cell.batch, cell.context, cell.context + cell.steps)
        chunk_pages = self._pages(cell.batch, max(cell.prompt, cell.context + cell.steps))
        prompt = self._prompt(0, cell.prompt)
        tokens = [7] * cell.batch
        started = time.perf_counter()
        for position in range(cell.context, cell.context + cell.steps):
            entries = [ForwardEntry([token], position, pages, True) for token, pages in zip(tokens, tables, strict=True)]
            if prompt:
                entries.append(ForwardEntry(prompt, 0, chunk_pages, False))
            tokens = self._model.forward(entries, self._pool).numpy().argmax(-1).tolist()
        return time.perf_counter() - started

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        self._kept = 0
        pages = self._pages(0, len(token_ids) + count)
        answer: list[int] = []
        chunk, start = list(token_ids), 0
        while len(answer) < count:
            answer += self._model.forward([ForwardEntry(chunk, start, pages, True)], self._pool).numpy().argmax(-1).tolist()
            start, chunk = start + len(chunk), answer[-1:]
        return answer

    def _prompt(self, seed: int, length: int) -> list[int]:
        return random_prompt(seed, length, self._model.config.vocab_size)

    def _pages(self, number: int, length: int) -> list[int]:
        """Page table of the sequence with this number, if each takes `length` tokens."""
        count = -(-length // PAGE)
        return list(range(number * count, (number + 1) * count))

    def _sequences(self, batch: int, context: int, length: int) -> list[list[int]]:
        """Page tables of `batch` sequences with a computed context. It is one prompt's, copied: what is timed comes after it."""
        tables = [self._pages(number, length) for number in range(batch)]
        if (self._kept, self._context) != (batch, context):
            self._model.forward([ForwardEntry(self._prompt(0, context), 0, tables[0], False)], self._pool)
            for table in tables[1:]:
                self._pool.data[table] = self._pool.data[tables[0]]
            self._kept, self._context = batch, context
        return tables


if __name__ == "__main__":
    serve(ModelPath)
