"""Rows keep their bits on the machine that runs this test: whole decoders, and each torch operator under `model.exactness`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from services.engine.checks.exactness import probe_model, violations
from services.engine.model.decoder import ForwardEntry
from services.engine.model.exactness import KEY_BLOCK, Rules, round_up, rules_for
from services.engine.model.kv_pool import KvPool
from services.engine.model.layers import linear
from services.engine.model.llama import load_model
from tests.engine_runs import KERNELS, MODES, options
from tests.tiny_models import write_tiny_model

RULES = rules_for(torch.device("cpu"))
LAX = dataclasses.replace(RULES, linear_rows=1, query_rows=1, key_tails=tuple(range(1, KEY_BLOCK + 1)))
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (128, 64), (256, 64), (64, 128), (300, 64))
"""Of SmolLM2 and of the tiny test models."""
HEADS = ((9, 3, 64), (4, 2, 16), (14, 2, 64), (8, 8, 128))
"""Query heads, KV heads, head_dim."""


@pytest.mark.parametrize("head_dim", [16, 64])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_a_decoder_is_exact(kernels: str, mode: str, head_dim: int) -> None:
    assert violations(probe_model(options(mode, kernels), head_dim=head_dim)) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", KERNELS)
def test_gemma_is_exact_too(tmp_path: Path, kernels: str, mode: str) -> None:
    assert violations(load_model(write_tiny_model(tmp_path, "gemma3"), options(mode, kernels))) == []


def test_a_decoder_that_looks_at_its_batch_is_found_out() -> None:
    model = probe_model(MODES["float32"])
    exact = model.decoder

    class Swayed:
        name = "swayed"

        def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
            return exact.forward(entries, pool) + 1e-6 * len(entries)

    model.decoder = Swayed()
    found = violations(model)
    assert found and all(line.startswith("swayed: ") and " together, " in line and line.endswith("logits") for line in found)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_linear_gives_a_row_the_same_bits_among_any_number(shape: tuple[int, int]) -> None:
    assert list(linear_violations(RULES, shape)) == []


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_attention_gives_a_query_the_same_bits_in_any_chunk_and_decoded(heads: tuple[int, int, int]) -> None:
    assert list(attention_violations(RULES, heads)) == []


def test_without_the_rules_rows_differ() -> None:
    assert list(attention_violations(LAX, HEADS[0]))


def linear_violations(rules: Rules, shape: tuple[int, int]) -> Iterator[str]:
    columns_out, columns_in = shape
    generator = torch.Generator().manual_seed(0)
    product = linear(torch.randn(columns_out, columns_in, generator=generator) * columns_in**-0.5, None, rules)
    rows = torch.randn(160, columns_in, generator=generator)
    whole = product(rows)
    for count in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129):
        padded = torch.zeros(rules.pad_rows(count), columns_in)
        padded[:count] = rows[7 : 7 + count]
        if not torch.equal(product(padded)[:count], whole[7 : 7 + count]):
            yield f"{count} rows"


def attention_violations(rules: Rules, heads: tuple[int, int, int]) -> Iterator[str]:
    query_heads, kv_heads, head_dim = heads
    length, group = 1200, query_heads // kv_heads
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(length, query_heads, head_dim, generator=generator)
    keys, values = (torch.randn(1, round_up(length, 512) + 512, kv_heads, head_dim, generator=generator) for _ in range(2))

    def chunk(start: int, count: int) -> torch.Tensor:
        padded = query.new_zeros(rules.pad_queries(count), query_heads, head_dim)
        padded[:count] = query[start : start + count]
        size = rules.pad_keys(start + count)
        hidden = torch.arange(size)[None] > torch.arange(start, start + padded.shape[0])[:, None]
        mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        out = F.scaled_dot_product_attention(
            padded.transpose(0, 1)[None], keys[:, :size].transpose(1, 2), values[:, :size].transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)[:count]

    def alone(row: int) -> torch.Tensor:
        padded = query.new_zeros(1, kv_heads, rules.pad_queries(group), head_dim)
        padded[:, :, :group] = query[row].view(1, kv_heads, group, head_dim)
        size = rules.pad_keys(row + 1)
        mask = torch.zeros(1, 1, 1, size).masked_fill_(torch.arange(size) > row, -torch.inf)
        out = F.scaled_dot_product_attention(padded, keys[:, :size].transpose(1, 2), values[:, :size].transpose(1, 2), attn_mask=mask)
        return out[:, :, :group].reshape(1, query_heads, head_dim)

    whole = chunk(0, length)
    starts = ((0, 1), (0, 33), (5, 2), (64, 64), (130, 17), (511, 2), (512, 191), (333, 800), (1024, 3), (1199, 1))
    ends = ((end - count, count) for end in range(560, 1040, 48) for count in (1, 21, 65, 256))
    for start, count in (*starts, *ends):
        if not torch.equal(chunk(start, count), whole[start : start + count]):
            yield f"{count} rows from {start}"
    for row in (0, 3, 15, 16, *range(60, 1200, 97), 511, 512, 1023, 1024, 1199):
        if not torch.equal(alone(row), whole[row : row + 1]):
            yield f"decode row {row}"


def test_padding_never_shrinks_and_stays_within_its_block() -> None:
    for count in range(1, 2 * KEY_BLOCK + 2):
        keys = RULES.pad_keys(count)
        assert count <= keys <= round_up(count, KEY_BLOCK)
        assert keys % 16 == 0 and RULES.pad_keys(keys) == keys
        assert RULES.pad_queries(count) >= count and RULES.pad_rows(count) >= count
