"""The demo model for tests that want a real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvrelay.errors import ModelLoadError
from services.engine.demo.model import default_cache_dir, ensure_demo_model, find_gguf


def demo_folder(dtype: str = "bfloat16") -> Path:
    """Its folder, converted on first use; without what it is made of the test is skipped."""
    skip_without_demo_model()
    cache = os.environ.get("KVRELAY_CACHE")
    return ensure_demo_model(Path(cache) if cache else default_cache_dir(), dtype)


def skip_without_demo_model() -> None:
    """Skips a test that converts it itself where its package, or the reader of that, is missing."""
    pytest.importorskip("gguf")
    try:
        find_gguf()
    except ModelLoadError as error:
        pytest.skip(error.message)
