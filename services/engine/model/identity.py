"""Who this model is: the identity two workers must share before one may use the other's KV, and how that KV lies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from pathlib import Path

from kvrelay import hashing
from kvrelay.errors import ModelLoadError
from kvrelay.handle import KvLayout, ModelIdentity
from services.engine.model.config import ModelConfig
from services.engine.model.weights import weights_digest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What a tokenizer is made of; the last two may be missing."""
_NOT_ARITHMETIC = frozenset({"rope", "max_positions", "eos_ids", "bos_id", "stored_dtype"})
"""Parts of a model's configuration that do not change KV values, or are told apart elsewhere."""


def read_tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The tokenizer files a model folder has, by name; `ModelLoadError` without tokenizer.json. Blocks."""
    files = {name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()}
    if TOKENIZER_FILES[0] not in files:
        raise ModelLoadError(f"{folder} has no {TOKENIZER_FILES[0]}", folder=folder)
    return files


def model_digest(folder: Path, config: ModelConfig) -> str:
    """'sha256:<hex>' over the weight files and the settings they are computed with (heads, windows, epsilon ...). Blocks.

    Equal tensors under another configuration give other KV, so the configuration is part of what the weights are.
    """
    digest = hashlib.sha256(weights_digest(folder))
    digest.update(canonical_text({name: value for name, value in asdict(config).items() if name not in _NOT_ARITHMETIC}).encode())
    return f"sha256:{digest.hexdigest()}"


def canonical_text(value: object) -> str:
    """JSON with sorted keys and no spaces: equal values, equal text, in every process."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_plain)


def identity_of(
    folder: Path,
    config: ModelConfig,
    tokenizer_files: Mapping[str, bytes],
    *,
    model: str,
    dtype: str,
    kv_dtype: str,
    numerics: str,
    quantization: str,
) -> ModelIdentity:
    """The identity of a model folder served as `model` and computed by a decoder of these `numerics`.

    Reads every weight file (about half a second for 270 MB); blocks.
    """
    return ModelIdentity(
        model=model,
        weights_digest=model_digest(folder, config),
        tokenizer_digest=hashing.tokenizer_digest(tokenizer_files),
        dtype=dtype,
        kv_dtype=kv_dtype,
        rope=canonical_text(asdict(config.rope)),
        numerics=numerics,
        quantization=quantization,
    )


def layout_of(config: ModelConfig, block_size: int, kv_dtype: str) -> KvLayout:
    """How one block of this model's KV lies in a page."""
    return KvLayout(config.layers, config.kv_heads, config.head_dim, block_size, kv_dtype)


def _plain(value: object) -> object:
    if isinstance(value, Enum):
        return value.value
    raise TypeError(f"{type(value).__name__} has no canonical text")
