"""torch's own int8 path: a plain Llama whose linears are FBGEMM's `quantized.linear_dynamic`, with float32 around them.

Weights are int8 with a scale an output row, activations are quantised with one scale a call, so that a row's result depends on
its company. Keys and values lie in a float32 cache with a slot a sequence. What int8 on a CPU is usually built from.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, random_prompt, serve


class DynamicLinear:
    """`x @ weight.T`, both quantised; the result is float32."""

    def __init__(self, *weights: torch.Tensor) -> None:
        weight = torch.cat(weights).float()
        scales = (weight.abs().amax(dim=1) / 127).clamp_min(1e-12).double()
        quantized = torch.quantize_per_channel(weight, scales, torch.zeros(len(scales), dtype=torch.int64), 0, torch.qint8)
        self._packed = torch.ops.quantized.linear_prepack(quantized, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.quantized.linear_dynamic(x, self._packed, True)
        return product


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's parts; the linears of queries, keys and values are one, and so are those of gate and up."""

    input_norm: torch.Tensor
    qkv: DynamicLinear
    output: DynamicLinear
    mlp_norm: torch.Tensor
    gate_up: DynamicLinear
    down: DynamicLinear

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], prefix: str) -> Layer:
        """`prefix` is the layer's part of the tensors' names, with the last dot."""

        def tensor(name: str) -> torch.Tensor:
            return weights[f"{prefix}{name}.weight"].float()

        return cls(
            tensor("input_layernorm"),
            DynamicLinear(*(tensor(f"self_attn.{name}_proj") for name in "qkv")),
            DynamicLinear(tensor("self_attn.o_proj")),
            tensor("post_attention_layernorm"),
            DynamicLinear(tensor("mlp.gate_proj"), tensor("mlp.up_proj")),
            DynamicLinear(tensor("mlp.down_proj")),
        )


class FbgemmLlama:
    """Prefill of one prompt and decode of equally long sequences."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        folder = Path(setup.model)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = load_file(folder / "model.safetensors")
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._size = config.get("head_dim") or config["hidden_size"] // self._heads
        self._epsilon = config["rms_norm_eps"]
        self._embedding = weights["model.embed_tokens.weight"].float()
        self._head = DynamicLinear(weights.get("lm_head.weight", self._embedding))
        self._norm = weights["model.norm.weight"].float()
        self._layers = [Layer.of(weights, f"model.layers.{number}.") for number in range(config["num_hidden_layers"])]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        angles = torch.outer(torch.arange(8192.0), theta ** (-torch.arange(0, self._size, 2) / self._size)).repeat(1, 2)
        self._cos, self._sin = angles.cos(), angles.sin()
        self._cache = torch.zeros(len(self._layers), 2, 1, 0, 0, 0)

    def versions(self) -> Mapping[str, str]:
        engine = torch.backends.quantized.engine
        return {"torch": torch.__version__, "settings": f"quantized engine {engine}, scales an output row, float32 KV"}

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            prompts = [random_prompt(number, cell.prompt, len(self._embedding)) for number in range(cell.prompts)]
            self._make_cache(1, cell.prompt)
            started = time.perf_counter()
            for prompt in prompts:
                self._forward([prompt], 0)
            return time.perf_counter() - started
        if cell.phase == "decode":
            self._make_cache(cell.batch, cell.context + cell.steps)
            tokens = [7] * cell.batch
            started = time.perf_counter()
            for step in range(cell.steps):
                tokens = self._forward([[token] for token in tokens], cell.context + step)
            return time.perf_counter() - started
        raise NotMeasured("it has no batches of mixed phases")

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        self._make_cache(1, len(token_ids) + count)
        answer = self._forward([list(token_ids)], 0)
        while len(answer) < count:
            answer += self._forward([[answer[-1]]], len(token_ids) + len(answer) - 1)
        return answer

    def _make_cache(self, batch: int, length: int) -> None:
        shape = (len(self._layers), 2, batch, length, self._kv_heads, self._size)
        if self._cache.shape != shape:
            self._cache = torch.randn(shape) * 0.1

    @torch.inference_mode()
    def _forward(self, rows: list[list[int]], start: int) -> list[int]:
        """Next tokens `[batch]`; `rows` are equally long."""
        batch, length = len(rows), len(rows[0])
        hidden = self._embedding[torch.tensor(rows).flatten()]
        cos, sin = (table[start : start + length].repeat(batch, 1)[:, None] for table in (self._cos, self._sin))
        for number, layer in enumerate(self._layers):
            heads = layer.qkv(self._normed(hidden, layer.input_norm)).view(batch * length, -1, self._size)
            rotary, values = torch.split(heads, [self._heads + self._kv_heads, self._kv_heads], dim=1)
            first, second = rotary.chunk(2, dim=-1)
            rotary = rotary * cos + torch.cat((-second, first), dim=-1) * sin
            keys = rotary[:, self._heads :]
            cache = self._cache[number, :, :batch]
            cache[0, :, start : start + length] = keys.view(batch, length, self._kv_heads, self._size)
            cache[1, :, start : start + length] = values.view(batch, length, self._kv_heads, self._size)
            attended = self._attend(rotary[:, : self._heads].view(batch, length, self._heads, self._size), cache[:, :, : start + length])
            hidden = hidden + layer.output(attended.reshape(batch * length, -1))
            gate, up = layer.gate_up(self._normed(hidden, layer.mlp_norm)).chunk(2, dim=-1)
            hidden = hidden + layer.down(F.silu(gate) * up)
        last = hidden.view(batch, length, -1)[:, -1]
        # numpy's argmax is several times faster than torch's.
        return [int(token) for token in self._head(self._normed(last, self._norm)).numpy().argmax(-1)]

    def _attend(self, queries: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        """`[batch, length, heads, size]`; a single query row folds the heads that share a key head into rows."""
        keys, values = cache.transpose(2, 3)
        batch, length = queries.shape[:2]
        if length == 1:
            folded = queries.view(batch, self._kv_heads, -1, self._size)
            return F.scaled_dot_product_attention(folded, keys, values).view(batch, 1, self._heads, self._size)
        rows = F.scaled_dot_product_attention(queries.transpose(1, 2), keys, values, is_causal=True, enable_gqa=True)
        return rows.transpose(1, 2)

    def _normed(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), gain, self._epsilon)


if __name__ == "__main__":
    serve(FbgemmLlama)
