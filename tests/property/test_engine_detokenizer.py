"""Streamed text: final when emitted, complete at the end, cut at stop strings wherever tokens begin and end."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvrelay.errors import ModelLoadError
from services.engine.sampling.detokenizer import AnswerText, Detokenizer, StopStrings, TokenBytes
from tests.tiny_models import write_tiny_tokenizer
from tests.unit.engine_core.fakes import byte_tokens, ids_of

TEXTS = st.text(st.sampled_from("ab \n日本語é😀👨‍👩‍👧🏳️‍🌈\u0301\ufffd"), max_size=30) | st.text(max_size=30)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: pieces with a lower line for the space, bytes for what has no piece."""
    pieces = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "b", "é", "日本", "▁▁"]
    tokenizer = Tokenizer(models.BPE(vocab={piece: at for at, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<s>", "</s>")])
    return tokenizer


def pieces(token_bytes: TokenBytes, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(token_bytes)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(st.binary(max_size=40))
@example(b"\xf0\x9f\x98")
@example(b"\xe6\x97a\xff\xf0\x9f\x98\x80")
def test_any_bytes_become_their_full_decoding(data: bytes) -> None:
    assert "".join(pieces(byte_tokens(), [byte + 1 for byte in data])) == data.decode("utf-8", "replace")


@given(TEXTS)
def test_each_character_comes_with_the_token_that_completes_it(text: str) -> None:
    got = pieces(byte_tokens(), ids_of(text))
    wanted = [piece for letter in text for piece in ([""] * (len(letter.encode()) - 1) + [letter])]
    assert got == [*wanted, ""]


@given(ids=st.lists(st.integers(0, 310), max_size=40))
@settings(max_examples=300)
def test_byte_level_text_equals_the_tokenizers_own_decoding(tiny: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(TokenBytes(tiny), ids)) == tiny.decode(ids, skip_special_tokens=True)


@given(text=TEXTS)
def test_encoded_text_comes_back(tiny: Tokenizer, text: str) -> None:
    assert "".join(pieces(TokenBytes(tiny), tiny.encode(text).ids)) == text


@given(ids=st.lists(st.sampled_from([0, 1, *range(258, 265)]) | st.integers(0, 264), max_size=30))
@settings(max_examples=200)
def test_sentencepiece_text_keeps_its_first_space(sentencepiece: Tokenizer, ids: list[int]) -> None:
    got = "".join(pieces(TokenBytes(sentencepiece), ids))
    # The library replaces a whole run of bytes if any of it is no UTF-8, so runs of replacements are compared as one.
    wanted = sentencepiece.decode([260, *ids], skip_special_tokens=True).removeprefix("a")
    if "\ufffd" not in wanted:
        assert got == wanted


def test_special_tokens_and_ids_without_a_token_have_no_text(tiny: Tokenizer) -> None:
    assert [TokenBytes(tiny)[token_id] for token_id in (0, 1, 2, 300, 99_999)] == [b""] * 5


def test_added_tokens_that_are_not_special_are_text(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<tool call>", special=False, normalized=False)])
    token_id = tokenizer.token_to_id("<tool call>")
    assert TokenBytes(tokenizer)[token_id] == b"<tool call>" and tokenizer.decode([token_id]) == "<tool call>"


def test_an_unknown_kind_of_tokenizer_is_refused() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, "a"))
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(ModelLoadError, match="WordPiece"):
        TokenBytes(tokenizer)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=4)


def cut_letter_by_letter(text: str, stops: list[str]) -> tuple[str, bool]:
    """The reference: letters arrive one by one; the first time the text ends with a stop string, it is cut off."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@given(st.lists(st.text("abc", max_size=5), max_size=12), STOPS)
@settings(max_examples=500)
def test_stop_strings_cut_the_same_whatever_pieces_the_text_comes_in(parts: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    emitted, fed, stopped = "", "", False
    for part in parts:
        text, stopped = matcher.push(part)
        emitted += text
        fed += part
        if stopped:
            break
        held = fed[len(emitted) :]
        assert fed.startswith(emitted)
        assert not held or any(stop.startswith(held) for stop in stops), "more was held back than may become a stop string"
        assert not any(stop.startswith(fed[-n:]) for stop in stops for n in range(len(held) + 1, min(len(fed), len(stop) - 1) + 1))
    if not stopped:
        emitted += matcher.flush()
    assert (emitted, stopped) == cut_letter_by_letter("".join(parts), stops)


@given(TEXTS, st.lists(st.text(st.sampled_from("ab日😀"), min_size=1, max_size=3), max_size=3))
def test_answers_are_cut_inside_and_across_multibyte_characters(text: str, stops: list[str]) -> None:
    answer, emitted, stopped = AnswerText(byte_tokens(), stops), "", False
    for token_id in ids_of(text):
        piece, stopped = answer.push(token_id)
        emitted += piece
        if stopped:
            break
    if not stopped:
        rest, stopped = answer.finish()
        emitted += rest
    assert (emitted, stopped) == cut_letter_by_letter(text, stops)


def test_an_unfinished_character_at_the_end_may_itself_be_a_stop_string() -> None:
    answer = AnswerText(byte_tokens(), ["a\ufffd"])
    assert [answer.push(token_id) for token_id in (ord("a") + 1, 0xF0 + 1)] == [("", False), ("", False)]
    assert answer.finish() == ("", True)


def test_a_genuine_replacement_character_is_text() -> None:
    assert re.fullmatch("x\ufffdy", "".join(pieces(byte_tokens(), ids_of("x\ufffdy"))))
