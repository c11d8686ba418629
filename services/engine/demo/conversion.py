"""The demo model's GGUF file, written as a Hugging Face folder: weights dequantised, config, tokenizer and chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from kvrelay.errors import ModelLoadError

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
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


def convert(source: Path, folder: Path, dtype: str) -> None:
    """Writes weights, config and tokenizer of the GGUF file `source` into `folder`; `ModelLoadError` if it cannot be read."""
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
