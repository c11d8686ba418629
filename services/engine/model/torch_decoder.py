"""The decoder in torch's operators: every family on every device, and the reference for other decoders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.model.attention import PagedAttention, Span, plan_attention
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import ForwardEntry
from services.engine.model.exactness import Rules, rules_for
from services.engine.model.kv_pool import KvPool
from services.engine.model.layers import GatedMlp, RmsNorm, Rope, linear
from services.engine.model.weights import LayerWeights, ModelWeights
from services.runtime.processes.machine import cpu_design


class Attend(Protocol):
    """Attention of one layer, for a step whose shape and pages it knows."""

    def __call__(self, layer: int, window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Stores keys and values, each `[rows, kv_heads, head_dim]`, then attends with queries `[rows, query_heads, head_dim]`.

        Returns `[rows, query_size]`; each query sees `window` positions (0: all).
        """
        ...


class TorchDecoder:
    """Activations are float32 on CPUs, where rows keep their bits as long as torch has one thread, and of the weights' dtype elsewhere."""

    name = "torch"

    def __init__(self, config: ModelConfig, weights: ModelWeights) -> None:
        self.config = config
        self.device = weights.embedding.device
        self.dtype = torch.float32 if self.device.type == "cpu" else weights.embedding.dtype
        """Of the activations."""
        self.windows = frozenset(config.windows)
        self._rules = rules_for(self.device)
        self._embedding = weights.embedding
        self._layers = [_Layer(config, layer, window, self._rules) for layer, window in zip(weights.layers, config.windows, strict=True)]
        self._final_norm = RmsNorm(weights.final_norm, config.norm_epsilon)
        self._head = linear(weights.head, None, self._rules)
        self._ropes = {config.rope_of(layer): Rope(config, self.device, layer) for layer in range(config.layers)}

    @property
    def numerics(self) -> str:
        """See `Decoder.numerics`. torch's threads must have been set: 'torch-2.13.0/AVX512/GenuineIntel-6-143/threads-1'."""
        return "/".join((f"torch-{torch.__version__}", *_machine_class(self.device)))

    def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
        """See `Decoder.forward`."""
        spans = [Span(entry.start, len(entry.token_ids), entry.pages) for entry in entries]
        plan = plan_attention(spans, pool, self._rules, self.windows, self.dtype)
        token_ids = [token_id for index in plan.order for token_id in entries[index].token_ids]
        tokens = len(token_ids)
        rows = self._rules.pad_rows(tokens)
        padding = [0] * (rows - tokens)
        attention = PagedAttention(pool, self.config.query_heads, self.config.query_scale, self._rules)
        scratch = torch.zeros(rows, self.config.query_size, dtype=self.dtype, device=self.device)

        def attend(layer: int, window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            attention.write(plan, layer, keys[:tokens], values[:tokens])
            attention.read(plan, layer, window, queries[:tokens], scratch)
            return scratch

        hidden = self.hidden(self._indices(token_ids + padding), self._indices(plan.positions + padding), attend)
        last = _last_rows(entries, plan.order)
        if not last:
            return torch.empty(0, self.config.vocab_size, device=self.device)
        padding = last[-1:] * (self._rules.pad_rows(len(last)) - len(last))
        return self.logits(hidden[self._indices(last + padding)])[: len(last)]

    def hidden(self, token_ids: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """All layers: int64 ids and positions, each `[rows]`, to `[rows, hidden]`. Looks at no tensor's content on the host."""
        hidden = F.embedding(token_ids, self._embedding).to(self.dtype) * self.config.embedding_scale
        ropes = {key: rope.at(positions) for key, rope in self._ropes.items()}
        for number, layer in enumerate(self._layers):
            hidden = layer.forward(number, hidden, ropes[self.config.rope_of(number)], attend)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[rows, hidden]` to float32 `[rows, vocab]`."""
        return self._head(self._final_norm(hidden)).float()

    def _indices(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)


class _Layer:
    """One decoder layer."""

    __slots__ = (
        "_config", "_input_norm", "_key_norm", "_mlp", "_mlp_norm", "_output", "_post_attention_norm", "_post_mlp_norm", "_qkv",
        "_query_norm", "_window",
    )  # fmt: skip

    def __init__(self, config: ModelConfig, weights: LayerWeights, window: int, rules: Rules) -> None:
        def norm(gain: torch.Tensor) -> RmsNorm:
            return RmsNorm(gain, config.norm_epsilon)

        def maybe_norm(gain: torch.Tensor | None) -> RmsNorm | None:
            return norm(gain) if gain is not None else None

        self._config = config
        self._window = window
        self._input_norm = norm(weights.input_norm)
        self._qkv = linear(weights.qkv, weights.qkv_bias, rules)
        self._query_norm = maybe_norm(weights.query_norm)
        self._key_norm = maybe_norm(weights.key_norm)
        self._output = linear(weights.output, weights.output_bias, rules)
        self._mlp_norm = norm(weights.mlp_norm)
        self._mlp = GatedMlp(linear(weights.gate_up, None, rules), linear(weights.down, None, rules), gelu=config.gelu)
        self._post_attention_norm = maybe_norm(weights.post_attention_norm)
        self._post_mlp_norm = maybe_norm(weights.post_mlp_norm)

    def forward(self, number: int, hidden: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], attend: Attend) -> torch.Tensor:
        """`[rows, hidden] -> [rows, hidden]`."""
        config = self._config
        heads = self._qkv(self._input_norm(hidden)).view(hidden.shape[0], -1, config.head_dim)
        rotary, values = heads[:, : -config.kv_heads], heads[:, -config.kv_heads :]
        if self._query_norm is not None and self._key_norm is not None:
            queries, keys = rotary[:, : config.query_heads], rotary[:, config.query_heads :]
            rotary = torch.cat((self._query_norm(queries), self._key_norm(keys)), dim=1)
        rotary = Rope.rotate(rotary, *rope)
        attended = self._output(attend(number, self._window, rotary[:, : config.query_heads], rotary[:, config.query_heads :], values))
        hidden = hidden + (self._post_attention_norm(attended) if self._post_attention_norm else attended)
        inner = self._mlp(self._mlp_norm(hidden))
        return hidden + (self._post_mlp_norm(inner) if self._post_mlp_norm else inner)


def _machine_class(device: torch.device) -> tuple[str, ...]:
    """What torch's choice of kernels, and so the order of its sums, depends on: its instruction set, the CPU's design with its caches,
    and the threads that share a product; elsewhere the device's name."""
    if device.type == "cpu":
        return torch.backends.cpu.get_cpu_capability(), cpu_design(), f"threads-{torch.get_num_threads()}"
    return (torch.cuda.get_device_name(device).replace(" ", "-"),) if device.type == "cuda" else (device.type,)


def _last_rows(entries: Sequence[ForwardEntry], order: Sequence[int]) -> list[int]:
    """Flattened rows of the last tokens of entries that sample, in entry order."""
    last: dict[int, int] = {}
    row = 0
    for index in order:
        row += len(entries[index].token_ids)
        last[index] = row - 1
    return [last[index] for index, entry in enumerate(entries) if entry.sample]
