"""Loading safetensors: fused, sharded, cast, and refused when they do not fit."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.errors import ModelLoadError
from services.engine.model.config import ModelConfig
from services.engine.model.weights import ModelWeights, load_weights, weights_digest
from tests.tiny_models import write_tiny_model

CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> ModelWeights:
    return load_weights(folder, ModelConfig.from_folder(folder), dtype, CPU)


def test_tensors_are_fused_in_order(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2", tied=False)
    raw, weights = load_file(folder / "model.safetensors"), load(folder)
    attention, layer = "model.layers.1.self_attn.", weights.layers[1]
    assert torch.equal(layer.qkv, torch.cat([raw[f"{attention}{part}_proj.weight"] for part in "qkv"]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([raw[f"{attention}{part}_proj.bias"] for part in "qkv"]))
    assert torch.equal(layer.gate_up, torch.cat([raw[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")]))
    assert torch.equal(weights.head, raw["lm_head.weight"])


def test_shards_give_the_same_weights_as_one_file(tmp_path: Path) -> None:
    one, three = (load(write_tiny_model(tmp_path / str(shards), "qwen3", shards=shards)) for shards in (1, 3))
    assert torch.equal(one.embedding, three.embedding) and one.head is one.embedding
    for left, right in zip(one.layers, three.layers, strict=True):
        assert torch.equal(left.qkv, right.qkv) and torch.equal(left.down, right.down)
        assert left.query_norm is not None and right.query_norm is not None and torch.equal(left.query_norm, right.query_norm)


def test_weights_are_cast(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    assert torch.equal(load(folder, torch.bfloat16).layers[0].down, load(folder).layers[0].down.bfloat16())


def test_redundant_tensors_are_passed_over(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    raw = load_file(file)
    raw["lm_head.weight"] = raw["model.embed_tokens.weight"].clone()
    raw["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    save_file(raw, file)
    load(folder)


def _drop(raw: Tensors) -> None:
    del raw["model.layers.1.mlp.up_proj.weight"]


def _add(raw: Tensors) -> None:
    raw["model.layers.2.mlp.up_proj.weight"] = torch.zeros(128, 64)


def _reshape(raw: Tensors) -> None:
    raw["model.layers.0.self_attn.k_proj.weight"] = torch.zeros(31, 64)


def _quantise(raw: Tensors) -> None:
    raw["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)


def _spoil(raw: Tensors) -> None:
    raw["model.layers.1.mlp.down_proj.weight"][3, 5] = math.nan


def _overflow(raw: Tensors) -> None:
    raw["model.embed_tokens.weight"] = raw["model.embed_tokens.weight"].double()
    raw["model.embed_tokens.weight"][7, 0] = -1e300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"lacks 1 tensors, the first is model\.layers\.1\.mlp\.up_proj\.weight"),
        (_add, r"unexpected .* model\.layers\.2\.mlp\.up_proj\.weight"),
        (_reshape, r"model\.layers\.0\.self_attn\.k_proj\.weight has shape \[31, 64\], config\.json asks for \[32, 64\]"),
        (_quantise, r"model\.norm\.weight is torch\.int8"),
        (_spoil, r"model\.layers\.1\.mlp\.down_proj\.weight holds values that are not finite as torch\.float32"),
        (_overflow, r"model\.embed_tokens\.weight holds values that are not finite as torch\.float32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, change: Callable[[Tensors], None], message: str) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    raw = load_file(folder / "model.safetensors")
    change(raw)
    save_file(raw, folder / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load(folder)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ModelLoadError, match="not a readable safetensors file"):
        load(folder)
    file.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="safetensors only"):
        load(folder)


def test_a_missing_shard_and_an_index_that_leads_astray_are_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", shards=2)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="model-00002-of-00002"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "../other.safetensors"}}))
    with pytest.raises(ModelLoadError, match="outside"):
        load(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="weight_map"):
        load(folder)


def test_the_digest_is_of_names_and_content(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama", shards=2)
    expected = hashlib.sha256()
    for name in ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"):
        content = (folder / name).read_bytes()
        expected.update(name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    assert weights_digest(folder) == expected.digest()
    assert weights_digest(write_tiny_model(tmp_path / "again", "llama", shards=2)) == expected.digest()
    assert weights_digest(write_tiny_model(tmp_path / "other", "llama", shards=2, seed=1)) != expected.digest()
    (folder / "config.json").write_text("{}")
    assert weights_digest(folder) == expected.digest()
