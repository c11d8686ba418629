"""A generation as the caller words it, checked and put into one value. No I/O: what is wrong here is never sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kvrelay.errors import (
    EmptyPromptError,
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidStopError,
    InvalidTokenIdError,
)
from kvrelay.options import checked, integer, string
from kvrelay.values import ChatMessage, SamplingParams, StopConditions

MessageLike = ChatMessage | Mapping[str, str]
Prompt = str | Sequence[MessageLike] | Sequence[int]
"""Text, a conversation, or token ids."""

_SAMPLING_OPTIONS = (
    "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "logprobs",
)  # fmt: skip


class GenerateOptions(TypedDict, total=False):
    """Keywords of `generate`. None means the same as absent."""

    text: str | None
    """Prompt as plain text; exactly one of prompt, text, messages and token_ids is given."""
    messages: Sequence[MessageLike] | None
    """Prompt as a conversation."""
    token_ids: Sequence[int] | None
    """Prompt as token ids."""
    model: str | None
    """May be left out where the fleet serves one model."""
    max_tokens: int | None
    """Default 256, or what the context leaves."""
    temperature: float | None
    """This and the following: `kvrelay.values.SamplingParams`."""
    top_k: int | None
    top_p: float | None
    min_p: float | None
    seed: int | None
    """The router draws one where none is given."""
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    min_tokens: int | None
    logprobs: int | None
    stop: str | Sequence[str] | None
    """The answer ends before the first of these strings."""
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    request_id: str | None
    """Echoed in traces; the router draws one where none is given."""
    cache_salt: str | None
    """Requests with different salts never share a cached prefix."""
    timeout: float | None
    """Seconds for the whole request, instead of the client's; inf: the server's own limit."""
    traceparent: str | None
    """W3C trace context to continue, instead of the current OpenTelemetry span."""
    metadata: Mapping[str, str | bytes] | None
    """Sent beside the client's own."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked request; exactly one of text, messages and token_ids is not None."""

    text: str | None
    messages: Sequence[ChatMessage] | None
    token_ids: Sequence[int] | None
    model: str
    sampling: SamplingParams
    seed_given: bool
    stop: StopConditions
    max_tokens_given: bool
    request_id: str
    cache_salt: str


def build_request(prompt: Prompt | None, options: GenerateOptions) -> GenerationRequest:
    """Raises the `InvalidRequestError`s that need no tokenizer and no model; TypeError for a keyword that does not exist."""
    unknown = set(options) - set(GenerateOptions.__annotations__)
    if unknown:
        raise TypeError(f"generate() has no keyword {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: checked(name, value) for name, value in options.items() if value is not None}
    text, messages, token_ids = _one_prompt(prompt, given)
    return GenerationRequest(
        text=text,
        messages=messages,
        token_ids=token_ids,
        model=given.get("model", ""),
        sampling=_sampling(given),
        seed_given="seed" in given,
        stop=_stop(given),
        max_tokens_given="max_tokens" in given,
        request_id=given.get("request_id", ""),
        cache_salt=given.get("cache_salt", ""),
    )


def _one_prompt(prompt: Prompt | None, given: Mapping[str, Any]) -> tuple[str | None, Sequence[ChatMessage] | None, Sequence[int] | None]:
    named = [name for name in ("text", "messages", "token_ids") if name in given]
    if len(named) + (prompt is not None) != 1:
        got = ", ".join((["prompt"] if prompt is not None else []) + named) or "none"
        raise InvalidPromptError(f"exactly one of prompt, text, messages and token_ids must be given, got {got}", field="prompt")
    value: Any = given[named[0]] if prompt is None else checked("prompt", prompt)
    kind = named[0] if prompt is None else _kind_of(value)
    if kind == "text":
        if not value:
            raise EmptyPromptError("the prompt is empty", field="text")
        return value, None, None
    if kind == "messages":
        return None, _messages(value), None
    if not value:
        raise EmptyPromptError("the prompt holds no token", field="token_ids")
    return None, None, _token_ids(value)


def _kind_of(prompt: str | Sequence[Any]) -> str:
    if isinstance(prompt, str):
        return "text"
    return "messages" if any(isinstance(item, (ChatMessage, Mapping)) for item in prompt) else "token_ids"


def _messages(items: Sequence[MessageLike]) -> Sequence[ChatMessage]:
    if not items:
        raise InvalidChatError("a conversation needs at least one message", field="messages")
    messages = []
    for position, item in enumerate(items):
        if isinstance(item, Mapping):
            role, content = item.get("role"), item.get("content")
        else:
            role, content = getattr(item, "role", None), getattr(item, "content", None)
        try:
            messages.append(ChatMessage(string(role), string(content)))
        except (TypeError, ValueError):
            raise InvalidChatError(f"message {position} needs a role and a content, both text", field=f"messages[{position}]") from None
    return tuple(messages)


def _token_ids(items: Sequence[int]) -> Sequence[int]:
    ids = []
    for position, item in enumerate(items):
        try:
            token_id = integer(item)
        except TypeError:
            raise InvalidPromptError(f"token id {position} is no integer: {item!r}", field="token_ids") from None
        if not 0 <= token_id < 2**32:
            raise InvalidTokenIdError(f"token id {token_id} at position {position} lies outside any vocabulary", token_id=token_id)
        ids.append(token_id)
    return ids


def _sampling(given: Mapping[str, Any]) -> SamplingParams:
    sampling = SamplingParams(**{name: given[name] for name in _SAMPLING_OPTIONS if name in given})
    sampling.validate()
    _token_ids(list(sampling.logit_bias))
    return sampling


def _stop(given: Mapping[str, Any]) -> StopConditions:
    names = (("max_tokens", "max_tokens"), ("strings", "stop"), ("token_ids", "stop_token_ids"), ("ignore_eos", "ignore_eos"))
    stop = StopConditions(**{name: given[option] for name, option in names if option in given})
    stop.validate()
    if stop.max_tokens >= 2**31:
        raise InvalidMaxTokensError(f"max_tokens is over any context: {stop.max_tokens}", max_tokens=stop.max_tokens)
    if not all(0 <= token_id < 2**32 for token_id in stop.token_ids):
        raise InvalidStopError("a stop token id lies outside any vocabulary", field="stop.token_ids")
    return stop
