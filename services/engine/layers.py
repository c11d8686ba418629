"""The row-wise pieces of a decoder layer. Each output row depends on its own input row only, bit for bit (see exactness.py)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from services.engine.exactness import Rules
from services.engine.model_config import ModelConfig


class Linear:
    """`x @ weight.T + bias` for `[rows, in] -> [rows, out]`; the caller gives at least `rules.linear_rows` rows."""

    __slots__ = ("_bias", "_compute_dtype", "_dtype", "_packed", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, rules: Rules) -> None:
        """`weight` `[out, in]` and `bias` `[out]` are of the model's dtype; a packed or widened weight is a copy."""
        self._dtype = weight.dtype
        self._compute_dtype = torch.float32 if rules.widen_linear else weight.dtype
        self._packed = rules.pack_linear
        self._bias = bias.to(self._compute_dtype) if bias is not None else None
        wide = weight.to(self._compute_dtype)
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(wide, None) if self._packed else wide

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result in the model's dtype."""
        return self._product(x).to(self._dtype)

    def unrounded(self, x: torch.Tensor) -> torch.Tensor:
        """The result as float32, not rounded to the model's dtype where the product was float32."""
        return self._product(x).float()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self._compute_dtype)
        if not self._packed:
            return F.linear(x, self._weight, self._bias)
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


class RmsNorm:
    """Root-mean-square norm over the last dimension, in float32, rounded to the model's dtype before the gain."""

    __slots__ = ("_epsilon", "_gain")

    def __init__(self, gain: torch.Tensor, epsilon: float) -> None:
        self._gain = gain
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`, same dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return self._gain * (wide * scale).to(x.dtype)


class Rope:
    """Rotary position embedding in the half-split order, from a float32 table of all positions."""

    __slots__ = ("_table",)

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        speeds = torch.tensor(config.rope.inverse_frequencies(config.head_dim), dtype=torch.float32)
        angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * speeds
        angles = torch.cat((angles, angles), dim=-1)
        self._table = torch.stack((angles.cos(), angles.sin())).to(device)
        """`[2, positions, head_dim]`: cosines, sines."""

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each float32 `[tokens, 1, head_dim]`, of int64 positions `[tokens]`."""
        cos, sin = self._table[:, positions].unsqueeze(2)
        return cos, sin

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, head_dim]` rotated in float32, in the dtype of `x`."""
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`."""

    __slots__ = ("_down", "_gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden] -> [rows, hidden]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate) * up)
