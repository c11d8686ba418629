"""When a token's numbers do not depend on who shares its batch: every rule about that, in one place.

Split, colocated, cold, cached and resumed runs of a prompt must give the same tokens. That needs each row's bits to be the
same whether it is computed alone or among others, in chunks of any length, on a computed or an imported prefix. CPU kernels
choose other summation orders for other shapes; padding keeps them within one class of shapes. The classes were measured bit
for bit on AVX512 (with bf16 instructions) and on AVX2 (without); `violations` measures them again on the machine it runs on,
and a test holds them. They hold for one torch thread a process, and between machines of one kind only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SUPPORTED_DTYPES = (torch.bfloat16, torch.float32)
"""What weights, activations and KV may be; all three are the same."""

KEY_BLOCK = 512
"""Keys that torch's CPU attention sums in one matrix product."""

_WHOLE_PAGES = tuple(range(16, KEY_BLOCK + 1, 16))
_AVX2_TAILS = (64, 128, 192, 384, 512)
"""Sums over 193 to 383 keys are split elsewhere than longer and shorter ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How to shape operators so that a row keeps its bits."""

    linear_rows: int
    """A linear's input has at least this many rows."""
    query_rows: int
    """Query rows of an attention call are padded to a multiple of this."""
    key_tails: tuple[int, ...]
    """Attention sums keys in blocks of `KEY_BLOCK`; the last block is padded (masked) to one of these sizes, ascending."""
    widen_linear: bool
    """bf16 linears multiply exact float32 copies of the weights and round once: same precision as a bf16 GEMM that sums in
    float32, and five times faster where the CPU has no bf16 instructions (for twice the weight memory)."""

    def pad_rows(self, rows: int) -> int:
        """Rows that a linear should be given for `rows` real ones."""
        return max(rows, self.linear_rows)

    def pad_queries(self, rows: int) -> int:
        """Query rows that an attention call should be given for `rows` real ones."""
        return round_up(rows, self.query_rows)

    def pad_keys(self, keys: int) -> int:
        """Keys that an attention call should be given for `keys` real ones."""
        blocks, tail = divmod(keys, KEY_BLOCK)
        return blocks * KEY_BLOCK + (next(size for size in self.key_tails if size >= tail) if tail else 0)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def rules_for(dtype: torch.dtype, device: torch.device) -> Rules:
    """The rules for this process's CPU, or the plain ones (no promise of equal bits) for another device.

    `ValueError` for a dtype outside `SUPPORTED_DTYPES`.
    """
    if dtype not in SUPPORTED_DTYPES:
        raise ValueError(f"unsupported dtype {dtype}; supported: bfloat16, float32")
    if device.type != "cpu":
        return Rules(linear_rows=1, query_rows=1, key_tails=_WHOLE_PAGES, widen_linear=False)
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return Rules(linear_rows=4, query_rows=4, key_tails=_AVX2_TAILS, widen_linear=dtype == torch.bfloat16)
    if dtype == torch.float32:
        return Rules(linear_rows=16, query_rows=16, key_tails=(KEY_BLOCK,), widen_linear=False)
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Rules(linear_rows=1, query_rows=1, key_tails=_WHOLE_PAGES, widen_linear=False)
    return Rules(linear_rows=16, query_rows=16, key_tails=(KEY_BLOCK,), widen_linear=True)


def violations(
    dtype: torch.dtype, rules: Rules, *, shapes: tuple[tuple[int, int], ...], heads: tuple[int, int, int], seed: int = 0
) -> list[str]:
    """Runs linears `[out, in]` and attention (`heads`: query heads, KV heads, head_dim) under `rules` on this CPU.

    Returns one line for each case whose rows differ from the same rows in a larger call; empty when the rules hold. About a second.
    """
    generator = torch.Generator().manual_seed(seed)
    return [*_linear_violations(dtype, rules, shapes, generator), *_attention_violations(dtype, rules, heads, generator)]


def _linear_violations(
    dtype: torch.dtype, rules: Rules, shapes: tuple[tuple[int, int], ...], generator: torch.Generator
) -> Iterator[str]:
    compute = torch.float32 if rules.widen_linear else dtype
    for columns_out, columns_in in shapes:
        weight = torch.randn(columns_out, columns_in, generator=generator).mul(columns_in**-0.5).to(dtype).to(compute)
        rows = torch.randn(160, columns_in, generator=generator).to(dtype).to(compute)
        whole = F.linear(rows, weight)
        for count in (1, 2, 3, 5, 8, 15, 16, 17, 31, 33, 64, 100, 129):
            padded = torch.zeros(rules.pad_rows(count), columns_in, dtype=compute)
            padded[:count] = rows[7 : 7 + count]
            if not torch.equal(F.linear(padded, weight)[:count], whole[7 : 7 + count]):
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
