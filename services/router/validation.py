"""What a client may ask for, checked before anything is started. Pure; each rule has its own typed error."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.errors import (
    EmptyPromptError,
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidTokenIdError,
    PromptTooLongError,
)
from kvrelay.values import ChatMessage, SamplingParams, StopConditions
from services.router.fleet import Limits

MAX_MESSAGES = 4096
MAX_ROLE_CHARS = 64
MAX_ID_CHARS = 128
"""Of a client's own request id and of a cache salt."""
DEFAULT_MAX_TOKENS = StopConditions().max_tokens


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: Sequence[int]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class GenerateCommand:
    """One request as it came in, nothing of it checked yet."""

    prompt: Prompt | None
    model: str = ""
    """Empty: the only one there is."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    has_seed: bool = False
    """Whether `sampling.seed` is the client's; the router draws one otherwise."""
    stop: StopConditions = field(default_factory=StopConditions)
    has_max_tokens: bool = False
    """Whether `stop.max_tokens` is the client's; otherwise it is the default, or what the context leaves."""
    request_id: str = ""
    cache_salt: str = ""


def check_command(command: GenerateCommand) -> Prompt:
    """Everything that can be said without a model: returns the prompt, or raises the `InvalidRequestError` that names the field."""
    for name, text in (("request_id", command.request_id), ("cache_salt", command.cache_salt)):
        if len(text) > MAX_ID_CHARS:
            raise InvalidRequestError(f"{name} has at most {MAX_ID_CHARS} characters, got {len(text)}", field=name)
    command.sampling.validate()
    command.stop.validate()
    if command.has_max_tokens and command.sampling.min_tokens > command.stop.max_tokens:
        raise InvalidSamplingError(
            f"min_tokens {command.sampling.min_tokens} is over max_tokens {command.stop.max_tokens}", field="min_tokens"
        )
    match command.prompt:
        case None:
            raise InvalidPromptError("give text, chat messages or token ids", field="prompt")
        case TextPrompt("") | TokenPrompt([]):
            raise EmptyPromptError("the prompt is empty", field="prompt")
        case ChatPrompt(messages):
            check_chat(messages)
    return command.prompt


def check_chat(messages: Sequence[ChatMessage]) -> None:
    """Raises `InvalidChatError` for no message, too many, or a role that is no name. Which roles may follow which, the template says."""
    if not messages:
        raise InvalidChatError("a conversation needs a message", field="chat.messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidChatError(f"at most {MAX_MESSAGES} messages, got {len(messages)}", field="chat.messages")
    for position, message in enumerate(messages):
        if not message.role.strip() or len(message.role) > MAX_ROLE_CHARS:
            name = f"chat.messages[{position}].role"
            raise InvalidChatError(f"{name} must be a name of at most {MAX_ROLE_CHARS} characters, got {message.role[:80]!r}", field=name)


def check_against_model(command: GenerateCommand, limits: Limits) -> None:
    """What the model's limits alone refuse, before a tokenizer is needed."""
    check_token_ids("logit_bias", command.sampling.logit_bias, limits.vocab_size)
    check_token_ids("stop.token_ids", command.stop.token_ids, limits.vocab_size)
    if isinstance(command.prompt, TokenPrompt):
        # Length first: it is what makes the rest cheap.
        fit(command, len(command.prompt.ids), limits)
        check_token_ids("token_ids", (min(command.prompt.ids), max(command.prompt.ids)), limits.vocab_size)


def check_token_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises `InvalidTokenIdError`."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidTokenIdError(
                f"token id {token_id} in {field} is not in the vocabulary of {vocab_size}",
                field=field,
                token_id=token_id,
                vocab_size=vocab_size,
            )


def fit(command: GenerateCommand, prompt_tokens: int, limits: Limits) -> StopConditions:
    """The stop conditions with max_tokens settled. Raises `PromptTooLongError`, `InvalidMaxTokensError` or `InvalidSamplingError`."""
    left = limits.max_context_tokens - prompt_tokens
    if left < 1:
        raise PromptTooLongError(
            f"a prompt of {prompt_tokens} tokens leaves no room in a context of {limits.max_context_tokens}",
            field="prompt",
            prompt_tokens=prompt_tokens,
            limit_tokens=limits.max_context_tokens,
        )
    if not command.has_max_tokens:
        most = min(DEFAULT_MAX_TOKENS, left)
        if command.sampling.min_tokens > most:
            raise InvalidSamplingError(
                f"min_tokens {command.sampling.min_tokens} is over the {most} that are generated at most", field="min_tokens"
            )
        return replace(command.stop, max_tokens=most)
    if command.stop.max_tokens > left:
        raise InvalidMaxTokensError(
            f"max_tokens {command.stop.max_tokens} is over the {left} that {prompt_tokens} prompt tokens leave"
            f" of a context of {limits.max_context_tokens}",
            field="stop.max_tokens",
            max_tokens=command.stop.max_tokens,
            limit_tokens=left,
        )
    return command.stop
