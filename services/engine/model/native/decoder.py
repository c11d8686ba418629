"""The decoder in this suite's own kernels: one call into C++ computes a whole step."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from services.engine.model.config import ModelConfig
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.layers import Rope
from services.engine.model.native import binding
from services.engine.model.native.binding import Kind, Which, WhichNorm
from services.engine.model.native.build import THIS_CPU, NativeKernelsUnavailable
from services.engine.model.quantization import Int8Weight
from services.engine.model.weights import LayerWeights, ModelWeights

ARITHMETIC = 1
"""Counts up with every change to a result's bits, so that workers of before and after exchange no KV. A change that only makes the
kernels faster leaves it alone; a test holds the bits that belong to it."""
_LANES = 16
_KINDS = {torch.float32: Kind.FLOAT32, torch.bfloat16: Kind.BFLOAT16}


class NativeDecoder:
    """See `Decoder`. Any number of threads and any x86 CPU with AVX2 or better give the same bits.

    The weights are packed into memory of its own; only the embedding and the rotary tables stay torch's.
    """

    def __init__(
        self, config: ModelConfig, weights: ModelWeights, threads: int, cache_dir: Path, target_flags: tuple[str, ...] = THIS_CPU
    ) -> None:
        """Builds or finds the library and packs the weights. Raises `NativeKernelsUnavailable` for what it cannot compute."""
        _check(config, weights)
        self._library = binding.load(cache_dir, target_flags)
        self.name = f"native {self._library.kvr_instruction_set().decode()}"
        self.numerics = numerics(platform.machine())
        self._vocab = config.vocab_size
        self._stride = self._library.kvr_padded(config.vocab_size)
        self._embedding = weights.embedding.contiguous()
        self._ropes = {config.rope_of(layer): Rope(config, torch.device("cpu"), layer).table for layer in range(config.layers)}
        sizes = binding.Config(
            layers=config.layers,
            hidden=config.hidden_size,
            inner=config.inner_size,
            query_heads=config.query_heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_positions=config.max_positions,
            gelu=config.gelu,
            norm_epsilon=config.norm_epsilon,
            query_scale=config.query_scale,
            embedding_scale=config.embedding_scale,
            threads=threads,
        )
        self._model = self._library.kvr_create(ctypes.byref(sizes))
        if not self._model:
            raise MemoryError(f"no memory, or no {threads} threads, for the native kernels")
        self._library.kvr_set_embedding(self._model, self._embedding.data_ptr(), self._embedding.dtype is torch.bfloat16)
        self._linear(-1, 0, weights.head, None)
        self._norm(-1, 0, weights.final_norm)
        for number, (layer, window) in enumerate(zip(weights.layers, config.windows, strict=True)):
            self._add_layer(number, layer, window, self._ropes[config.rope_of(number)])

    def __del__(self) -> None:
        if getattr(self, "_model", None):
            self._library.kvr_destroy(self._model)

    def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
        """See `Decoder.forward`. Runs without the interpreter's lock."""
        counts = [len(entry.token_ids) for entry in entries]
        ends = list(itertools.accumulate(counts))
        sample_rows = [end - 1 for entry, end in zip(entries, ends, strict=True) if entry.sample]
        tables = [entry.pages[: -(-entry.end // pool.page_size)] for entry in entries]
        token_ids = _int32(itertools.chain.from_iterable(entry.token_ids for entry in entries))
        starts, spans = _int32(entry.start for entry in entries), _int32(counts)
        table_starts = torch.tensor([0, *itertools.accumulate(map(len, tables))][:-1], dtype=torch.int64)
        pages, rows = _int32(itertools.chain.from_iterable(tables)), _int32(sample_rows)
        logits = torch.empty(len(sample_rows), self._stride)
        step = binding.Step(
            tokens=ends[-1],
            spans=len(entries),
            samples=len(sample_rows),
            token_ids=token_ids.data_ptr(),
            starts=starts.data_ptr(),
            counts=spans.data_ptr(),
            table_starts=table_starts.data_ptr(),
            pages=pages.data_ptr(),
            sample_rows=rows.data_ptr(),
            logits=logits.data_ptr(),
            logits_stride=self._stride,
            pool=pool.data.data_ptr(),
            page_size=pool.page_size,
            pool_bf16=pool.dtype is torch.bfloat16,
        )
        if not self._library.kvr_forward(self._model, ctypes.byref(step)):
            raise MemoryError(f"no memory for a step of {ends[-1]} tokens")
        return logits[:, : self._vocab]

    def _add_layer(self, number: int, layer: LayerWeights, window: int, rope: torch.Tensor) -> None:
        self._library.kvr_set_layer(self._model, number, window, rope.data_ptr())
        self._linear(number, Which.QKV, layer.qkv, layer.qkv_bias)
        self._linear(number, Which.OUTPUT, layer.output, layer.output_bias)
        self._linear(number, Which.GATE_UP, layer.gate_up, None)
        self._linear(number, Which.DOWN, layer.down, None)
        norms = {
            WhichNorm.INPUT: layer.input_norm,
            WhichNorm.QUERY: layer.query_norm,
            WhichNorm.KEY: layer.key_norm,
            WhichNorm.MLP: layer.mlp_norm,
            WhichNorm.AFTER_ATTENTION: layer.post_attention_norm,
            WhichNorm.AFTER_MLP: layer.post_mlp_norm,
        }
        for which, gain in norms.items():
            if gain is not None:
                self._norm(number, which, gain)

    def _linear(self, layer: int, which: int, weight: torch.Tensor | Int8Weight, bias: torch.Tensor | None) -> None:
        wide_bias = bias.float().contiguous() if bias is not None else None
        if isinstance(weight, Int8Weight):
            kind, values, scales, block = Kind.INT8, weight.values.contiguous(), weight.scales.contiguous(), weight.block
        else:
            kind, values, scales, block = _KINDS[weight.dtype], weight.contiguous(), None, 1
        columns, depth = values.shape
        packed = self._library.kvr_set_linear(
            self._model, layer, which, kind, values.data_ptr(), _pointer(scales), _pointer(wide_bias), columns, depth, block
        )
        if not packed:
            raise MemoryError(f"no memory to pack a weight of {columns} x {depth}")

    def _norm(self, layer: int, which: int, gain: torch.Tensor) -> None:
        wide = gain.float().contiguous()
        if not self._library.kvr_set_norm(self._model, layer, which, wide.data_ptr(), wide.numel()):
            raise MemoryError(f"no memory for a norm of {wide.numel()}")


def numerics(machine: str) -> str:
    """See `Decoder.numerics`: 'native-1' on every x86 CPU; other architectures, on which nothing was compared, go by their names too."""
    return f"native-{ARITHMETIC}" + ("" if machine in ("x86_64", "AMD64") else f"-{machine}")


def _check(config: ModelConfig, weights: ModelWeights) -> None:
    """Sixteen lanes at a time: sizes that aren't whole vectors would need tails nobody's model has."""
    for name in ("hidden_size", "inner_size", "head_dim"):
        if getattr(config, name) % _LANES:
            raise NativeKernelsUnavailable(f"the native kernels need a {name} that is a multiple of {_LANES}, got {getattr(config, name)}")
    if config.query_heads // config.kv_heads > binding.MAX_GROUP:
        raise NativeKernelsUnavailable(f"the native kernels serve up to {binding.MAX_GROUP} query heads for each KV head")
    if weights.embedding.device.type != "cpu" or weights.embedding.dtype not in _KINDS:
        raise NativeKernelsUnavailable(f"no native kernels for {weights.embedding.dtype} on {weights.embedding.device}")


def _int32(values: Iterable[int]) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32)


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
