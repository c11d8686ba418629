"""Measures on this machine whether operators shaped by `exactness.Rules` give a row the same bits whatever it is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from services.engine.exactness import Rules, round_up
from services.engine.layers import Linear


def violations(
    dtype: torch.dtype, rules: Rules, *, shapes: tuple[tuple[int, int], ...], heads: tuple[int, int, int], seed: int = 0
) -> list[str]:
    """Runs linears `[out, in]` and attention (`heads`: query heads, KV heads, head_dim) under `rules` on this CPU.

    Returns one line for each case whose rows differ from the same rows in a larger call; empty when the rules hold. About a second.
    """
    generator = torch.Generator().manual_seed(seed)
    return [*_linear_violations(dtype, rules, shapes, generator), *_attention_violations(dtype, rules, heads, generator)]


def _linear_violations(dtype: torch.dtype, rules: Rules, shapes: tuple[tuple[int, int], ...], generator: torch.Generator) -> Iterator[str]:
    for columns_out, columns_in in shapes:
        linear = Linear(torch.randn(columns_out, columns_in, generator=generator).mul(columns_in**-0.5).to(dtype), None, rules)
        rows = torch.randn(160, columns_in, generator=generator).to(dtype)
        whole = linear.unrounded(rows)
        for count in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129):
            padded = torch.zeros(rules.pad_rows(count), columns_in, dtype=dtype)
            padded[:count] = rows[7 : 7 + count]
            if not torch.equal(linear.unrounded(padded)[:count], whole[7 : 7 + count]):
                yield f"linear {columns_out}x{columns_in} {dtype}: {count} rows"


def _attention_violations(dtype: torch.dtype, rules: Rules, heads: tuple[int, int, int], generator: torch.Generator) -> Iterator[str]:
    query_heads, kv_heads, head_dim = heads
    length, group = 1200, query_heads // kv_heads
    query = torch.randn(length, query_heads, head_dim, generator=generator).to(dtype)
    keys, values = (torch.randn(1, round_up(length, 512) + 512, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))

    def chunk(start: int, count: int) -> torch.Tensor:
        padded = query.new_zeros(rules.pad_queries(count), query_heads, head_dim)
        padded[:count] = query[start : start + count]
        size = rules.pad_keys(start + count)
        hidden = torch.arange(size)[None] > torch.arange(start, start + padded.shape[0])[:, None]
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)
        out = F.scaled_dot_product_attention(
            padded.transpose(0, 1)[None], keys[:, :size].transpose(1, 2), values[:, :size].transpose(1, 2), attn_mask=mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)[:count]

    def alone(row: int) -> torch.Tensor:
        padded = query.new_zeros(1, kv_heads, rules.pad_queries(group), head_dim)
        padded[:, :, :group] = query[row].view(1, kv_heads, group, head_dim)
        size = rules.pad_keys(row + 1)
        mask = torch.zeros(1, 1, 1, size, dtype=dtype).masked_fill_(torch.arange(size) > row, -torch.inf)
        out = F.scaled_dot_product_attention(padded, keys[:, :size].transpose(1, 2), values[:, :size].transpose(1, 2), attn_mask=mask)
        return out[:, :, :group].reshape(1, query_heads, head_dim)

    whole = chunk(0, length)
    starts = ((0, 1), (0, 33), (5, 2), (64, 64), (130, 17), (511, 2), (512, 191), (333, 800), (1024, 3), (1199, 1))
    ends = ((end - count, count) for end in range(560, 1040, 48) for count in (1, 21, 65, 256))
    for start, count in (*starts, *ends):
        if not torch.equal(chunk(start, count), whole[start : start + count]):
            yield f"attention {heads} {dtype}: {count} rows from {start}"
    for row in (0, 3, 15, 16, *range(60, 1200, 97), 511, 512, 1023, 1024, 1199):
        if not torch.equal(alone(row), whole[row : row + 1]):
            yield f"attention {heads} {dtype}: decode row {row}"
