"""The row-wise pieces of a decoder layer. Each output row depends on its own input row only, bit for bit (see exactness.py)."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.model.config import ModelConfig
from services.engine.model.exactness import Rules
from services.engine.model.quantization import Int8Weight, quantize_rows
from services.engine.model.weights import Matrix

_EXACT_COLUMNS = 1024


class Linear(Protocol):
    """`x @ weight.T + bias`, `[rows, in] -> [rows, out]`, in the activations' dtype; wants at least `rules.linear_rows` rows."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


def linear(weight: Matrix, bias: torch.Tensor | None, rules: Rules) -> Linear:
    """The linear for a weight `[out, in]` and a float32 bias `[out]`; on CPUs it multiplies in float32 and keeps a copy of the weight."""
    if isinstance(weight, Int8Weight):
        return Int8Linear(weight, bias)
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias)
    return PackedLinear(weight, bias) if rules.pack_linear else PlainLinear(weight.float(), bias)


class PlainLinear:
    """torch's own."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias.to(weight.dtype) if bias is not None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """oneDNN on a float32 weight that it has reordered."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.float(), None)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return product


class Int8Linear:
    """Exact integer sums, then one float32 scale a token and one an output.

    The integers are multiplied as float32, which holds the sum of up to 1,024 products exactly: `1024 * 127**2 < 2**24`.
    """

    __slots__ = ("_bias", "_block", "_parts", "_scales")

    def __init__(self, weight: Int8Weight, bias: torch.Tensor | None) -> None:
        self._block = weight.block
        self._parts = [part.float() for part in torch.split(weight.values, _EXACT_COLUMNS, dim=1)]
        self._scales = weight.scales
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = quantize_rows(x, self._block)
        pieces = torch.split(values.float(), _EXACT_COLUMNS, dim=1)
        sums = F.linear(pieces[0], self._parts[0]).int()
        for piece, part in zip(pieces[1:], self._parts[1:], strict=True):
            sums += F.linear(piece, part).int()
        # Products and sums are rounded one by one: a fused operation would round otherwise at the ends of vectors.
        product = sums.float().mul_(scales[:, None] * self._scales)
        return product if self._bias is None else product + self._bias


class RmsNorm:
    """Root-mean-square norm over the last dimension, in float32."""

    __slots__ = ("_epsilon", "_gain")

    def __init__(self, gain: torch.Tensor, epsilon: float) -> None:
        self._gain = gain
        self._epsilon = epsilon

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., size] -> [..., size]`, same dtype."""
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._epsilon)
        return (self._gain * (wide * scale)).to(x.dtype)


class Rope:
    """Rotary position embedding in the half-split order, from a float32 table of all positions."""

    __slots__ = ("table",)

    def __init__(self, config: ModelConfig, device: torch.device, layer: int = 0) -> None:
        """For one layer, and those that have its `config.rope_of`."""
        speeds = torch.tensor(config.rope_of(layer).inverse_frequencies(config.head_dim), dtype=torch.float32)
        angles = torch.arange(config.max_positions, dtype=torch.float32)[:, None] * speeds
        angles = torch.cat((angles, angles), dim=-1)
        # Through float64: float32's cosine differs in its last bit from one instruction set to the next.
        wide = angles.double()
        self.table = torch.stack((wide.cos(), wide.sin())).float().to(device)
        """`[2, positions, head_dim]`: cosines, sines."""

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines, each float32 `[tokens, 1, head_dim]`, of int64 positions `[tokens]`."""
        cos, sin = self.table[:, positions].unsqueeze(2)
        return cos, sin

    @staticmethod
    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """`[tokens, heads, head_dim]` rotated in float32, in the dtype of `x`."""
        wide = x.float()
        first, second = wide.chunk(2, dim=-1)
        return (wide * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class GatedMlp:
    """`down(act(gate(x)) * up(x))`, where `act` is SiLU or GELU in its tanh form."""

    __slots__ = ("_down", "_gate_up", "_gelu")

    def __init__(self, gate_up: Linear, down: Linear, *, gelu: bool) -> None:
        self._gate_up = gate_up
        self._down = down
        self._gelu = gelu

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden] -> [rows, hidden]`."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down((F.gelu(gate, approximate="tanh") if self._gelu else F.silu(gate)) * up)
