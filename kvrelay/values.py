"""What a request and its answer are made of: plain frozen values, shared by SDK, services and engine.

No grpc and no protobuf here. `kvrelay.wire` turns these into messages and back.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import InvalidMaxTokensError, InvalidSamplingError, InvalidStopError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGPROBS = 5
MAX_LOGIT_BIAS = 1024


class FinishReason(enum.Enum):
    """Why a generation ended."""

    STOP = "stop"
    """An end token, a stop id or a stop string."""
    LENGTH = "length"
    """`max_tokens` were generated."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. The defaults are greedy."""

    temperature: float = 0.0
    """0 is greedy; otherwise logits are divided by it. 0 to 100."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches this. Over 0, at most 1."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the likeliest. 0 to 1."""
    seed: int = 0
    """Draw i of a request depends on (seed, i) only. 0 to 2**64 - 1. The router draws one where the client gives none."""
    repetition_penalty: float = 1.0
    """Over 1 discourages tokens of prompt and output (Keskar 2019). Over 0, at most 100."""
    presence_penalty: float = 0.0
    """Subtracted once from each token already generated. -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was generated. -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids. Each -100 to 100."""
    min_tokens: int = 0
    """End tokens and stop ids cannot be drawn before this many tokens."""
    logprobs: int | None = None
    """None: no log probabilities. n: of the drawn token and of the n likeliest (0 to 5)."""

    def validate(self) -> None:
        """Raises `InvalidSamplingError` naming the first field that is out of range."""

        def check(name: str, value: float, ok: bool, allowed: str) -> None:
            if not ok or not math.isfinite(value):
                raise InvalidSamplingError(f"{name} must be {allowed}, got {value}", field=name, value=value)

        check("temperature", self.temperature, 0 <= self.temperature <= 100, "between 0 and 100")
        check("top_k", self.top_k, 0 <= self.top_k < 2**31, "0 (off) or more")
        check("top_p", self.top_p, 0 < self.top_p <= 1, "over 0 and at most 1")
        check("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        check("seed", self.seed, 0 <= self.seed < 2**64, "between 0 and 2**64 - 1")
        check("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty <= 100, "over 0 and at most 100")
        check("presence_penalty", self.presence_penalty, -2 <= self.presence_penalty <= 2, "between -2 and 2")
        check("frequency_penalty", self.frequency_penalty, -2 <= self.frequency_penalty <= 2, "between -2 and 2")
        check("min_tokens", self.min_tokens, 0 <= self.min_tokens < 2**31, "0 or more")
        if self.logprobs is not None:
            check("logprobs", self.logprobs, 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        check("logit_bias", len(self.logit_bias), len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            check(f"logit_bias[{token_id}]", bias, -100 <= bias <= 100, "between -100 and 100")


@dataclass(frozen=True, slots=True)
class StopConditions:
    """When generation ends, beside the model's own end tokens."""

    max_tokens: int = 256
    """Tokens to generate at most. 1 or more; prompt and these must fit the context."""
    strings: Sequence[str] = ()
    """Generation ends before the first of these in the text; it is not part of the answer."""
    token_ids: Sequence[int] = ()
    """Generation ends when one of these is drawn; its text is not part of the answer."""
    ignore_eos: bool = False
    """Go on past the model's end tokens (benchmarks)."""

    def validate(self) -> None:
        """Raises `InvalidMaxTokensError` or `InvalidStopError`."""
        if self.max_tokens < 1:
            raise InvalidMaxTokensError(f"max_tokens must be 1 or more, got {self.max_tokens}", max_tokens=self.max_tokens)
        if len(self.strings) > MAX_STOP_STRINGS:
            raise InvalidStopError(f"at most {MAX_STOP_STRINGS} stop strings, got {len(self.strings)}", field="stop.strings")
        if len(self.token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidStopError(f"at most {MAX_STOP_TOKEN_IDS} stop token ids, got {len(self.token_ids)}", field="stop.token_ids")
        for text in self.strings:
            if not 1 <= len(text) <= MAX_STOP_STRING_CHARS:
                raise InvalidStopError(f"a stop string has 1 to {MAX_STOP_STRING_CHARS} characters, got {len(text)}", field="stop.strings")


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One turn of a conversation."""

    role: str
    """Such as 'system', 'user', 'assistant' or 'tool': the model's template decides which may follow which."""
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and the natural logarithm of its probability."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One generated token, as it is streamed."""

    index: int
    """0 for the first token of the answer; contiguous, so that no re-route can repeat or lose one."""
    token_id: int
    text: str
    """Text that is final with this token; may be empty (half a character, a possible stop string) and may hold earlier tokens'
    rest. The last token of an answer carries all that was held back."""
    logprob: float | None = None
    top_logprobs: Sequence[TokenLogprob] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose KV was found (own cache or block store) rather than computed."""
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Where a request's time went. The seven phases partition it: they add up to `total_s`. Seconds."""

    admission_s: float = 0.0
    """Receipt to admitted and tokenised."""
    route_s: float = 0.0
    """Choosing the plan."""
    prefill_queue_s: float = 0.0
    """Plan to first prefill step (wherever prefill runs)."""
    prefill_s: float = 0.0
    """First prefill step to first token drawn."""
    exposed_transfer_s: float = 0.0
    """Prefill's end to KV ready at decode; 0 when local."""
    decode_queue_s: float = 0.0
    """KV ready to the first decode step."""
    decode_s: float = 0.0
    """First decode step to the last event sent."""
    total_s: float = 0.0
    ttft_s: float = 0.0
    """Receipt to first token sent by the router."""


@dataclass(frozen=True, slots=True)
class WorkerMarks:
    """Moments of a request on one worker, nanoseconds since the epoch on that worker's clock; 0 where it did not happen."""

    received: int = 0
    admitted: int = 0
    """Pages reserved."""
    prefill_start: int = 0
    """First prefill step began."""
    prefill_end: int = 0
    """First token drawn."""
    kv_ready: int = 0
    """KV of the whole prompt in this worker's pool (decode of a split)."""
    decode_start: int = 0
    """First decode step began."""
    end: int = 0
    """Last token drawn."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """What one KV hand-over moved and how long it took, as the taker saw it."""

    kv_bytes: int = 0
    blocks: int = 0
    wait_s: float = 0.0
    """Time the puller waited for blocks not computed yet."""
    transfer_s: float = 0.0
    """Time spent receiving, checking and landing bytes."""
    early_bytes: int = 0
    """Bytes that had arrived before prefill ended."""
    retries: int = 0
    transport: str = ""
    """'grpc' (later: 'shm', 'rdma')."""

    @property
    def bandwidth_bytes_per_s(self) -> float:
        return self.kv_bytes / self.transfer_s if self.transfer_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a generation."""

    finish_reason: FinishReason
    usage: Usage
    timings: Timings = Timings()
    transfer: TransferStats | None = None
    """None when the request stayed on one worker."""
    path: str = ""
    """'local', 'split', or 'fallback' (a split that was finished locally)."""
    trace_id: str = ""
    """Hex trace id of the request."""
