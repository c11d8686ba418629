"""A Llama-like decoder over a paged KV pool: prefill chunks and decode rows of many sequences in one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from services.engine.attention import AttentionPlan, PagedAttention, Span, plan_attention
from services.engine.exactness import Rules, rules_for
from services.engine.kv_pool import KvPool
from services.engine.layers import GatedMlp, Linear, RmsNorm, Rope
from services.engine.model_config import ModelConfig
from services.engine.weights import LayerWeights, ModelWeights, load_weights


@dataclass(frozen=True, slots=True)
class ForwardEntry:
    """The next tokens of one sequence."""

    token_ids: Sequence[int]
    """Tokens to compute now, at least one."""
    start: int
    """Absolute position of the first; the KV of all earlier positions is in `pages`."""
    pages: Sequence[int]
    """Page table of the sequence; holds at least `start + len(token_ids)` tokens."""
    sample: bool
    """Whether the logits of the last token are wanted."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step: at least one entry, no two of the same sequence."""

    entries: Sequence[ForwardEntry]


class LlamaModel:
    """Llama, Qwen2, Qwen3 and Mistral decoders in bf16 or fp32.

    Owned by one thread; run it with one torch thread (`torch.set_num_threads(1)`), or rows lose their exactness (exactness.py).
    """

    def __init__(self, config: ModelConfig, weights: ModelWeights, dtype: torch.dtype) -> None:
        """Takes over the weights, which must be of `dtype`; `ValueError` for a dtype other than bf16 and fp32."""
        self.config = config
        self.dtype = dtype
        self.device = weights.embedding.device
        self.rules = rules_for(dtype, self.device)
        self._head = Linear(weights.head, None, self.rules)
        self._embedding = weights.embedding
        self._layers = [_Layer(config, layer, window, self.rules) for layer, window in zip(weights.layers, config.windows, strict=True)]
        self._final_norm = RmsNorm(weights.final_norm, config.norm_epsilon)
        self._rope = Rope(config, self.device)
        self._windows = frozenset(config.windows)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: KvPool) -> torch.Tensor:
        """Computes all tokens, writes their KV into the pool and returns float32 logits `[entries with sample, vocab]` in entry order.

        A row's bits depend on its own sequence only: not on the other entries, nor on how the prompt was cut into chunks. Blocks.
        Raises `ValueError` for an entry that is empty, too long for its pages or the context, or names a page out of the pool.
        """
        entries = batch.entries
        spans = [Span(entry.start, len(entry.token_ids), entry.pages) for entry in entries]
        if not spans or max(span.end for span in spans) > self.config.max_positions:
            raise ValueError(f"a step needs entries, each within the context of {self.config.max_positions} tokens")
        plan = plan_attention(spans, pool, self.rules, self._windows)
        for page in plan.zero_pages:
            pool.zero_page(page)
        token_ids = [token_id for index in plan.order for token_id in entries[index].token_ids]
        rows = self.rules.pad_rows(len(token_ids))
        padding = [0] * (rows - len(token_ids))
        hidden = F.embedding(self._indices(token_ids + padding), self._embedding)
        rope = self._rope.at(self._indices(plan.positions + padding))
        attention = PagedAttention(pool, self.config.query_heads, self.rules)
        scratch = torch.zeros(rows, self.config.query_size, dtype=self.dtype, device=self.device)
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(number, hidden, rope, plan, attention, scratch)
        return self._logits(hidden, _last_rows(entries, plan.order))

    def _logits(self, hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
        if not rows:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        padding = rows[-1:] * (self.rules.pad_rows(len(rows)) - len(rows))
        last = self._final_norm(hidden[self._indices(rows + padding)])
        return self._head.unrounded(last)[: len(rows)]

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class _Layer:
    """One decoder layer."""

    __slots__ = ("_config", "_input_norm", "_key_norm", "_mlp", "_mlp_norm", "_output", "_qkv", "_query_norm", "_window")

    def __init__(self, config: ModelConfig, weights: LayerWeights, window: int, rules: Rules) -> None:
        def norm(gain: torch.Tensor) -> RmsNorm:
            return RmsNorm(gain, config.norm_epsilon)

        self._config = config
        self._window = window
        self._input_norm = norm(weights.input_norm)
        self._qkv = Linear(weights.qkv, weights.qkv_bias, rules)
        self._query_norm = norm(weights.query_norm) if weights.query_norm is not None else None
        self._key_norm = norm(weights.key_norm) if weights.key_norm is not None else None
        self._output = Linear(weights.output, weights.output_bias, rules)
        self._mlp_norm = norm(weights.mlp_norm)
        self._mlp = GatedMlp(Linear(weights.gate_up, None, rules), Linear(weights.down, None, rules))

    def forward(
        self,
        number: int,
        hidden: torch.Tensor,
        rope: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        attention: PagedAttention,
        scratch: torch.Tensor,
    ) -> torch.Tensor:
        """`[rows, hidden] -> [rows, hidden]`; rows beyond the plan's tokens are padding. `scratch` is overwritten."""
        config = self._config
        tokens = len(plan.positions)
        heads = self._qkv(self._input_norm(hidden)).view(hidden.shape[0], -1, config.head_dim)
        rotary, values = heads[:, : -config.kv_heads], heads[:, -config.kv_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            queries, keys = rotary[:, : config.query_heads], rotary[:, config.query_heads :]
            rotary = torch.cat((self._query_norm(queries), self._key_norm(keys)), dim=1)
        rotary = Rope.rotate(rotary, *rope)[:tokens]
        attention.write(plan, number, rotary[:, config.query_heads :], values[:tokens])
        attention.read(plan, number, self._window, rotary[:, : config.query_heads], scratch)
        hidden = hidden + self._output(scratch)
        return hidden + self._mlp(self._mlp_norm(hidden))


def _last_rows(entries: Sequence[ForwardEntry], order: Sequence[int]) -> list[int]:
    """Flattened rows of the last tokens of entries that sample, in entry order."""
    last: dict[int, int] = {}
    row = 0
    for index in order:
        row += len(entries[index].token_ids)
        last[index] = row - 1
    return [last[index] for index, entry in enumerate(entries) if entry.sample]


def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16, device: torch.device | str = "cpu") -> LlamaModel:
    """Reads config and weights of a Hugging Face folder; `ModelLoadError` if they can't be served."""
    config = ModelConfig.from_folder(folder)
    return LlamaModel(config, load_weights(folder, config, dtype, torch.device(device)), dtype)
