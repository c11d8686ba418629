"""config.json in its spellings, and clear errors for what is not supported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import ModelLoadError
from services.engine.model.config import ModelConfig, ModelFamily, RopeConfig, RopeScaling
from tests.tiny_models import tiny_config


def read(folder: Path, family: str = "llama", *, generation: dict[str, Any] | None = None, drop: str = "", **overrides: Any) -> ModelConfig:
    config = tiny_config(family, **overrides)
    config.pop(drop, None)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_sizes_are_read(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.family, config.layers, config.hidden_size, config.inner_size) == (ModelFamily.LLAMA, 2, 64, 128)
    assert (config.query_heads, config.kv_heads, config.head_dim, config.query_size, config.kv_size) == (4, 2, 16, 64, 32)
    assert (config.vocab_size, config.max_positions, config.norm_epsilon, config.tied) == (300, 4096, 1e-5, True)
    assert config.rope == RopeConfig(10_000.0)


def test_head_dim_and_kv_heads_have_defaults(tmp_path: Path) -> None:
    assert read(tmp_path, drop="head_dim").head_dim == 16
    assert read(tmp_path, drop="num_key_value_heads").kv_heads == 4


def test_each_family_has_its_own_biases_and_norms(tmp_path: Path) -> None:
    flags = {family: read(tmp_path, family) for family in ("llama", "qwen2", "qwen3", "mistral")}
    assert [config.qkv_bias for config in flags.values()] == [False, True, False, False]
    assert [config.qk_norm for config in flags.values()] == [False, False, True, False]
    assert not any(config.output_bias for config in flags.values())
    biased = read(tmp_path, "llama", attention_bias=True)
    assert biased.qkv_bias and biased.output_bias


def test_windows_follow_family_flag_and_layer(tmp_path: Path) -> None:
    assert read(tmp_path, "mistral", sliding_window=9).windows == (9, 9)
    assert read(tmp_path, "mistral", sliding_window=None).windows == (0, 0)
    assert read(tmp_path, "qwen2", sliding_window=9, use_sliding_window=False).windows == (0, 0)
    assert read(tmp_path, "qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1).windows == (0, 9)
    kinds = ["sliding_attention", "full_attention"]
    assert read(tmp_path, "qwen3", sliding_window=9, use_sliding_window=True, layer_types=kinds).windows == (9, 0)


def test_gemma_has_its_norms_scales_and_two_ropes(tmp_path: Path) -> None:
    config = read(tmp_path, "gemma3", drop="layer_types", num_hidden_layers=7, hidden_size=256, query_pre_attn_scalar=64)
    assert config.windows == (32, 32, 32, 32, 32, 0, 32)
    assert [config.rope_of(layer).theta for layer in (0, 5)] == [1e4, 1e6]
    assert config.post_norms and config.unit_gains and config.gelu and config.qk_norm
    assert (config.embedding_scale, config.query_scale) == (16.0, 0.125)
    plain = read(tmp_path, "mistral")
    assert not (plain.post_norms or plain.unit_gains or plain.gelu)
    assert (plain.embedding_scale, plain.query_scale, plain.rope_of(1)) == (1.0, 0.25, plain.rope)


def test_end_tokens_come_from_the_generation_config_first(tmp_path: Path) -> None:
    assert read(tmp_path).eos_ids == (2,)
    assert read(tmp_path, generation={"eos_token_id": [2, 0]}).eos_ids == (2, 0)
    (tmp_path / "generation_config.json").unlink()
    assert read(tmp_path, eos_token_id=None).eos_ids == ()
    assert read(tmp_path, drop="bos_token_id", generation={"bos_token_id": 4}).bos_id == 4


def test_both_spellings_of_rope_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, rope_theta=5.0e5).rope == RopeConfig(5.0e5)
    assert read(tmp_path, drop="rope_theta", rope_parameters={"rope_type": "default", "rope_theta": 5.0e5}).rope == RopeConfig(5.0e5)
    assert read(tmp_path, rope_scaling={"type": "linear", "factor": 2}).rope == RopeConfig(10_000.0, RopeScaling.LINEAR, 2.0)
    stretched = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 64}
    assert read(tmp_path, rope_scaling=stretched).rope == RopeConfig(10_000.0, RopeScaling.LLAMA3, 8.0, 1.0, 4.0, 64)


def test_llama3_stretching_keeps_short_waves_and_divides_long_ones() -> None:
    rope = RopeConfig(10_000.0, RopeScaling.LLAMA3, 8.0, 1.0, 4.0, original_positions=64)
    plain = RopeConfig(10_000.0).inverse_frequencies(64)
    for speed, stretched in zip(plain, rope.inverse_frequencies(64), strict=True):
        waves = 64 * speed / (2 * math.pi)
        if waves >= 4:
            assert stretched == speed
        elif waves <= 1:
            assert stretched == speed / 8
        else:
            assert speed / 8 < stretched < speed


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": None}, "none named"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "yarn"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"family": "gemma3", "hidden_activation": "silu"}, "silu"),
        ({"family": "gemma3", "final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"family": "gemma3", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"num_attention_heads": 3}, "evenly"),
        ({"head_dim": 15}, "even head_dim"),
        ({"hidden_size": "wide"}, "malformed"),
        ({"drop": "vocab_size"}, "vocab_size"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_what_is_not_supported_is_named(tmp_path: Path, overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read(tmp_path, **overrides)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    for content in ("{", "[]"):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ModelLoadError, match="JSON"):
            ModelConfig.from_folder(tmp_path)
