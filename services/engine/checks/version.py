"""What `--version` says where a model is computed. Loads neither torch nor a model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from services.engine.demo.model import default_cache_dir
from services.engine.model.native import binding
from services.engine.model.native.build import NativeKernelsUnavailable, built_library
from services.runtime.processes.version import installed, version_text


def engine_version_text(environ: Mapping[str, str]) -> str:
    """'kvrelay 1.2.3, Python 3.11.7, torch 2.13.0, kernels native avx512-vnni': those that `--kernels auto` takes on a CPU."""
    torch = installed("torch")
    cache_dir = Path(environ.get("KVRELAY_CACHE") or default_cache_dir()).expanduser()
    return f"{version_text(environ)}, {f'torch {torch}' if torch else 'no torch'}, kernels {_kernels(cache_dir)}"


def _kernels(cache_dir: Path) -> str:
    try:
        if built_library(cache_dir) is None:
            return "native (to be compiled at the first start)"
        return f"native {binding.load(cache_dir).kvr_instruction_set().decode()}"
    except NativeKernelsUnavailable as error:
        return f"torch ({error.message})"
