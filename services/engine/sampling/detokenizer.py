"""Token ids to text that is final when it is emitted, and stop strings across token boundaries. Pure.

Every token is a run of bytes (byte-level BPE, or SentencePiece pieces with byte fallback), so text comes from one incremental
UTF-8 decoder: a character is emitted with the token that completes it, and bytes that can never become one are a replacement
character at once. An answer follows its prompt: the leading space of a SentencePiece answer is kept, as it is part of the text.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from tokenizers import Tokenizer

from kvrelay.errors import ModelLoadError

_SPACE_PIECE = "\u2581"


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return alphabet


class TokenBytes:
    """The bytes of each token of one tokenizer, read on demand and kept. Special tokens, and ids without a token, have none."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ModelLoadError` for a tokenizer that is neither byte-level nor SentencePiece."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._known: dict[int, bytes] = {token_id: b"" if token.special else token.content.encode() for token_id, token in added.items()}
        kinds = _decoder_kinds(tokenizer)
        self._alphabet = _byte_level_alphabet() if "ByteLevel" in kinds else None
        self._byte_fallback = "ByteFallback" in kinds
        if self._alphabet is None and not kinds & {"Replace", "Metaspace"}:
            raise ModelLoadError(
                f"unsupported tokenizer decoder ({', '.join(sorted(kinds)) or 'none'}); supported: ByteLevel, SentencePiece"
            )

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._read(token_id)
        return known

    def _read(self, token_id: int) -> bytes:
        piece = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if self._alphabet is not None:
            if all(letter in self._alphabet for letter in piece):
                return bytes(self._alphabet[letter] for letter in piece)
            return piece.encode()
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        return piece.replace(_SPACE_PIECE, " ").encode()


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    if tokenizer.decoder is None:
        return set()
    state = json.loads(tokenizer.decoder.__getstate__())
    return {str(part["type"]) for part in state.get("decoders", [state])}


class Detokenizer:
    """Incremental text of one answer. The pieces joined are the decoding of all its bytes, invalid ones replaced."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is final with this token."""
        return self._utf8.decode(self._token_bytes[token_id])

    def flush(self) -> str:
        """What an unfinished character leaves at the end of the answer."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Finds the stop string that is complete first, whatever pieces the text comes in, and holds back no more than it must."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(strings)
        self._longest = max(map(len, self._strings), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text to emit, whether a stop string was found): of a found one, and after it, nothing is emitted."""
        if not self._strings:
            return text, False
        text = self._held + text
        ends = [(start + len(string), start) for string in self._strings if (start := text.find(string)) >= 0]
        if ends:
            self._held = ""
            return text[: min(ends)[1]], True
        cut = len(text) - self._partial(text)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The held text, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text

    def _partial(self, text: str) -> int:
        """Length of the longest suffix that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            suffix = text[-length:]
            if any(string.startswith(suffix) for string in self._strings):
                return length
        return 0


class AnswerText:
    """The text of one answer: detokeniser and stop strings together."""

    def __init__(self, token_bytes: TokenBytes, stop_strings: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stop_strings)

    def push(self, token_id: int) -> tuple[str, bool]:
        """(text that is final now, whether a stop string ended the answer)."""
        return self._stops.push(self._detokenizer.push(token_id))

    def finish(self) -> tuple[str, bool]:
        """(all that was held back, whether it still held a stop string); call once, when no token follows."""
        text, stopped = self._stops.push(self._detokenizer.flush())
        return (text, True) if stopped else (text + self._stops.flush(), False)
