"""The least time a step can take on a machine: its weights and keys read once, its linears multiplied at the measured peak."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cells import Cell
from bench.probe import Peaks
from services.engine.model.config import ModelConfig

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Of a weight, by class of arithmetic."""
OPERANDS = {"float32": ("float32",), "bfloat16": ("float32", "bfloat16"), "int8": ("float32", "bfloat16", "int8")}
"""Types a class may multiply in: its weights can be widened to any that holds them, which on many CPUs is faster."""
KV_BYTES = 2


@dataclass(frozen=True, slots=True)
class Work:
    """Size of a model."""

    layer_weights: int
    """Weights of all layers' linears."""
    head_weights: int
    kv_token: int
    """Numbers of one token's keys and values, all layers."""

    @classmethod
    def of(cls, config: ModelConfig) -> Work:
        query, key = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        layer = config.hidden_size * (2 * query + 2 * key + 3 * config.inner_size)
        return cls(config.layers * layer, config.hidden_size * config.vocab_size, 2 * config.layers * key)

    def weight_bytes(self, kind: str) -> int:
        """Of the linears and the head."""
        return (self.layer_weights + self.head_weights) * BYTES[kind]


def floor_s(cell: Cell, work: Work, kind: str, peaks: Peaks) -> float:
    """Seconds of one run of a cell, arithmetic or memory, whichever takes longer. Attention's arithmetic is not counted."""
    size = work.weight_bytes(kind)
    read = size + cell.batch * cell.context * work.kv_token * KV_BYTES
    layers = 2 * work.layer_weights * (cell.prompt + cell.batch)
    head = 2 * work.head_weights * max(1, cell.batch)
    peak = max(peaks.operations_per_s[operand] for operand in OPERANDS[kind])
    return cell.calls * max(read / peaks.read_rate(size), (layers + head) / peak)
