"""Int8 weights and activations whose products do not depend on company: W8A8 after a rotation, a scale for each token and weight row.

Before it is quantized a row is rotated in blocks of up to 64 columns by a Hadamard transform, weights and activations alike, which
leaves their products as they were and spreads the few outliers that cost naive W8A8 its quality (QuaRot, SpinQuant); `python -m
bench.quality` measures both. Every token has a scale of its own, integers are summed exactly and the rotation is additions of single
elements in a fixed order: a row's numbers cannot depend on who shares its batch or how its prompt was cut, on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 127
SMALLEST = 1e-30
"""A row that stays below this everywhere is taken for zero: its scale has no finite inverse."""
BLOCK = 64
"""Columns that are rotated together, at most."""
SCHEMES = {"none": "none", "int8": f"int8-w8a8-hadamard{BLOCK}"}
"""What `--quantization` can be, and how the model's identity calls it."""
QUANTIZED = frozenset(("qkv", "output", "gate_up", "down", "head"))
"""Linears that become int8 (names of `weights.LayerWeights` and `ModelWeights`); the embedding never does."""
_CHUNK_ELEMENTS = 1 << 17
"""What `quantize_weight` takes at a time, so that it stays in the CPU's cache."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A linear's rotated weight, symmetric int8: `x @ w.T` is about `quantized x @ values.T`, times both rows' scales."""

    values: torch.Tensor
    """int8 `[out, in]`, from -127 to 127."""
    scales: torch.Tensor
    """float32 `[out]`, the rotation's factor included."""
    block: int
    """Columns that are rotated together: a power of two that divides `in`."""


def block_of(columns: int) -> int:
    """The block for rows of `columns`: the largest power of two that divides them, at most `BLOCK`."""
    return min(columns & -columns, BLOCK)


def quantize_rows(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[rows, in]` -> rotated int8 `[rows, in]` and float32 scales `[rows]`; halves round to even."""
    rows, columns = x.shape
    turned = _rotated(x.reshape(-1, block).t().clone(memory_format=torch.contiguous_format))
    largest = turned.abs().amax(dim=0).view(rows, -1).amax(dim=1)
    inverse = torch.where(largest > SMALLEST, LARGEST / largest, torch.zeros_like(largest))
    values = turned.mul_(inverse.repeat_interleave(columns // block)).round_().to(torch.int8)
    return values.t().reshape(rows, columns), largest / LARGEST


def quantize_weight(weight: torch.Tensor) -> Int8Weight:
    """Any floating `[out, in]` on a CPU. Blocks: two seconds for 135 million elements."""
    rows, columns = weight.shape
    block = block_of(columns)
    values = torch.empty(rows, columns, dtype=torch.int8)
    scales = torch.empty(rows)
    step = max(1, _CHUNK_ELEMENTS // columns)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        values[chunk], scales[chunk] = quantize_rows(weight[chunk].float(), block)
    return Int8Weight(values, scales / block, block)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """The Hadamard transform, not normalised, of the columns of `x` `[block, n]`, which is overwritten: butterflies of distance 1, 2, 4."""
    other = torch.empty_like(x)
    distance = 1
    while distance < len(x):
        pairs, out = (each.view(-1, 2, distance, x.shape[1]) for each in (x, other))
        torch.add(pairs[:, 0], pairs[:, 1], out=out[:, 0])
        torch.sub(pairs[:, 0], pairs[:, 1], out=out[:, 1])
        x, other = other, x
        distance *= 2
    return x
