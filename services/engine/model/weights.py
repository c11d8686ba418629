"""Weights from safetensors files into fused tensors. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from kvrelay.errors import ModelLoadError
from services.engine.model.config import ModelConfig, read_json
from services.engine.model.quantization import QUANTIZED, Int8Weight, quantize_weight

_DIGEST_BLOCK_BYTES = 4 << 20
_INDEX_NAME = "model.safetensors.index.json"
_SINGLE_NAME = "model.safetensors"

Matrix = torch.Tensor | Int8Weight
"""A linear's weight `[out, in]`, of the model's dtype or quantized."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors; vectors are float32."""

    input_norm: torch.Tensor
    """`[hidden]`"""
    qkv: Matrix
    """`[query_size + 2 * kv_size, hidden]`: query rows, then key, then value."""
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    """`[head_dim]`"""
    key_norm: torch.Tensor | None
    output: Matrix
    """`[hidden, query_size]`"""
    output_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Matrix
    """`[2 * inner, hidden]`: gate rows, then up."""
    down: Matrix
    """`[hidden, inner]`"""
    post_attention_norm: torch.Tensor | None = None
    """`[hidden]`, like the next: of what attention, or the MLP, adds to the residual."""
    post_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """A whole model's tensors."""

    embedding: torch.Tensor
    """`[vocab, hidden]`"""
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor
    head: Matrix
    """`[vocab, hidden]`; when tied the embedding itself, or made from it."""


def tensor_files(folder: Path) -> list[Path]:
    """The safetensors files of a model folder in name order; `ModelLoadError` if there is none or one is missing."""
    index = folder / _INDEX_NAME
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} has no weight_map", folder=folder)
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise ModelLoadError(f"{index} names files outside its folder", folder=folder)
    else:
        names = [_SINGLE_NAME]
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{folder} has no {file.name}; weights are read from safetensors only", folder=folder)
    return files


def weights_digest(folder: Path) -> bytes:
    """SHA-256 over the tensor files in name order: of each its name, a zero byte, its length (8 bytes, little-endian), its content.

    Reads every byte in blocks of 4 MiB and blocks meanwhile (about half a second for 270 MB).
    """
    digest = hashlib.sha256()
    block = memoryview(bytearray(_DIGEST_BLOCK_BYTES))
    for file in tensor_files(folder):
        digest.update(file.name.encode() + b"\0" + file.stat().st_size.to_bytes(8, "little"))
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(block):
                digest.update(block[:count])
    return digest.digest()


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> ModelWeights:
    """Loads and casts all tensors; `ModelLoadError` names the first that is missing, unexpected or of another shape."""
    weights, wanted = _allocate(config, dtype, device)
    for file in tensor_files(folder):
        for name, tensor in _tensors(file):
            if _is_redundant(name, config):
                continue
            target = wanted.pop(name, None)
            if target is None:
                raise ModelLoadError(f"{file.name} holds an unexpected (or repeated) tensor {name}", folder=folder, tensor=name)
            if tensor.shape != target.shape:
                raise ModelLoadError(
                    f"tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(target.shape)}", folder=folder, tensor=name
                )
            if not tensor.is_floating_point():
                raise ModelLoadError(f"tensor {name} is {tensor.dtype}; only floating point is supported", folder=folder, tensor=name)
            target.copy_(tensor)
            if not torch.stack(target.aminmax()).isfinite().all():  # NaN shows in both; looking at each value takes thirty times longer
                raise ModelLoadError(f"tensor {name} holds values that are not finite as {target.dtype}", folder=folder, tensor=name)
            if config.unit_gains and name.endswith("norm.weight"):
                target += 1
    if wanted:
        first = next(iter(wanted))
        raise ModelLoadError(f"{folder} lacks {len(wanted)} tensors, the first is {first}", folder=folder, tensor=first)
    return weights


def quantize(weights: ModelWeights) -> ModelWeights:
    """The same model with int8 linears (`quantization.QUANTIZED`). Blocks."""

    def quantized(name: str, weight: Matrix) -> Matrix:
        return quantize_weight(weight) if name in QUANTIZED and isinstance(weight, torch.Tensor) else weight

    layers = tuple(
        replace(
            layer,
            qkv=quantized("qkv", layer.qkv),
            output=quantized("output", layer.output),
            gate_up=quantized("gate_up", layer.gate_up),
            down=quantized("down", layer.down),
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, head=quantized("head", weights.head))


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int) -> ModelWeights:
    """Weights of a model that was never trained: seeded, of a size that keeps activations near 1."""
    weights, wanted = _allocate(config, dtype, device)
    generator = torch.Generator().manual_seed(seed)
    for target in wanted.values():
        drawn = torch.randn(target.shape, generator=generator)
        target.copy_(drawn * target.shape[1] ** -0.5 if target.dim() > 1 else 1 + 0.1 * drawn)
    return weights


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(file, framework="pt", device="cpu") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                yield name, opened.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{file} is not a readable safetensors file: {error}", path=file) from error


def _is_redundant(name: str, config: ModelConfig) -> bool:
    """Old exports carry rope tables; some tied ones also carry the head."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied and name == "lm_head.weight")


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """Empty fused tensors, and for each tensor name of the folder the part of them it fills."""
    wanted: dict[str, torch.Tensor] = {}

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype if len(shape) > 1 else torch.float32, device=device)

    def whole(name: str, *shape: int) -> torch.Tensor:
        wanted[name] = empty(*shape)
        return wanted[name]

    def fused(template: str, parts: dict[str, int], *columns: int) -> torch.Tensor:
        tensor = empty(sum(parts.values()), *columns)
        row = 0
        for part, rows in parts.items():
            wanted[template.format(part)] = tensor[row : row + rows]
            row += rows
        return tensor

    hidden, inner = config.hidden_size, config.inner_size
    qkv_rows = {"q": config.query_size, "k": config.kv_size, "v": config.kv_size}
    embedding = whole("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = []
    for number in range(config.layers):
        prefix = f"model.layers.{number}."
        attention = prefix + "self_attn."
        layers.append(
            LayerWeights(
                input_norm=whole(prefix + "input_layernorm.weight", hidden),
                qkv=fused(attention + "{}_proj.weight", qkv_rows, hidden),
                qkv_bias=fused(attention + "{}_proj.bias", qkv_rows) if config.qkv_bias else None,
                query_norm=whole(attention + "q_norm.weight", config.head_dim) if config.qk_norm else None,
                key_norm=whole(attention + "k_norm.weight", config.head_dim) if config.qk_norm else None,
                output=whole(attention + "o_proj.weight", hidden, config.query_size),
                output_bias=whole(attention + "o_proj.bias", hidden) if config.output_bias else None,
                mlp_norm=whole(prefix + ("pre_feedforward" if config.post_norms else "post_attention") + "_layernorm.weight", hidden),
                gate_up=fused(prefix + "mlp.{}_proj.weight", {"gate": inner, "up": inner}, hidden),
                down=whole(prefix + "mlp.down_proj.weight", hidden, inner),
                post_attention_norm=whole(prefix + "post_attention_layernorm.weight", hidden) if config.post_norms else None,
                post_mlp_norm=whole(prefix + "post_feedforward_layernorm.weight", hidden) if config.post_norms else None,
            )
        )
    final_norm = whole("model.norm.weight", hidden)
    head = embedding if config.tied else whole("lm_head.weight", config.vocab_size, hidden)
    return ModelWeights(embedding, tuple(layers), final_norm, head), wanted
