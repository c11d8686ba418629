"""Tiny random models on disk, for tests: each folder is a complete Hugging Face model that a whole suite can serve.

The weights are random but deterministic in (family, seed, shapes); the tokenizer is a byte-level BPE that round-trips any text.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
"""The architectures that every decoder computes."""

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
"""Ids 0, 1 and 2 of the tiny tokenizer; 1 begins and 2 ends a chat turn, and 2 is the end id of the model."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_MERGED_PAIRS = (
    "t h,th e,i n,e r,a n,r e,o n,Ġ the,Ġ a,Ġ t,e n,o u,Ġ s,Ġ w,i s,a t,o r,e s,Ġ in,in g,"
    "e d,Ġ o,Ġ c,an d,Ġ and,i t,Ġ b,Ġ p,a l,a r,Ġ f,o f,Ġ of,Ġ h,l l,Ġ d,Ġ m,i c,l e,Ġt o,r o"
)


def write_tiny_model(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    tied: bool = True,
    shards: int = 1,
    dtype: torch.dtype = torch.float32,
    **config_overrides: Any,
) -> Path:
    """Writes a tiny random model of `family` (of `FAMILIES`, or 'gemma3') into `folder` and returns `folder`.

    hidden 64, 2 layers, 4 query and 2 KV heads of 16, vocabulary 300; `config_overrides` replace entries of config.json
    (`num_hidden_layers=3`, `sliding_window=32`). With `shards` > 1 the weights are split over that many safetensors files and an index.
    """
    if family not in _ARCHITECTURES:
        raise ValueError(f"unknown family {family!r}, known: {', '.join(_ARCHITECTURES)}")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, tied=tied, **config_overrides)
    config["dtype"] = str(dtype).removeprefix("torch.")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": config["eos_token_id"], "pad_token_id": 0})
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in _tensors(family, config, seed).items()}
    _write_weights(folder, tensors, shards)
    write_tiny_tokenizer(folder, vocab_size=config["vocab_size"], max_tokens=config["max_position_embeddings"])
    return folder


def tiny_config(family: str, *, tied: bool = True, **overrides: Any) -> dict[str, Any]:
    """The config.json of a tiny model, as a dictionary."""
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_dropout": 0.0,
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "use_cache": True,
    }
    if family in ("llama", "qwen3"):
        config["attention_bias"] = False
    if family == "mistral":
        config["sliding_window"] = 32
    if family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 2}
    if family == "gemma3":
        del config["hidden_act"], config["rope_theta"]
        config |= {
            "model_type": "gemma3_text",
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": 24,
            "sliding_window": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        }
    return config | overrides


def write_tiny_tokenizer(folder: Path, *, vocab_size: int = 300, max_tokens: int = 4096) -> None:
    """Writes tokenizer.json and tokenizer_config.json (with a ChatML template): 3 special tokens, 256 bytes, then merges.

    Ids from 300 on name no token and decode to nothing.
    """
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for letter in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[letter] = len(vocab)
    if vocab_size < len(vocab):
        raise ValueError(f"a byte-level vocabulary needs at least {len(vocab)} ids")
    merges = []
    for pair in _MERGED_PAIRS.split(","):
        if len(vocab) == vocab_size:
            break
        left, right = pair.split(" ")
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": TURN_START,
            "eos_token": TURN_END,
            "pad_token": END_OF_TEXT,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": max_tokens,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _tensors(family: str, config: dict[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query, key = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * (gain / columns**0.5)

    def norm(size: int) -> torch.Tensor:
        return (family != "gemma3") + 0.1 * torch.randn(size, generator=generator)

    # The residual branches outweigh the embedding, or a tied model would only repeat its last token.
    tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = norm(hidden)
        tensors[prefix + "post_attention_layernorm.weight"] = norm(hidden)
        if family == "gemma3":
            tensors[prefix + "pre_feedforward_layernorm.weight"] = norm(hidden)
            tensors[prefix + "post_feedforward_layernorm.weight"] = norm(hidden)
        for name, rows in (("q", query), ("k", key), ("v", key)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, hidden, 1.5)
            if family == "qwen2" or config.get("attention_bias"):
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = 0.3 * torch.randn(rows, generator=generator)
        tensors[prefix + "self_attn.o_proj.weight"] = matrix(hidden, query, 2.0)
        if config.get("attention_bias"):
            tensors[prefix + "self_attn.o_proj.bias"] = 0.3 * torch.randn(hidden, generator=generator)
        if family in ("qwen3", "gemma3"):
            tensors[prefix + "self_attn.q_norm.weight"] = norm(config["head_dim"])
            tensors[prefix + "self_attn.k_norm.weight"] = norm(config["head_dim"])
        tensors[prefix + "mlp.gate_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.up_proj.weight"] = matrix(inner, hidden)
        tensors[prefix + "mlp.down_proj.weight"] = matrix(hidden, inner, 2.0)
    tensors["model.norm.weight"] = norm(hidden)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.0)
    return tensors


def _write_weights(folder: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::shards]}
        save_file(part, folder / file_name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file_name)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
