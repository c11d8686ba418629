"""What is wrong with an engine's settings that shows without torch, for whoever starts workers: before it starts anything.

The checks are the engine's own, which makes them again.
"""

from __future__ import annotations

from pathlib import Path

from kvrelay.errors import ConfigError
from services.engine.cost.coefficients import Floors
from services.engine.cost.profile import read_profile
from services.engine.model.config import ModelConfig
from services.engine.model.native.build import NativeKernelsUnavailable, built_library


def check_kernels(kernels: str, cache_dir: Path) -> None:
    """`ConfigError` if native kernels are insisted on and no compiler is there to make them."""
    if kernels != "native":
        return
    try:
        built_library(cache_dir)
    except NativeKernelsUnavailable as error:
        raise ConfigError(f"--kernels native cannot be had here, only auto or torch: {error.message}", setting="kernels") from error


def check_profile(profile: str) -> None:
    """`ConfigError` for a file that is no profile; '' is none at all."""
    if profile:
        read_profile(Path(profile).expanduser())


def check_model(folder: Path, *, dtype: str, kv_dtype: str, quantization: str, block_size: int, kv_cache_bytes: int, profile: str) -> None:
    """`ModelLoadError` for a folder without a model that can be computed; `ConfigError` where the other settings do not suit the model."""
    floors = Floors.of(ModelConfig.from_folder(folder), dtype=dtype, kv_dtype=kv_dtype, quantization=quantization)
    pages_in(kv_cache_bytes, block_size * floors.kv_position_bytes)
    if profile:
        read_profile(Path(profile).expanduser(), floors)


def pages_in(kv_cache_bytes: int, page_bytes: int) -> int:
    """Pages of a KV pool of that size; `ConfigError` if it holds none."""
    if kv_cache_bytes < page_bytes:
        raise ConfigError(
            f"--kv-cache-mib must be enough for one page, which takes {page_bytes / (1 << 20):g} MiB, got {kv_cache_bytes / (1 << 20):g}",
            setting="kv_cache_mib",
        )
    return kv_cache_bytes // page_bytes
