"""How large a prompt's KV is and how long it travels, said before anything runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from services.engine.cost.coefficients import StepCoefficients
from services.engine.cost.kv_size import exposure, kv_size, main, render
from services.engine.model.config import ModelConfig

GB = 1e9


@pytest.fixture
def config(tiny_model: Path) -> ModelConfig:
    return ModelConfig.from_folder(tiny_model)


def test_the_formula_of_the_books(config: ModelConfig) -> None:
    """2 x 32 layers x 32 heads x 128 x 4,096 tokens x 2 bytes: 2.1 GB, some 3 ms at 600 GB/s and some 170 ms at 12.5 GB/s."""
    large = replace(config, layers=32, kv_heads=32, query_heads=32, head_dim=128, max_positions=8192)
    size = kv_size(large, tokens=4096, link_bytes_per_s=600 * GB, kv_dtype="bfloat16", block_size=16)
    assert size.prompt_bytes == size.moved_bytes == 2 * 32 * 32 * 128 * 4096 * 2
    assert size.transfer_s == pytest.approx(3.58e-3, rel=0.01)
    slow = kv_size(large, tokens=4096, link_bytes_per_s=12.5 * GB, kv_dtype="bfloat16", block_size=16)
    assert slow.transfer_s == pytest.approx(0.172, rel=0.01)


def test_whole_blocks_move_and_cached_ones_stay(config: ModelConfig) -> None:
    size = kv_size(config, tokens=100, link_bytes_per_s=GB, kv_dtype="float32", block_size=16, cached_tokens=35)
    assert size.moved_blocks == 7 - 2
    assert size.moved_bytes == 5 * 16 * size.token_bytes
    everything = kv_size(config, tokens=96, link_bytes_per_s=GB, kv_dtype="float32", block_size=16, cached_tokens=96)
    assert everything.moved_bytes == everything.transfer_s == 0


@pytest.mark.parametrize("wrong", [{"tokens": 10**9}, {"tokens": 8, "cached_tokens": 9}])
def test_what_no_model_could_hold_is_refused(config: ModelConfig, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        kv_size(config, link_bytes_per_s=GB, kv_dtype="float32", block_size=16, **wrong)


def test_beside_prefill_only_the_last_chunk_of_a_fast_link_is_left_and_all_of_a_slow_one(config: ModelConfig) -> None:
    a_second_a_token = StepCoefficients(0.0, (1.0,), 0.0, 0.0, 0.0, 0.0, row_knots=(1,))
    fast = kv_size(config, tokens=64, link_bytes_per_s=GB, kv_dtype="float32", block_size=16)
    beside = exposure(fast, a_second_a_token, tokens=64, cached_tokens=0, budget=16)
    assert beside.prefill_s == pytest.approx(4 * 15.0)
    assert beside.exposed_s == pytest.approx(fast.transfer_s / 4)
    slow = replace(fast, transfer_s=400.0)
    assert exposure(slow, a_second_a_token, tokens=64, cached_tokens=0, budget=16).exposed_s == pytest.approx(15.0 + 400.0 - 60.0)
    assert "time to first token" in render(fast, beside)


def test_the_command_speaks_json_and_of_what_is_wrong(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--model={tiny_model}", "--tokens=100", "--link=1", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out)["moved_blocks"] == 7
    assert main(["--model=/no/such/folder", "--tokens=100", "--link=1"], {}) == 1
    assert "MODEL_LOAD_FAILED" in capsys.readouterr().err
