"""Measures on this machine whether a decoder gives a token the same bits whatever it is computed with: chunks, company, earlier prefill."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from services.engine.model.config import ModelConfig, ModelFamily, RopeConfig
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, ModelOptions
from services.engine.model.weights import random_weights

LENGTHS = (1, 2, 15, 17, 33, 130, 530)
QUICK_LENGTHS = (2, 33, 270)
"""Prompts for a check of a third of a second."""
_PAGE_SIZE = 16
_Cut = Callable[[int, int], int]
"""Tokens to compute next, of the number that is left and of the step."""


def _whole(left: int, step: int) -> int:
    return left


_CUTS: dict[str, _Cut] = {
    "whole": _whole,
    "in chunks of 64": lambda left, step: 64,
    "in uneven chunks": lambda left, step: (3, 17, 16, 128, 1, 45)[step % 6],
    "with the last 8 decoded": lambda left, step: max(1, left - 8),
}


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one prompt came to."""

    logits: torch.Tensor
    """`[vocab]`, after the last token."""
    kv: bytes


def probe_model(options: ModelOptions, *, head_dim: int = 64, seed: int = 0) -> LlamaModel:
    """A small random model (2 layers, 6 query and 2 KV heads) to try a decoder with."""
    config = ModelConfig(
        family=ModelFamily.LLAMA,
        layers=2,
        hidden_size=192,
        inner_size=320,
        query_heads=6,
        kv_heads=2,
        head_dim=head_dim,
        vocab_size=333,
        max_positions=1024,
        norm_epsilon=1e-5,
        rope=RopeConfig(10_000.0),
        tied=True,
        qkv_bias=False,
        output_bias=False,
        qk_norm=False,
        windows=(0, 0),
        eos_ids=(),
        bos_id=None,
        stored_dtype="",
    )
    return LlamaModel(config, random_weights(config, options.dtype, options.device, seed), options)


def violations(model: LlamaModel, *, lengths: Sequence[int] = LENGTHS, seed: int = 0) -> list[str]:
    """Runs prompts alone and together, whole and cut in several ways, and compares KV and logits bit for bit.

    Returns a line for each prompt that came out otherwise than alone and whole; empty when the decoder is exact. Blocks, about
    a second for a `probe_model`; needs torch to have one thread where it computes.
    """
    script = random.Random(seed)
    lengths = [length for length in lengths if length <= model.config.max_positions]
    prompts = [[script.randrange(model.config.vocab_size) for _ in range(length)] for length in lengths]
    expected = [_compute(model, [prompt], _whole, script)[0] for prompt in prompts]
    return [*_differences(model, prompts, expected, script)]


def _differences(model: LlamaModel, prompts: Sequence[list[int]], expected: Sequence[_Outcome], script: random.Random) -> Iterator[str]:
    for name, cut in _CUTS.items():
        alone = [_compute(model, [prompt], cut, script)[0] for prompt in prompts] if cut is not _whole else expected
        together = _compute(model, prompts, cut, script)
        for company, outcomes in (("alone", alone), ("together", together)):
            for prompt, wanted, found in zip(prompts, expected, outcomes, strict=True):
                parts = [
                    part for part, same in (("KV", wanted.kv == found.kv), ("logits", torch.equal(wanted.logits, found.logits))) if not same
                ]
                if parts:
                    yield f"{model.decoder.name}: {len(prompt)} tokens {company}, {name}: other {' and '.join(parts)}"


def _compute(model: LlamaModel, prompts: Sequence[list[int]], cut: _Cut, script: random.Random) -> list[_Outcome]:
    """Computes prompts side by side, each in pieces of `cut`, in pages in random order."""
    counts = [-(-len(prompt) // _PAGE_SIZE) for prompt in prompts]
    pool = KvPool(model.config, sum(counts), _PAGE_SIZE, model.options.kv_dtype, model.options.device)
    free = list(range(pool.num_pages))
    script.shuffle(free)
    tables = [[free.pop() for _ in range(count)] for count in counts]
    done, last = [0] * len(prompts), [torch.empty(0)] * len(prompts)
    step = 0
    while waiting := [index for index, prompt in enumerate(prompts) if done[index] < len(prompt)]:
        entries = []
        for index in waiting:
            left = prompts[index][done[index] :]
            entries.append(ForwardEntry(left[: cut(len(left), step)], done[index], tables[index], sample=True))
            done[index] = entries[-1].end
        for index, row in zip(waiting, model.forward(entries, pool), strict=True):
            last[index] = row
        step += 1
    pages = pool.data.view(pool.num_pages, -1).cpu()
    return [_Outcome(row.cpu(), pages[table].view(torch.uint8).numpy().tobytes()) for row, table in zip(last, tables, strict=True)]
