"""Text, stop conditions, finish reasons and usage as a client sees them, on every path. Tokens are forced by bias, so all is known."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvrelay.values import ChatMessage
from tests.integration.suite.paths_kit import PATHS, Ask, Fleet, Seen, differences, fleet
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

BLOCK = 16
PROMPT = [262, 270, 281, 290, 262, 270, 299]
EOS = 2
BIAS_STEP = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("text") / "tiny", "llama", seed=5)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paths(model: Path) -> AsyncIterator[Fleet]:
    """Without a store: what a worker has cached is then only what it computed or was handed."""
    async with fleet(model, store=False, start_timeout_s=200.0) as running:
        yield running


class Alphabet:
    """The ids of single bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        # No merge of the tiny tokenizer reaches beyond ASCII letters, so that each of these is its bytes, one id each.
        text = "🙂漢é字ÿ\u200d" + "".join(chr(code) for code in range(33, 127))
        self._ids: dict[int, int] = {}
        for letter in text:
            self._ids |= dict(zip(letter.encode(), tokenizer.encode(letter).ids, strict=True))

    def ids(self, data: bytes) -> list[int]:
        return [self._ids[byte] for byte in data]


@pytest.fixture(scope="module")
def alphabet(tokenizer: Tokenizer) -> Alphabet:
    return Alphabet(tokenizer)


def forcing(ids: Sequence[int]) -> dict[str, Any]:
    """Options with which exactly these ids are drawn, each once: bias falls from one to the next, and what was drawn is penalised away."""
    assert len(set(ids)) == len(ids) <= 8 and not set(ids) & set(PROMPT)
    bias = {token_id: 100.0 - BIAS_STEP * place for place, token_id in enumerate(ids)}
    return {"logit_bias": bias, "repetition_penalty": 100.0, "max_tokens": len(ids)}


async def on_every_path(paths: Fleet, asks: Sequence[Ask], **options: Any) -> list[Seen]:
    """The answers, which are the same down to the pieces of text."""
    split, local, colocated = [await paths.all(path, asks, **options) for path in PATHS]
    assert not (found := differences(split, local)), found
    assert not (found := differences(split, colocated)), found
    assert {seen.completion.path for seen in split} == {"split"}
    return split


@pytest.mark.parametrize(
    "data",
    [
        "🙂a".encode(),
        "漢é!".encode(),
        b"\xf0\x9fA",
        b"\x82b\xf0\x9f\x99C",
        "漢".encode()[:2],
        "x漢".encode()[:3],
        b"\xbfd\xc3",
        "字🙂".encode(),
    ],
)
async def test_pieces_of_text_join_to_what_the_bytes_say(paths: Fleet, tokenizer: Tokenizer, alphabet: Alphabet, data: bytes) -> None:
    ids = alphabet.ids(data)
    (seen,) = await on_every_path(paths, [Ask(PROMPT, forcing(ids))])
    assert seen.ids == ids
    assert seen.text == data.decode("utf-8", "replace") == tokenizer.decode(ids)
    if "\ufffd" not in seen.text:
        # A character comes with the byte that completes it: until then nothing, and never a replacement for the half of it.
        for count in range(1, len(ids)):
            assert "".join(token.text for token in seen.tokens[:count]) == data[:count].decode("utf-8", "ignore"), f"after byte {count}"


async def test_any_bytes_at_all_stream_as_the_tokenizer_decodes_them(paths: Fleet, tokenizer: Tokenizer) -> None:
    script = random.Random(4)
    asks = [
        Ask(
            [script.randrange(3, 300) for _ in range(script.randrange(1, 40))],
            {"temperature": 1.3, "seed": number, "ignore_eos": True, "max_tokens": 40, "logit_bias": {EOS: 2.0}},
        )
        for number in range(24)
    ]
    answers = await on_every_path(paths, asks, cache_salt="bytes")
    for seen in answers:
        assert seen.text == tokenizer.decode(seen.ids, skip_special_tokens=True)
    assert sum("\ufffd" in seen.text for seen in answers) > 12, "the model says too few broken characters to show anything"
    assert any(EOS in seen.ids for seen in answers)


@dataclass(frozen=True)
class Stop:
    """A forced answer, how it is stopped, and what must come out."""

    forced: Sequence[str | int]
    """Text, taken byte by byte, and ids."""
    options: dict[str, Any]
    text: str
    tokens: int
    reason: str = "stop"


STOPS = {
    "two tokens in": Stop(["abcdef"], {"stop": ["cd"]}, "ab", 4),
    "over the boundary of prefill and decode": Stop(["abcdef"], {"stop": ["ab"]}, "", 2),
    "in the first token alone": Stop(["abcdef"], {"stop": ["a"]}, "", 1),
    "after half of another": Stop(["abcdef"], {"stop": ["abx", "bc"]}, "a", 3),
    "the shorter of two": Stop(["abcdef"], {"stop": ["abcd", "bc"]}, "a", 3),
    "with the last token": Stop(["abcdef"], {"stop": ["ef"]}, "abcd", 6),
    "only half there at the end": Stop(["abcdef"], {"stop": ["fg"]}, "abcdef", 6, "length"),
    "nearly there, then not": Stop(["abcdef"], {"stop": ["abd", "bce"]}, "abcdef", 6, "length"),
    "a character of two tokens": Stop(["xézw"], {"stop": ["é"]}, "x", 3),
    "a character over the boundary": Stop(["éz"], {"stop": ["é"]}, "", 2),
    "an emoji and a letter": Stop(["a🙂bc"], {"stop": ["🙂b"]}, "a", 6),
    "a stop id": Stop(["abcdef"], {"stop_token_ids": ["c"]}, "ab", 3),
    "a stop id first": Stop(["cdef"], {"stop_token_ids": ["c"]}, "", 1),
    "a stop id too early": Stop(["cabdef"], {"stop_token_ids": ["c"], "min_tokens": 2}, "ab", 3),
    "a stop id when a stop string is half there": Stop(["abcdef"], {"stop_token_ids": ["c"], "stop": ["bcd"]}, "ab", 3),
    "the end token": Stop(["ab", EOS, "c"], {}, "ab", 3),
    "the end token first": Stop([EOS, "a"], {}, "", 1),
    "the end token as the last allowed": Stop(["a", EOS], {"max_tokens": 2}, "a", 2),
    "the end token too early": Stop([EOS, "abc"], {"min_tokens": 2}, "ab", 3),
    "the end token ignored": Stop([EOS, "ab"], {"ignore_eos": True}, "ab", 3, "length"),
    "the length": Stop(["abc"], {}, "abc", 3, "length"),
    "a length of one": Stop(["a"], {}, "a", 1, "length"),
    "a length within a character": Stop(["🙂"], {"max_tokens": 1}, "\ufffd", 1, "length"),
}


@pytest.mark.parametrize("case", STOPS)
async def test_an_answer_ends_where_and_why_it_should(paths: Fleet, alphabet: Alphabet, case: str) -> None:
    stop = STOPS[case]
    ids = [token_id for part in stop.forced for token_id in (alphabet.ids(part.encode()) if isinstance(part, str) else [part])]
    options = {**forcing(ids), **stop.options}
    if "stop_token_ids" in options:
        options["stop_token_ids"] = [token_id for letter in options["stop_token_ids"] for token_id in alphabet.ids(letter.encode())]
    (seen,) = await on_every_path(paths, [Ask(PROMPT, options)])
    assert (seen.text, len(seen.ids), seen.completion.finish_reason.value) == (stop.text, stop.tokens, stop.reason)
    if "min_tokens" not in options:
        assert seen.ids == ids[: stop.tokens]


async def test_text_that_may_become_a_stop_string_is_held_back_and_then_given(paths: Fleet, alphabet: Alphabet) -> None:
    (seen,) = await on_every_path(paths, [Ask(PROMPT, {**forcing(alphabet.ids(b"abcdef")), "stop": ["abx", "cdey"]})])
    assert [token.text for token in seen.tokens] == ["", "", "ab", "", "", "cdef"]


@pytest.mark.parametrize("path", ["split", "local"])
async def test_usage_counts_every_token_cold_and_warm(paths: Fleet, path: str) -> None:
    script = random.Random(path)
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 300):
        salt = f"usage of {length} on {path}"
        prompt = [script.randrange(3, 300) for _ in range(length)]
        # The last prompt token is always computed, and only whole blocks are kept.
        kept = (length - 1) // BLOCK * BLOCK
        for run, cached in (("cold", 0), ("warm", kept), ("warm again", kept)):
            seen = await paths.all(path, [Ask(prompt)], max_tokens=5, ignore_eos=True, cache_salt=salt)
            usage = seen[0].completion.usage
            assert (usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens) == (length, cached, 5), f"{length} tokens, {run}"


async def test_usage_counts_a_shared_prefix_and_a_conversations_earlier_turns(paths: Fleet) -> None:
    script = random.Random(8)

    async def cached(path: str, prompt: Sequence[int], salt: str, max_tokens: int = 4) -> tuple[int, Seen]:
        (seen,) = await paths.all(path, [Ask(prompt)], max_tokens=max_tokens, ignore_eos=True, cache_salt=salt)
        return seen.completion.usage.cached_tokens, seen

    first, more = ([script.randrange(3, 300) for _ in range(length)] for length in (50, 30))
    for path in ("split", "local"):
        assert (await cached(path, first, path))[0] == 0
        assert (await cached(path, first[:40] + more, path))[0] == 2 * BLOCK
        assert (await cached(path, first[:40] + more, f"{path}, somebody else"))[0] == 0
    # The answer's own blocks are kept too, but for its last token, which is never fed back.
    count, answer = await cached("local", first, "turns", 15)
    assert count == 0
    assert (await cached("local", [*first, *answer.ids, 9], "turns"))[0] == 4 * BLOCK
    # What was handed over is kept by its taker.
    assert (await cached("split", more, "taker"))[0] == 0
    assert (await cached("local", more, "taker"))[0] == BLOCK


async def test_usage_is_exact_for_text_and_for_a_conversation(paths: Fleet, tokenizer: Tokenizer) -> None:
    text = "the harbour, 東京, and the light 🙂"
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    for path in PATHS:
        async with paths.client[path].generate(text, max_tokens=2, ignore_eos=True) as stream:
            completion = await stream.completion_or_raise()
        assert completion.usage.prompt_tokens == len(tokenizer.encode(text).ids)
        assert stream.started is not None and stream.started.prompt_tokens == completion.usage.prompt_tokens
        async with paths.client[path].generate(messages=[{"role": "user", "content": text}], max_tokens=2, ignore_eos=True) as stream:
            completion = await stream.completion_or_raise()
        assert completion.usage.prompt_tokens == len(tokenizer.encode(prompt).ids)


@pytest.mark.parametrize("roles", ["user user", "assistant user", "user assistant", "system", "user tool", "robot"])
async def test_which_roles_follow_which_is_the_templates_affair(paths: Fleet, roles: str) -> None:
    talk = [ChatMessage(role, "hello") for role in roles.split()]
    answer = await paths.client["split"].generate(talk, max_tokens=2).completion_or_raise()
    assert answer.usage.prompt_tokens > len(talk)
