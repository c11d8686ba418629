"""What one engine serves and how, and which values no model could be served with."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvrelay.errors import ConfigError
from services.engine.checks.start import EXACTNESS_CHECKS
from services.engine.demo.model import default_cache_dir
from services.engine.model.llama import DTYPES, ModelOptions

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Tokens a page can hold."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What one engine serves and how much of the machine it takes."""

    model_path: Path
    """Hugging Face folder."""
    model_name: str = ""
    """Name requests use; '' is the folder's name."""
    dtype: str = "bfloat16"
    """Dtype of the weights: 'bfloat16' or 'float32'."""
    kv_dtype: str = "bfloat16"
    """Dtype of the KV cache: 'bfloat16' or 'float32'."""
    quantization: str = "none"
    """'none', or 'int8' for int8 weights and activations."""
    kernels: str = "auto"
    """What computes: 'native', 'torch', or 'auto' for the native kernels where they can be had."""
    device: str = "cpu"
    num_pages: int = 0
    """Pages of the KV pool; 0 derives them from `kv_cache_bytes`."""
    kv_cache_bytes: int = 256 << 20
    """Size of the KV pool when `num_pages` is 0."""
    block_size: int = 16
    """Tokens a page."""
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 32
    max_waiting: int = 128
    policy: str = "chunked"
    """How a step is filled: one of `policies.POLICIES`."""
    tbt_objective_ms: float = 0.0
    """Policy dynamic: how long a step may be expected to take; 0 with any other policy."""
    prefill_order: str = "fcfs"
    """Whose prompt is computed first: one of `policies.ORDERS`."""
    explain_schedule: str = ""
    """File to which each step is explained; '' for none."""
    profile: str = ""
    """File of the model's step cost on this machine, to begin with; '' learns it from the first steps."""
    exactness_check: str = "warn"
    """What to do where answers would depend on their company: one of `checks.start.EXACTNESS_CHECKS`."""
    max_context_tokens: int = 0
    """Prompt and answer together; 0 is the model's own limit."""
    threads: int = 1
    """Computing threads. Rows keep their bits with any number in the native kernels, with one in torch's operators."""
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Where compiled kernels are kept."""
    cpus: tuple[int, ...] = ()
    """Cores to pin the computing threads to; empty leaves them free."""
    debug: bool = False
    """Check the pages' integrity whenever the engine is idle."""

    def check(self) -> ModelOptions:
        """How the model is computed; `ConfigError` for a value that no model could be served with."""
        for name, value in (("dtype", self.dtype), ("kv_dtype", self.kv_dtype)):
            if value not in DTYPES:
                raise ConfigError(f"{name} must be one of {', '.join(DTYPES)}, got {value!r}")
        if self.exactness_check not in EXACTNESS_CHECKS:
            raise ConfigError(f"exactness_check must be one of {', '.join(EXACTNESS_CHECKS)}, got {self.exactness_check!r}")
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(f"block_size must be one of {', '.join(map(str, BLOCK_SIZES))} tokens, got {self.block_size}")
        cores = len(os.sched_getaffinity(0))
        if not 1 <= self.threads <= cores:
            raise ConfigError(f"threads must be from 1 to the {cores} cores it may run on, got {self.threads}")
        if self.num_pages < 0 or self.max_context_tokens < 0:
            raise ConfigError(f"num_pages and max_context_tokens must be 0 or more, got {self.num_pages} and {self.max_context_tokens}")
        try:
            device = torch.device(self.device)
        except RuntimeError as error:
            raise ConfigError(f"device must be one that torch knows, got {self.device!r}") from error
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"there is no device {self.device} here: torch {torch.__version__} finds {torch.cuda.device_count()}")
        return ModelOptions(
            DTYPES[self.dtype], DTYPES[self.kv_dtype], self.quantization, device, self.kernels, self.threads, self.cache_dir
        )
