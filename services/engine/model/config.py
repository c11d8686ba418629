"""What a model is, read from its Hugging Face folder: sizes, rope, attention windows, end tokens. No torch here."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import ModelLoadError


class ModelFamily(enum.Enum):
    """The architectures the engine computes, by the name in config.json's `architectures`."""

    LLAMA = "LlamaForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"
    QWEN3 = "Qwen3ForCausalLM"
    MISTRAL = "MistralForCausalLM"
    GEMMA3 = "Gemma3ForCausalLM"
    """Text only."""


class RopeScaling(enum.Enum):
    """How rotary frequencies are stretched beyond the trained context."""

    NONE = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float
    scaling: RopeScaling = RopeScaling.NONE
    factor: float = 1.0
    """Divides the frequencies (LINEAR) or the low ones (LLAMA3)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 0
    """Context the model was trained on before stretching; LLAMA3 only."""

    def inverse_frequencies(self, head_dim: int) -> list[float]:
        """`head_dim // 2` angular speeds, radians a position."""
        plain = [self.theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
        if self.scaling is RopeScaling.NONE:
            return plain
        if self.scaling is RopeScaling.LINEAR:
            return [speed / self.factor for speed in plain]
        return [self._llama3_speed(speed) for speed in plain]

    def _llama3_speed(self, speed: float) -> float:
        """Llama 3.1's rule: short waves stay, long ones are divided by `factor`, those between are blended."""
        waves = self.original_positions * speed / (2 * math.pi)
        if waves <= self.low_freq_factor:
            return speed / self.factor
        if waves >= self.high_freq_factor:
            return speed
        blend = (waves - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return (1 - blend) * speed / self.factor + blend * speed


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and constants of one decoder-only model."""

    family: ModelFamily
    layers: int
    hidden_size: int
    inner_size: int
    """Width between the two halves of the MLP."""
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Tokens of prompt and answer together, at most."""
    norm_epsilon: float
    rope: RopeConfig
    tied: bool
    """The output head is the embedding table."""
    qkv_bias: bool
    output_bias: bool
    """Bias on the attention's output projection."""
    qk_norm: bool
    """RMSNorm over each query and key head before rope."""
    windows: tuple[int, ...]
    """One per layer: how many positions, itself included, a token sees; 0 is all."""
    eos_ids: tuple[int, ...]
    bos_id: int | None
    stored_dtype: str
    """dtype named in config.json ('bfloat16', 'float32', ...), '' if none."""
    query_pre_attn_scalar: float = 0.0
    """Attention scores are divided by its square root; 0 is `head_dim`."""
    local_rope: RopeConfig | None = None
    """Rope of the layers that have a window, where it differs from `rope`."""
    embedding_scale: float = 1.0
    """Factor of the embedded tokens."""
    gelu: bool = False
    """The MLP's gate is GELU in its tanh form, not SiLU."""
    post_norms: bool = False
    """RMSNorm after attention and after the MLP, before each is added to the residual."""
    unit_gains: bool = False
    """Norm gains are stored less 1; they are loaded with it."""

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Reads config.json and generation_config.json; `ModelLoadError` if the model is missing, malformed or not supported."""
        raw = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        try:
            return _parse(raw, read_json(generation) if generation.exists() else {})
        except KeyError as error:
            raise ModelLoadError(f"{folder / 'config.json'} has no entry {error}", folder=folder) from error
        except (TypeError, ValueError) as error:
            raise ModelLoadError(f"{folder / 'config.json'} is malformed: {error}", folder=folder) from error

    @property
    def query_scale(self) -> float:
        """Factor of the attention scores."""
        return 1 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    def rope_of(self, layer: int) -> RopeConfig:
        """The rope of one layer."""
        return self.local_rope if self.local_rope and self.windows[layer] else self.rope

    @property
    def query_size(self) -> int:
        """Width of all query heads."""
        return self.query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.kv_heads * self.head_dim


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; `ModelLoadError` if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{path} cannot be read: {error.strerror}", path=path) from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}", path=path) from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object", path=path)
    return value


def _parse(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    family = _family(raw)
    _refuse_what_is_not_computed(family, raw)
    layers, hidden, heads = int(raw["num_hidden_layers"]), int(raw["hidden_size"]), int(raw["num_attention_heads"])
    kv_heads = int(raw.get("num_key_value_heads") or heads)
    head_dim = int(raw.get("head_dim") or hidden // heads)
    if heads % kv_heads:
        raise ModelLoadError(f"{heads} query heads cannot share {kv_heads} KV heads evenly")
    if head_dim % 2:
        raise ModelLoadError(f"rope needs an even head_dim, got {head_dim}")
    eos = generation.get("eos_token_id", raw.get("eos_token_id"))
    bos = raw.get("bos_token_id", generation.get("bos_token_id"))
    all_bias = bool(raw.get("attention_bias", False))
    max_positions = int(raw["max_position_embeddings"])
    rope, local_rope = _ropes(family, raw, max_positions)
    gemma = family is ModelFamily.GEMMA3
    return ModelConfig(
        family=family,
        layers=layers,
        hidden_size=hidden,
        inner_size=int(raw["intermediate_size"]),
        query_heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(raw["vocab_size"]),
        max_positions=max_positions,
        norm_epsilon=float(raw.get("rms_norm_eps", 1e-6)),
        rope=rope,
        tied=bool(raw.get("tie_word_embeddings", gemma)),
        qkv_bias=all_bias or family is ModelFamily.QWEN2,
        output_bias=all_bias and family is not ModelFamily.QWEN2,
        qk_norm=gemma or family is ModelFamily.QWEN3,
        windows=_windows(family, raw, layers),
        eos_ids=tuple(int(item) for item in (eos if isinstance(eos, list) else [] if eos is None else [eos])),
        bos_id=None if bos is None else int(bos),
        stored_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or ""),
        query_pre_attn_scalar=float(raw.get("query_pre_attn_scalar", 256)) if gemma else 0.0,
        local_rope=local_rope,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        gelu=gemma,
        post_norms=gemma,
        unit_gains=gemma,
    )


def _family(raw: Mapping[str, Any]) -> ModelFamily:
    names = raw.get("architectures") or []
    known = {family.value: family for family in ModelFamily}
    for name in names:
        if name in known:
            return known[name]
    raise ModelLoadError(f"unsupported architecture {', '.join(map(str, names)) or '(none named)'}; supported: {', '.join(known)}")


def _refuse_what_is_not_computed(family: ModelFamily, raw: Mapping[str, Any]) -> None:
    name, supported = ("hidden_activation", "gelu_pytorch_tanh") if family is ModelFamily.GEMMA3 else ("hidden_act", "silu")
    activation = raw.get(name, supported)
    if activation != supported:
        raise ModelLoadError(f"unsupported {name} {activation!r}; supported: {supported!r}")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise ModelLoadError(f"unsupported {name}: {raw[name]}")
    if raw.get("mlp_bias"):
        raise ModelLoadError("unsupported mlp_bias: true")
    if raw.get("quantization_config"):
        raise ModelLoadError("quantised weights are not supported (quantization_config is set)")
    partial = (raw.get("rope_parameters") or {}).get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ModelLoadError(f"unsupported partial_rotary_factor {partial}")


def _ropes(family: ModelFamily, raw: Mapping[str, Any], max_positions: int) -> tuple[RopeConfig, RopeConfig | None]:
    """The rope of all layers, and that of those with a window where it differs (Gemma 3)."""
    if family is not ModelFamily.GEMMA3:
        return _rope(raw, max_positions), None
    by_kind = raw.get("rope_parameters") or {}
    everywhere = {**raw, "rope_theta": raw.get("rope_theta") or 1e6, "rope_parameters": by_kind.get("full_attention")}
    nearby = {"rope_theta": raw.get("rope_local_base_freq") or 1e4, "rope_parameters": by_kind.get("sliding_attention")}
    return _rope(everywhere, max_positions), _rope(nearby, max_positions)


def _rope(raw: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads both spellings: `rope_parameters`, or the older `rope_theta` beside `rope_scaling`."""
    given: dict[str, Any] = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    theta = float(given.get("rope_theta", raw.get("rope_theta", 10_000.0)))
    kind = str(given.get("rope_type", given.get("type", "default")))
    known = {scaling.value: scaling for scaling in RopeScaling}
    if kind not in known:
        raise ModelLoadError(f"unsupported rope scaling {kind!r}; supported: {', '.join(known)}")
    scaling = known[kind]
    if scaling is RopeScaling.NONE:
        return RopeConfig(theta)
    if scaling is RopeScaling.LINEAR:
        return RopeConfig(theta, scaling, float(given["factor"]))
    return RopeConfig(
        theta,
        scaling,
        factor=float(given["factor"]),
        low_freq_factor=float(given["low_freq_factor"]),
        high_freq_factor=float(given["high_freq_factor"]),
        original_positions=int(given.get("original_max_position_embeddings") or max_positions),
    )


def _windows(family: ModelFamily, raw: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    window = int(raw.get("sliding_window") or 0)
    if family is ModelFamily.LLAMA or not window:
        return (0,) * layers
    if family is ModelFamily.MISTRAL:
        return (window,) * layers
    kinds = raw.get("layer_types")
    if family is ModelFamily.GEMMA3:
        pattern = int(raw.get("sliding_window_pattern") or 6)
        kinds = kinds or ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    elif not raw.get("use_sliding_window", False):
        return (0,) * layers
    if kinds is None:
        first = int(raw.get("max_window_layers", layers))
        return tuple(window if layer >= first else 0 for layer in range(layers))
    if len(kinds) != layers:
        raise ModelLoadError(f"layer_types names {len(kinds)} layers, the model has {layers}")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
