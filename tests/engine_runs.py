"""Runs prompts through the real model in the many ways a serving suite may: in chunks, in batches, over shuffled pages."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, ModelOptions
from services.engine.model.native.build import COMPILERS

MODES = {
    "float32": ModelOptions(torch.float32, torch.float32),
    "bfloat16": ModelOptions(),
    "int8": ModelOptions(quantization="int8"),
}
"""What a model is kept in; the answers of each must keep their bits."""

_NO_COMPILER = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="native kernels need a C++ compiler")
KERNELS = [pytest.param("native", marks=_NO_COMPILER), "torch"]
"""What computes it."""


def options(mode: str, kernels: str) -> ModelOptions:
    """For `MODES` and `KERNELS`."""
    return replace(MODES[mode], kernels=kernels)


@dataclass(slots=True)
class PagedSequence:
    """One prompt, its pages, and how far it is computed."""

    token_ids: list[int]
    pages: list[int]
    done: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Logits after the token at a position, where a chunk ended."""


class PagedRun:
    """A model and a pool of its own, whose pages are handed out in a shuffled order."""

    def __init__(self, model: LlamaModel, *, num_pages: int = 256, page_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.pool = KvPool(model.config, num_pages, page_size, model.options.kv_dtype)
        self._free = list(range(num_pages))
        random.Random(seed).shuffle(self._free)

    def begin(self, token_ids: Sequence[int], *, room: int = 0) -> PagedSequence:
        """Takes pages for a prompt and `room` more tokens."""
        count = -(-(len(token_ids) + room) // self.pool.page_size)
        pages, self._free = self._free[:count], self._free[count:]
        assert len(pages) == count, "the test's pool is too small"
        return PagedSequence(list(token_ids), pages)

    def free(self, sequence: PagedSequence) -> None:
        self._free = [*sequence.pages, *self._free]

    def step(self, work: Sequence[tuple[PagedSequence, int]]) -> None:
        """One forward call: the next `count` tokens of each sequence, all with logits."""
        entries = [
            ForwardEntry(sequence.token_ids[sequence.done : sequence.done + count], sequence.done, sequence.pages, sample=True)
            for sequence, count in work
        ]
        logits = self.model.forward(entries, self.pool)
        assert logits.shape == (len(entries), self.model.config.vocab_size) and logits.dtype == torch.float32
        for (sequence, count), row in zip(work, logits, strict=True):
            sequence.done += count
            sequence.logits[sequence.done - 1] = row

    def prefill(self, token_ids: Sequence[int], chunks: Sequence[int] = (), *, room: int = 0) -> PagedSequence:
        """Computes a prompt alone, in the given chunk sizes, the last of them repeated as needed."""
        sequence = self.begin(token_ids, room=room)
        sizes = [*chunks] or [len(token_ids)]
        while sequence.done < len(token_ids):
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            self.step([(sequence, min(size, len(token_ids) - sequence.done))])
        return sequence

    def kv_bytes(self, sequence: PagedSequence) -> list[bytes]:
        """The bytes of the pages that hold the sequence's computed tokens."""
        used = -(-sequence.done // self.pool.page_size)
        return [bytes(self.pool.page_view(page)) for page in sequence.pages[:used]]

    def greedy(self, sequence: PagedSequence, count: int) -> list[int]:
        """Decodes `count` tokens, the likeliest each; the last is not fed back."""
        answer: list[int] = []
        for number in range(count):
            if number:
                self.step([(sequence, 1)])
            answer.append(int(sequence.logits[sequence.done - 1].argmax()))
            sequence.token_ids.append(answer[-1])
        return answer


def random_ids(count: int, vocab_size: int, seed: int) -> list[int]:
    """Reproducible token ids."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]
