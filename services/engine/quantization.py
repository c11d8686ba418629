"""Int8 weights and activations whose products do not depend on company (W8A8, a scale for each token and column group).

Every token has scales of its own and integers are summed exactly, so a row's numbers cannot depend on who shares its batch or
how its prompt was cut, on any machine. One activation scale for a whole call, as in most CPU kernels, would break that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

LARGEST = 127
GROUP = 64
"""Input columns that share a scale, at most."""
SCHEMES = {"none": "none", "int8": f"int8-w8a8-g{GROUP}"}
"""What `--quantization` can be, and how the model's identity calls it."""
QUANTIZED = frozenset(("qkv", "output", "gate_up", "down", "head"))
"""Linears that become int8 (names of `weights.LayerWeights` and `ModelWeights`); the embedding never does."""


def group_of(columns: int) -> int:
    """The group for a weight of `columns` inputs: their largest divisor up to `GROUP` that is a multiple of 4; `ValueError` if none is."""
    for group in range(GROUP, 0, -4):
        if columns % group == 0:
            return group
    raise ValueError(f"int8 needs widths that are multiples of 4, got {columns}")


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A linear's weight, symmetric int8, with a scale for each output row and each group of input columns."""

    values: torch.Tensor
    """int8 `[out, in]`, from -127 to 127."""
    scales: torch.Tensor
    """float32 `[out, in // group]`."""
    group: int
    """Input columns that share a scale; divides `in`."""


def quantize_rows(x: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 `[rows, in]` -> int8 `[rows, in]` and float32 scales `[rows, in // group]`; halves round to even."""
    grouped = x.view(x.shape[0], -1, group)
    largest = grouped.abs().amax(dim=-1)
    inverse = torch.where(largest > 0, LARGEST / largest, torch.zeros_like(largest))
    values = (grouped * inverse[..., None]).round_().to(torch.int8)
    return values.view(x.shape), largest / LARGEST


def quantize_weight(weight: torch.Tensor, group: int) -> Int8Weight:
    """Any floating `[out, in]`; `in` must be a multiple of `group`."""
    values, scales = quantize_rows(weight.float(), group)
    return Int8Weight(values, scales, group)
