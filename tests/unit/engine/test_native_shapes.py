"""The native kernels where they take other ways: unusual heads, windows and numbers of threads, and int8 products at their largest."""

from __future__ import annotations

import platform
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.engine.checks.exactness import violations
from services.engine.demo.model import default_cache_dir
from services.engine.model.config import ModelConfig
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import load_model
from services.engine.model.native.build import COMPILERS, THIS_CPU
from services.engine.model.native.decoder import NativeDecoder
from services.engine.model.quantization import LARGEST, Int8Weight
from services.engine.model.weights import load_weights
from tests.engine_runs import options
from tests.tiny_models import write_tiny_model
from tests.unit.engine.test_native_kernels import OTHER_TARGETS, SIZES, assert_same_bits, decoder_for, run

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="native kernels need a C++ compiler")
x86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="flags of x86 CPUs")

SHAPES = {
    "more query heads than a tile has rows": {"num_attention_heads": 16, "num_key_value_heads": 1},
    "two KV heads with more": {"num_attention_heads": 40, "num_key_value_heads": 2},
    "as many query heads as there may be": {"num_attention_heads": 96, "num_key_value_heads": 1},
    "heads that end with half a register": {"head_dim": 48, "num_key_value_heads": 2},
    "a KV head for each query head": {"head_dim": 80, "num_key_value_heads": 4},
    "a window that begins inside a block": {"sliding_window": 70, "num_key_value_heads": 2},
}
"""Of attention: of each, a decoded row and a row of a prompt's chunk may be computed by different code."""
KV_DTYPES = ["float32", "bfloat16"]
"""Modes that differ in what keys and values are kept in."""


def write_shape(folder: Path, shape: str) -> Path:
    return write_tiny_model(folder, "mistral" if "sliding_window" in SHAPES[shape] else "llama", **SIZES | SHAPES[shape])


@pytest.mark.parametrize("mode", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_decoded_and_in_any_chunk(tmp_path: Path, shape: str, mode: str) -> None:
    model = load_model(write_shape(tmp_path, shape), options(mode, "native"))
    assert violations(model, lengths=(3, 70, 200)) == []


@x86
@pytest.mark.parametrize("name", OTHER_TARGETS)
@pytest.mark.parametrize("mode", KV_DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_instruction_set_gives_the_same_bits(tmp_path: Path, shape: str, mode: str, name: str) -> None:
    folder = write_shape(tmp_path, shape)
    other = decoder_for(folder, mode, target=OTHER_TARGETS[name])
    assert_same_bits(run(decoder_for(folder, mode), folder, mode), run(other, folder, mode))


@pytest.mark.parametrize("shape", SHAPES)
def test_torch_computes_nearly_the_same(tmp_path: Path, shape: str) -> None:
    folder = write_shape(tmp_path, shape)
    with torch.inference_mode():
        native, expected = (
            run(load_model(folder, options("float32", kernels)).decoder, folder, "float32") for kernels in ("native", "torch")
        )
    for ours, theirs in zip(native, expected, strict=True):
        assert ((ours - theirs).abs().max() / theirs.abs().max()).item() < 2e-5


def test_more_threads_than_there_is_work_for_change_nothing(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen3", **SIZES)
    expected = run(decoder_for(folder, "bfloat16"), folder, "bfloat16")
    assert_same_bits(expected, run(decoder_for(folder, "bfloat16", threads=16), folder, "bfloat16"))


@pytest.mark.parametrize("target", [THIS_CPU, *(pytest.param(flags, marks=x86) for flags in OTHER_TARGETS.values())], ids=str)
def test_the_largest_int8_products_are_exact(tmp_path: Path, target: tuple[str, ...]) -> None:
    """Every input and every weight is 127 or -127: sums of two products that are kept in 16 bits would saturate if one were offset."""
    folder = write_tiny_model(tmp_path, "llama", **SIZES)
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    inputs, rows = (torch.randint(2, weights.embedding.shape, generator=generator) * 2 - 1 for _ in range(2))
    for signs in (inputs, rows):
        signs[0], signs[1] = 1, -1
    scales = 0.5 + torch.rand(config.vocab_size, generator=generator)
    weights = replace(
        weights,
        embedding=inputs.float(),
        layers=tuple(replace(each, output=torch.zeros_like(each.output), down=torch.zeros_like(each.down)) for each in weights.layers),
        final_norm=torch.ones(config.hidden_size),
        head=Int8Weight((rows * LARGEST).to(torch.int8), scales, block=1),
    )
    decoder = NativeDecoder(config, weights, 1, default_cache_dir(), target)
    tokens = range(13)
    logits = decoder.forward([ForwardEntry([token], 0, [token], True) for token in tokens], KvPool(config, len(tokens)))
    normed = (1 + config.norm_epsilon) ** -0.5
    expected = (inputs[: len(tokens)] @ rows.T).double() * LARGEST * normed * scales
    torch.testing.assert_close(logits, expected.float(), rtol=1e-6, atol=0)
