"""A step's cost as a sum of terms that each grow with the work, so that more work never looks cheaper. Pure.

A step costs something whatever is in it (weights are read, operators called). Every further row adds to that, but not evenly: a
few rows are bound by memory, many by arithmetic, so each range of rows has a slope of its own. Attention adds query-key pairs
(prefill) and positions read (decode); the head adds something for the decodes. No coefficient is negative.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.model.config import ModelConfig
from services.engine.scheduling.step_cost import StepShape

ROW_KNOTS = (1, 4, 16, 64, 256)
"""Where the ranges of rows begin that have a slope of their own; the last one has no end."""
_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class StepCoefficients:
    """Seconds for each unit of work in a step. Implements `StepCost`."""

    step_s: float
    """Any step, with its first row."""
    row_s: tuple[float, ...]
    """Each further row (a prompt token or a decoding sequence), by range of `row_knots`."""
    decode_step_s: float
    """Once, when anything decodes."""
    decode_seq_s: float
    """Each decoding sequence."""
    prefill_pair_s: float
    """Each query-key pair of prompt chunks."""
    decode_position_s: float
    """Each position that a decoding sequence sees."""
    row_knots: tuple[int, ...] = ROW_KNOTS

    def predict_s(self, shape: StepShape) -> float:
        """See `StepCost`."""
        return sum(map(float.__mul__, self.values, work(shape, self.row_knots)))

    @property
    def values(self) -> tuple[float, ...]:
        """In the order of `work`."""
        return (self.step_s, *self.row_s, self.decode_step_s, self.decode_seq_s, self.prefill_pair_s, self.decode_position_s)

    @classmethod
    def from_values(cls, values: Sequence[float], row_knots: tuple[int, ...]) -> StepCoefficients:
        """The inverse of `values`."""
        ranges = len(row_knots)
        decode_step, decode_seq, pair, position = values[1 + ranges :]
        return cls(values[0], tuple(values[1 : 1 + ranges]), decode_step, decode_seq, pair, position, row_knots)


def work(shape: StepShape, row_knots: Sequence[int]) -> tuple[float, ...]:
    """What a step holds of each coefficient's unit; none of them shrinks when the shape grows."""
    rows = shape.prefill_tokens + shape.decode_seqs
    slopes = [float(min(max(rows - knot, 0), end - knot)) for knot, end in itertools.pairwise(row_knots)]
    slopes.append(float(max(rows - row_knots[-1], 0)))
    return (
        float(rows > 0),
        *slopes,
        float(shape.decode_seqs > 0),
        float(shape.decode_seqs),
        float(shape.prefill_context),
        float(shape.decode_context),
    )


@dataclass(frozen=True, slots=True)
class Floors:
    """What a step must move and compute at least, on any machine: the two sides of its roofline."""

    layer_bytes: int
    """Weights of all layers, read once a step."""
    head_bytes: int
    """Weights of the head, read in a step that draws."""
    kv_position_bytes: int
    """Keys and values of one position in all layers, read by each sequence that sees it."""
    token_flops: int
    """Linears of all layers, for each row."""
    head_flops: int
    """The head, for each row that draws."""
    pair_flops: int
    """Attention of all layers, for each query-key pair."""

    @property
    def decode_step_bytes(self) -> int:
        """Weights that a decode step reads, before any context."""
        return self.layer_bytes + self.head_bytes

    @classmethod
    def of(cls, config: ModelConfig, *, dtype: str, kv_dtype: str, quantization: str) -> Floors:
        """Floors of a model as it is served: see `EngineSettings` for the names. Scales of int8 weights are left out: under 1 %."""
        weight_bytes = 1 if quantization == "int8" else _BYTES[dtype]
        query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
        layer = config.hidden_size * (2 * query + 2 * kv + 3 * config.inner_size)
        head = config.hidden_size * config.vocab_size
        return cls(
            layer_bytes=config.layers * layer * weight_bytes,
            head_bytes=head * weight_bytes,
            kv_position_bytes=config.layers * 2 * kv * _BYTES[kv_dtype],
            token_flops=2 * config.layers * layer,
            head_flops=2 * head,
            pair_flops=4 * config.layers * query,
        )

    def guess(self) -> StepCoefficients:
        """A first guess, for a core at 10 GB/s and 50 GFLOP/s. Proportions matter more than size: observations scale it at once."""
        byte_s, flop_s, call_s = 1e-10, 2e-11, 2e-4
        return StepCoefficients(
            step_s=10 * call_s + self.layer_bytes * byte_s,
            row_s=(self.token_flops * flop_s,) * len(ROW_KNOTS),
            decode_step_s=call_s + self.head_bytes * byte_s,
            decode_seq_s=call_s + self.head_flops * flop_s,
            prefill_pair_s=self.pair_flops * flop_s,
            decode_position_s=max(self.kv_position_bytes * byte_s, self.pair_flops * flop_s),
        )
