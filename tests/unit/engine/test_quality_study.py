"""The quality study measures what it says, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.quality import KINDS, REFERENCE, Reader, compare, windows_of
from tests.tiny_models import write_tiny_model

TEXT = {"alphabet": "a quick brown fox jumps over the lazy dog. " * 8}


def test_each_kind_is_held_against_float32_and_only_arithmetic_tells_them_apart(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", seed=3)
    windows = windows_of(folder, TEXT, 3, 40)
    readers = {name: Reader(folder, kind, windows.shape, "torch", threads=1) for name, kind in KINDS.items()}
    results = {each.kind: each for each in compare(readers, windows)}
    exact = results.pop(REFERENCE)
    assert (exact.change, exact.divergence, exact.agreement) == (0, 0, 1) and exact.perplexity > 1
    for each in results.values():
        assert each.perplexity == pytest.approx(exact.perplexity * (1 + each.change))
        assert 0 < each.divergence < 0.01 and each.agreement > 0.8
    assert results["int8-weights"].divergence < results["int8"].divergence


def test_windows_are_spread_over_every_text_and_too_short_a_text_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    windows = windows_of(folder, {"first": "a" * 100, "second": "b" * 100}, 4, 20)
    assert windows.shape == (4, 20) and set(windows[:2].flatten().tolist()).isdisjoint(windows[2:].flatten().tolist())
    with pytest.raises(ValueError, match="need more"):
        windows_of(folder, TEXT, 100, 512)
