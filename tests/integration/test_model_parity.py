"""The engine's float32 numbers are those of Hugging Face transformers, for every family and for a real model."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.model.llama import LlamaModel, load_model
from tests.demo_model import demo_folder
from tests.engine_runs import KERNELS, MODES, PagedRun, PagedSequence, options, random_ids
from tests.tiny_models import FAMILIES, write_tiny_model

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
"""Largest difference of a logit; the logits' standard deviation is 2 in the tiny models."""
DEMO_TOLERANCE = 1e-3
"""The demo model's logits reach 30."""
PROMPTS = 120
ANSWER_TOKENS = 6
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    **{f"{family}-untied-sharded": (family, {"tied": False, "shards": 3}) for family in FAMILIES},
    "llama-biased": ("llama", {"attention_bias": True}),
    "llama-stretched": (
        "llama",
        {
            "rope_theta": 500_000.0,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-new-spelling": ("llama", {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0}}),
    "llama-multi-query": ("llama", {"num_key_value_heads": 1, "head_dim": 48}),
    "gemma3": ("gemma3", {}),
    "gemma3-pattern": (
        "gemma3",
        {
            "layer_types": None,
            "sliding_window_pattern": 3,
            "num_hidden_layers": 4,
            "sliding_window": 20,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "gemma3-new-spelling": (
        "gemma3",
        {
            "tied": False,
            "rope_theta": None,
            "rope_local_base_freq": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
    ),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 32, "num_hidden_layers": 3}),
    "qwen3-windows": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


def reference_model(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def assert_matches(reference: Any, sequence: PagedSequence, prompt_tokens: int, tolerance: float = TOLERANCE) -> None:
    """All logits the run asked for are the reference's, and each answered token is the reference's likeliest."""
    expected: torch.Tensor = reference(torch.tensor([sequence.token_ids])).logits[0]
    for position, logits in sequence.logits.items():
        difference = (logits - expected[position]).abs().max().item()
        assert difference < tolerance, f"logits differ by {difference} at {position} of {len(sequence.token_ids)}"
    for position in range(prompt_tokens, len(sequence.token_ids)):
        row = expected[position - 1]
        assert row.max() - row[sequence.token_ids[position]] < tolerance, f"another token at {position}"


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_gives_transformers_logits_and_tokens(tmp_path: Path, variant: str, kernels: str) -> None:
    family, overrides = VARIANTS[variant]
    folder = write_tiny_model(tmp_path, family, seed=len(variant), **overrides)
    model, reference = load_model(folder, options("float32", kernels)), reference_model(folder)
    rng = random.Random(variant)
    for number in range(PROMPTS // 4):
        ids = random_ids(rng.choice((1, 2, rng.randint(3, 90), rng.randint(90, 300))), 300, seed=number)
        run = PagedRun(model, num_pages=40, seed=number)
        sequence = run.prefill(ids, (rng.choice((64, 256, 1000, 7)),), room=ANSWER_TOKENS)
        run.greedy(sequence, ANSWER_TOKENS)
        assert_matches(reference, sequence, len(ids))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_eight_at_a_time_give_transformers_logits_and_tokens(tmp_path: Path, family: str, kernels: str) -> None:
    folder = write_tiny_model(tmp_path, family, seed=11)
    model, reference = load_model(folder, options("float32", kernels)), reference_model(folder)
    for number in range(PROMPTS // 8):
        rng = random.Random(number)
        run = PagedRun(model, seed=number)
        prompts = [random_ids(rng.randint(1, 150), 300, seed=100 * number + item) for item in range(8)]
        sequences = [run.begin(prompt, room=ANSWER_TOKENS) for prompt in prompts]
        targets = [len(prompt) + ANSWER_TOKENS for prompt in prompts]
        while waiting := [s for s, target in zip(sequences, targets, strict=True) if len(s.token_ids) < target]:
            run.step([(sequence, min(64, len(sequence.token_ids) - sequence.done)) for sequence in waiting])
            for sequence in waiting:
                if sequence.done == len(sequence.token_ids):
                    sequence.token_ids.append(int(sequence.logits[sequence.done - 1].argmax()))
        for sequence, prompt in zip(sequences, prompts, strict=True):
            assert_matches(reference, sequence, len(prompt))


def test_bf16_stays_close_to_float32(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    exact, rounded = load_model(folder, MODES["float32"]), load_model(folder, MODES["bfloat16"])
    ids = random_ids(200, 300, seed=5)
    difference = PagedRun(exact).prefill(ids).logits[199] - PagedRun(rounded).prefill(ids).logits[199]
    assert difference.abs().max() < 0.2


@pytest.fixture(scope="module")
def demo_float32() -> tuple[LlamaModel, Any, Any]:
    folder = demo_folder("float32")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return load_model(folder, MODES["float32"]), reference_model(folder), tokenizer


TEXT = (
    "A relay race is won by the hand-over: the runner who arrives and the one who leaves share the baton for a few metres, "
    "and neither may stop. In 1912 the rules said 20 metres; in 2017 they said 30. Élan, naïveté and 東京 are words too. "
)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_model_gives_transformers_logits(demo_float32: tuple[LlamaModel, Any, Any]) -> None:
    model, reference, tokenizer = demo_float32
    text_ids = tokenizer(TEXT * 30)["input_ids"]
    lengths = (1, 2, 5, 16, 17, 31, 40, 64, 65, 90, 128, 200, 255, 256, 257, 320, 400, 513, 700, 1500)
    for number, length in enumerate(lengths):
        ids = text_ids[number : number + length]
        run = PagedRun(model, num_pages=110, seed=number)
        sequence = run.prefill(ids, ((64,), (256,), (2048,))[number % 3], room=2)
        run.greedy(sequence, 2)
        assert_matches(reference, sequence, length, DEMO_TOLERANCE)


@pytest.mark.timeout(300)
def test_the_demo_model_knows_the_capital_of_france() -> None:
    folder = demo_folder("bfloat16")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))["input_ids"]
    run = PagedRun(load_model(folder, MODES["bfloat16"]))
    sequence = run.prefill(ids, room=8)
    assert "Paris" in tokenizer.decode(run.greedy(sequence, 8))


@pytest.mark.timeout(300)
def test_the_demo_models_bits_do_not_depend_on_how_it_is_run() -> None:
    model = load_model(demo_folder("bfloat16"), MODES["bfloat16"])
    prompts = [random_ids(length, 49_152, seed=length) for length in (300, 77, 16, 1, 130, 5, 40, 64)]
    together = PagedRun(model, seed=1)
    sequences = [together.begin(prompt) for prompt in prompts]
    while waiting := [s for s in sequences if s.done < len(s.token_ids)]:
        together.step([(sequence, min(64, len(sequence.token_ids) - sequence.done)) for sequence in waiting])
    for sequence in sequences:
        alone = PagedRun(model, seed=2)
        whole = alone.prefill(sequence.token_ids)
        assert alone.kv_bytes(whole) == together.kv_bytes(sequence)
        assert torch.equal(whole.logits[whole.done - 1], sequence.logits[sequence.done - 1])
