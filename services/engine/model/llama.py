"""One model, ready to compute: prefill chunks and decode rows of many sequences in one call, over a paged KV pool."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvrelay.errors import ConfigError
from services.engine.demo.model import default_cache_dir
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import Decoder, ForwardEntry
from services.engine.model.graph_decode import CudaCapture, GraphDecoder
from services.engine.model.kv_pool import KvPool
from services.engine.model.native.build import NativeKernelsUnavailable
from services.engine.model.native.decoder import NativeDecoder
from services.engine.model.quantization import SCHEMES
from services.engine.model.torch_decoder import TorchDecoder
from services.engine.model.weights import ModelWeights, load_weights, quantize

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""What weights and KV may be kept in."""
KERNELS = ("auto", "native", "torch")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is computed."""

    dtype: torch.dtype = torch.bfloat16
    """Of the weights. Activations are float32 on CPUs, and of this dtype elsewhere."""
    kv_dtype: torch.dtype = torch.bfloat16
    """Of the KV pool."""
    quantization: str = "none"
    """'int8': linears multiply int8 weights and activations (see quantization.py), on CPUs."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    kernels: str = "auto"
    """'native' is the suite's own, for CPUs; 'auto' takes them where they can be had, and CUDA graphs (for decode) on CUDA."""
    threads: int = 1
    """Threads of the native kernels; torch has its own setting."""
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Where the native kernels are kept once they are compiled."""

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what cannot be computed."""
        for name, dtype in (("dtype", self.dtype), ("kv_dtype", self.kv_dtype)):
            if dtype not in DTYPES.values():
                raise ConfigError(f"{name} must be one of {', '.join(DTYPES)}, got {str(dtype).removeprefix('torch.')!r}")
        if self.quantization not in SCHEMES:
            raise ConfigError(f"quantization must be one of {', '.join(SCHEMES)}, got {self.quantization!r}")
        if self.quantization != "none" and self.device.type != "cpu":
            raise ConfigError(f"quantization {self.quantization!r} computes on CPUs, not on {self.device}")
        if self.kernels not in KERNELS:
            raise ConfigError(f"kernels must be one of {', '.join(KERNELS)}, got {self.kernels!r}")
        if self.kernels == "native" and self.device.type != "cpu":
            raise ConfigError(f"native kernels compute on CPUs, not on {self.device}")


class LlamaModel:
    """Llama, Qwen2, Qwen3, Mistral and Gemma 3. Owned by one thread."""

    def __init__(self, config: ModelConfig, weights: ModelWeights, options: ModelOptions) -> None:
        """Takes over the weights, not quantized yet and of the options' dtype and device. `ConfigError` if the kernels cannot be had."""
        self.config = config
        self.options = options
        if options.quantization != "none":
            weights = quantize(weights)
        self.decoder = choose_decoder(config, weights, options)

    @torch.inference_mode()
    def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
        """Computes at least one entry, no two of the same sequence; see `Decoder.forward`. Blocks.

        Raises `ValueError` for an entry that is empty, has a token outside the vocabulary, is too long for its pages or the
        context, or names a page outside the pool.
        """
        if not entries:
            raise ValueError("a step needs entries")
        for entry in entries:
            self._check(entry, pool)
        for entry in entries:
            last, filled = divmod(entry.end, pool.page_size)
            if filled and last * pool.page_size >= entry.start:
                pool.zero_page(entry.pages[last])
        return self.decoder.forward(entries, pool)

    def _check(self, entry: ForwardEntry, pool: KvPool) -> None:
        if not entry.token_ids or entry.start < 0:
            raise ValueError(f"an entry needs tokens and a position, got {len(entry.token_ids)} from {entry.start}")
        if min(entry.token_ids) < 0 or max(entry.token_ids) >= self.config.vocab_size:
            raise ValueError(f"a token lies outside the vocabulary of {self.config.vocab_size}")
        if entry.end > self.config.max_positions:
            raise ValueError(f"{entry.end} tokens do not fit the context of {self.config.max_positions}")
        if entry.end > len(entry.pages) * pool.page_size:
            raise ValueError(f"{len(entry.pages)} pages of {pool.page_size} do not hold {entry.end} tokens")
        if min(entry.pages) < 0 or max(entry.pages) >= pool.num_pages:
            raise ValueError(f"a page lies outside the pool's {pool.num_pages}")


def choose_decoder(config: ModelConfig, weights: ModelWeights, options: ModelOptions) -> Decoder:
    """The decoder that `options.kernels` asks for; `ConfigError` if that cannot be had here."""
    if options.kernels == "auto" and options.device.type == "cuda":
        return GraphDecoder(TorchDecoder(config, weights), CudaCapture(options.device))
    if options.kernels == "torch" or options.device.type != "cpu":
        return TorchDecoder(config, weights)
    try:
        return NativeDecoder(config, weights, options.threads, options.cache_dir)
    except NativeKernelsUnavailable as error:
        if options.kernels == "native":
            raise ConfigError(error.message) from error
        log.warning("computing with torch's operators, which are slower: %s", error.message)
        return TorchDecoder(config, weights)


def load_model(folder: Path, options: ModelOptions | None = None) -> LlamaModel:
    """Reads config and weights of a Hugging Face folder; `ModelLoadError` if they can't be served. Blocks."""
    options = options or ModelOptions()
    config = ModelConfig.from_folder(folder)
    return LlamaModel(config, load_weights(folder, config, options.dtype, options.device), options)
