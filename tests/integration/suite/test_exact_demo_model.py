"""A real model through real processes: fp32 is token for token what transformers gives, and every path gives the same bits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer

from services.launcher.demo import DOCUMENT
from services.runtime.offloop import run_off_loop
from services.runtime.telemetry import names
from tests.demo_model import demo_folder
from tests.integration.suite.paths_kit import PATHS, Ask, Fleet, Seen, differences, fleet_of_models

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

LONG_TOKENS = 1500
ANSWER_TOKENS = 6
SHORT_TEXTS = (
    "a",
    "Hi",
    "The capital of France is",
    "Élan, naïveté, Ωmega und Straße; 東京タワー, שלום, 🙂👩‍👩‍👧 and a half",
    "def fibonacci(n: int) -> int:\n    if n < 2:\n        return n\n    return",
    '{"name": "relay", "pages": [1, 2, 3], "nested": {"ok": true, "text": "tab\\t"},\n "next":',
    "SELECT users.name, COUNT(*) FROM orders JOIN users ON",
    "<|im_start|>user\nWhat is a lighthouse for?<|im_end|>\n<|im_start|>assistant\n",
    "1, 1, 2, 3, 5, 8, 13, 21, 34,",
    "      \n\n\t  indented   \n",
)
QUESTIONS = ("\n\nQuestion: Who keeps the light?", "\n\nQuestion: What sank, and when?", "\n\nIn one word:")
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 11, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 3}


@pytest.fixture(scope="module")
def folders() -> dict[str, Path]:
    return {dtype: demo_folder(dtype) for dtype in ("float32", "bfloat16")}


@pytest.fixture(scope="module")
def prompts(folders: dict[str, Path]) -> list[list[int]]:
    """1 to 1,500 tokens: text, code, unicode, a chat turn, lengths around a block and a chunk, shared prefixes."""
    tokenizer = Tokenizer.from_file(str(folders["float32"] / "tokenizer.json"))
    document = tokenizer.encode(DOCUMENT.read_text(encoding="utf-8") * 2).ids
    found = [tokenizer.encode(text).ids for text in SHORT_TEXTS]
    found += [
        document[start : start + length] for start, length in ((1300, 15), (1330, 16), (1350, 17), (1400, 65), (700, 256), (710, 257))
    ]
    found += [document[:200] + tokenizer.encode(question).ids for question in QUESTIONS]
    found.append(document[:LONG_TOKENS])
    assert len(found) >= 20 and min(map(len, found)) == 1 and len(found[-1]) == LONG_TOKENS
    return found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo(folders: dict[str, Path]) -> AsyncIterator[Fleet]:
    """Both precisions side by side, under one router for each path."""
    workers = [{"model": str(folder), "model_name": dtype, "dtype": dtype, "kv_dtype": dtype} for dtype, folder in folders.items()]
    settings = {"kv_cache_mib": 640, "store_mib": 256, "start_timeout_s": 300.0, "traces": True}
    async with fleet_of_models({"prefill": workers, "decode": workers}, PATHS, **settings) as fleet:
        yield fleet


def check_same(wanted: Sequence[Seen], got: Sequence[Seen], how: str) -> None:
    assert not (found := differences(wanted, got)), f"{how}:\n{found}"


async def test_fp32_is_token_for_token_what_transformers_generates_on_every_path(
    demo: Fleet, folders: dict[str, Path], prompts: list[list[int]]
) -> None:
    pytest.importorskip("transformers")
    options: dict[str, Any] = {"model": "float32", "max_tokens": ANSWER_TOKENS, "ignore_eos": True, "cache_salt": "fp32"}
    asks = [Ask(prompt) for prompt in prompts]
    split = await demo.all("split", asks, **options)
    check_same(split, await demo.all("colocated", asks, **options), "colocated, with the KV that was handed over")
    assert {len(seen.ids) for seen in split} == {ANSWER_TOKENS}
    # While one core gives the reference, the other computes everything once more.
    likeliest = asyncio.ensure_future(run_off_loop(greedy, folders["float32"], prompts, [seen.ids for seen in split]))
    options["cache_salt"] = "fp32 cold"
    check_same(split, await demo.all("local", asks, together=1, **options), "local, cold, alone")
    for prompt, seen, wanted in zip(prompts, split, await likeliest, strict=True):
        assert seen.ids == wanted, f"{len(prompt)} prompt tokens"


def greedy(folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """What transformers finds likeliest after each prompt and each token of its answer: one pass shows whether an answer is greedy."""
    import transformers

    torch.set_num_threads(1)  # each thread has a number of its own
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    reference = model.eval()
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits[0]
        found.append(logits[:-1].argmax(-1).tolist())
    return found


async def test_bf16_gives_the_same_bits_on_every_path_alone_and_eight_at_a_time_cold_and_warm(
    demo: Fleet, folders: dict[str, Path], prompts: list[list[int]]
) -> None:
    options: dict[str, Any] = {"model": "bfloat16", "max_tokens": ANSWER_TOKENS, "logprobs": 2}
    asks = [Ask(prompts[-1])]  # the longest goes first, and in the split alone: how much of it arrives early is looked at below
    asks += [Ask(prompt) for prompt in prompts[:-1]]
    asks += [Ask(prompt, {**SAMPLED, "seed": number}) for number, prompt in enumerate(prompts[:7])]
    split = await demo.all("split", asks[:1], cache_salt="split", **options)
    split += await demo.all("split", asks[1:], cache_salt="split", **options)
    few = asks[:-5]
    local = await demo.all("local", few, together=1, cache_salt="alone", **options)
    check_same(split[:-5], local, "local, cold, alone")
    check_same(split[1:], await demo.all("colocated", asks[1:], cache_salt="colocated", **options), "colocated, cold, 8 at a time")
    for path, salt in (("local", "split"), ("colocated", "alone"), ("split", "split")):
        check_same(split, await demo.all(path, asks, cache_salt=salt, **options), f"{path} after {salt}, warm, 8 at a time")
    alone = await demo.all("split", asks[:6], together=1, cache_salt="split", **options)
    check_same(split[:6], alone, "split, warm, alone")
    greedy, sampled = split[1:8], split[-7:]
    assert any(one.ids != other.ids for one, other in zip(greedy, sampled, strict=True))
    tokenizer = Tokenizer.from_file(str(folders["bfloat16"] / "tokenizer.json"))
    assert [seen.text for seen in split] == [tokenizer.decode(seen.ids, skip_special_tokens=True) for seen in split]
    await check_arrives_early(demo, split[0])


async def check_arrives_early(demo: Fleet, seen: Seen) -> None:
    """Most of a long prompt's KV was there while prefill still ran, and the spans of both ends say so."""
    assert demo.suite.settings.max_num_batched_tokens == 256 and seen.completion.usage.prompt_tokens == LONG_TOKENS
    transfer = seen.completion.transfer
    assert transfer is not None and transfer.blocks == -(-LONG_TOKENS // 16)
    assert transfer.kv_bytes == transfer.blocks * 30 * 2 * 3 * 64 * 16 * 2
    assert transfer.early_bytes >= 0.6 * transfer.kv_bytes, transfer
    assert demo.suite.otlp is not None
    ends = {names.SPAN_KV_TRANSFER, names.SPAN_KV_HOLD}
    spans = await demo.suite.otlp.wait_for_trace(seen.trace_id, lambda found: ends <= {span.name for span in found})
    for name in ends:
        (span,) = [span for span in spans if span.name == name]
        assert span.attributes[names.KV_BYTES] == transfer.kv_bytes
        assert span.attributes[names.KV_EARLY_BYTES] == transfer.early_bytes
