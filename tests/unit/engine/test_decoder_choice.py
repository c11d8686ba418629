"""Which decoder computes: native kernels where they can be had, torch's operators otherwise, and what cannot be had is said at once."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvrelay.errors import ConfigError
from services.engine.checks.exactness import probe_model
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import DTYPES, ModelOptions, load_model
from tests.engine_runs import KERNELS, MODES, options
from tests.tiny_models import write_tiny_model


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelOptions:
    """Options for a machine without a compiler and without kernels of an earlier start."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return ModelOptions(cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("mode", MODES)
def test_the_decoder_asked_for_computes(tmp_path: Path, mode: str, kernels: str) -> None:
    assert load_model(write_tiny_model(tmp_path, "llama"), options(mode, kernels)).decoder.name.split()[0] == kernels


def test_without_a_compiler_torch_computes_and_the_log_says_so(
    tmp_path: Path, no_compiler: ModelOptions, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert load_model(write_tiny_model(tmp_path, "llama"), no_compiler).decoder.name == "torch"
    assert [record.message for record in caplog.records if "compiler" in record.message]


def test_without_a_compiler_native_kernels_are_refused(tmp_path: Path, no_compiler: ModelOptions) -> None:
    with pytest.raises(ConfigError, match="compiler"):
        load_model(write_tiny_model(tmp_path, "llama"), replace(no_compiler, kernels="native"))


def test_a_model_of_odd_sizes_is_computed_by_torch(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", head_dim=24)
    assert load_model(folder).decoder.name == "torch"
    with pytest.raises(ConfigError, match="head_dim"):
        load_model(folder, ModelOptions(kernels="native"))


@pytest.mark.parametrize("kv_dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_the_way_through_other_devices_keeps_shapes_and_dtypes(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """On the device that computes nothing: what would not fit together on a GPU does not there."""
    model = probe_model(ModelOptions(dtype, kv_dtype, device=torch.device("meta")))
    pool = KvPool(model.config, 40, 16, kv_dtype, "meta")
    entries = [
        ForwardEntry([1] * 200, 0, range(13), True),
        ForwardEntry([1], 17, [13, 14], False),
        ForwardEntry([1], 300, range(15, 40), True),
    ]
    logits = model.forward(entries, pool)
    assert (logits.shape, logits.dtype, logits.device.type) == ((2, model.config.vocab_size), torch.float32, "meta")


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"kv_dtype": torch.int8},
        {"quantization": "int4"},
        {"kernels": "triton"},
        {"kernels": "native", "device": torch.device("cuda")},
        {"quantization": "int8", "device": torch.device("cuda")},
    ],
    ids=str,
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(ModelOptions(), **changes)  # type: ignore[arg-type]
