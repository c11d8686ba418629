"""What a client may ask for: each rule has its own error, and nothing is started."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kvrelay.errors import (
    EmptyPromptError,
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidStopError,
    InvalidTokenIdError,
    NoWorkerError,
    PromptTooLongError,
    UnknownModelError,
)
from kvrelay.values import ChatMessage, SamplingParams, StopConditions
from services.router.fleet import Limits
from services.router.validation import ChatPrompt, GenerateCommand, Prompt, TextPrompt, TokenPrompt, check_command, fit
from tests.simulation.router_world import VOCAB, World, worker
from tests.simulation.virtual_time import finished, run_virtual

FITS = TokenPrompt((3, 4, 5))


def chat(*roles: str) -> ChatPrompt:
    return ChatPrompt([ChatMessage(role, "text") for role in roles])


def sampled(**values: object) -> GenerateCommand:
    return GenerateCommand(FITS, sampling=SamplingParams(**values))  # type: ignore[arg-type]


def stopped(*, has_max_tokens: bool = False, **values: object) -> GenerateCommand:
    return GenerateCommand(FITS, stop=StopConditions(**values), has_max_tokens=has_max_tokens)  # type: ignore[arg-type]


BAD: Sequence[tuple[str, GenerateCommand, type[Exception]]] = [
    ("no prompt", GenerateCommand(None), InvalidPromptError),
    ("empty text", GenerateCommand(TextPrompt("")), EmptyPromptError),
    ("no ids", GenerateCommand(TokenPrompt(())), EmptyPromptError),
    ("no messages", GenerateCommand(chat()), InvalidChatError),
    ("no role", GenerateCommand(chat("user", "")), InvalidChatError),
    ("a role of blanks", GenerateCommand(chat(" ")), InvalidChatError),
    ("a role that is a text", GenerateCommand(chat("r" * 65)), InvalidChatError),
    ("too many messages", GenerateCommand(chat(*["user"] * 4097)), InvalidChatError),
    ("id over the vocabulary", GenerateCommand(TokenPrompt((3, VOCAB))), InvalidTokenIdError),
    ("prompt over the context", GenerateCommand(TokenPrompt((3,) * 4096)), PromptTooLongError),
    ("max_tokens 0", stopped(max_tokens=0, has_max_tokens=True), InvalidMaxTokensError),
    ("max_tokens negative", stopped(max_tokens=-5, has_max_tokens=True), InvalidMaxTokensError),
    ("max_tokens over the context", stopped(max_tokens=4094, has_max_tokens=True), InvalidMaxTokensError),
    ("stop string empty", stopped(strings=[""]), InvalidStopError),
    ("stop strings too many", stopped(strings=["x"] * 17), InvalidStopError),
    ("stop string too long", stopped(strings=["x" * 257]), InvalidStopError),
    ("stop ids too many", stopped(token_ids=[3] * 65), InvalidStopError),
    ("stop id over the vocabulary", stopped(token_ids=[VOCAB]), InvalidTokenIdError),
    ("logit bias id over the vocabulary", sampled(logit_bias={VOCAB: 1.0}), InvalidTokenIdError),
    ("logit bias too strong", sampled(logit_bias={3: 101.0}), InvalidSamplingError),
    ("temperature nan", sampled(temperature=math.nan), InvalidSamplingError),
    ("temperature negative", sampled(temperature=-0.1), InvalidSamplingError),
    ("temperature infinite", sampled(temperature=math.inf), InvalidSamplingError),
    ("top_p 0", sampled(top_p=0.0), InvalidSamplingError),
    ("top_p over 1", sampled(top_p=1.1), InvalidSamplingError),
    ("top_k negative", sampled(top_k=-1), InvalidSamplingError),
    ("logprobs too many", sampled(logprobs=6), InvalidSamplingError),
    (
        "min_tokens over max_tokens",
        GenerateCommand(FITS, sampling=SamplingParams(min_tokens=9), stop=StopConditions(8), has_max_tokens=True),
        InvalidSamplingError,
    ),
    ("unknown model", GenerateCommand(FITS, model="huge"), UnknownModelError),
    ("request id too long", GenerateCommand(FITS, request_id="x" * 129), InvalidRequestError),
    ("salt too long", GenerateCommand(FITS, cache_salt="x" * 129), InvalidRequestError),
]


@pytest.mark.parametrize(("command", "error"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_a_bad_request_has_its_own_error_and_starts_nothing(command: GenerateCommand, error: type[Exception]) -> None:
    async def main() -> None:
        world = World([worker("prefill"), worker("decode")])
        result = await finished(world.run(command))
        assert type(result) is error
        assert world.workers.calls == [] and world.workers.fetches == 0
        world.assert_idle()

    run_virtual(main)


def test_an_unknown_model_names_the_known_ones_and_an_empty_fleet_the_missing_role() -> None:
    async def main() -> None:
        unknown = await finished(World([worker("decode")]).run(GenerateCommand(FITS, model="huge")))
        assert isinstance(unknown, UnknownModelError) and unknown.fields == {"model": "huge", "known": "tiny", "field": "model"}
        missing = await finished(World([worker("prefill")]).run(GenerateCommand(FITS, model="tiny")))
        assert isinstance(missing, NoWorkerError) and missing.fields["role"] == "decode"
        nobody = await finished(World([]).run(GenerateCommand(FITS)))
        assert isinstance(nobody, NoWorkerError)

    run_virtual(main)


@pytest.mark.parametrize(
    "prompt", [chat("user"), chat("system", "user"), chat("user", "assistant", "user"), TextPrompt("x"), TokenPrompt((0,))], ids=repr
)
def test_good_prompts_pass(prompt: Prompt) -> None:
    assert check_command(GenerateCommand(prompt)) is prompt


@pytest.mark.parametrize(
    ("prompt_tokens", "asked", "given"), [(10, None, 256), (4000, None, 96), (4095, None, 1), (10, 4086, 4086), (10, 1, 1), (4095, 1, 1)]
)
def test_max_tokens_is_the_clients_or_what_the_context_leaves(prompt_tokens: int, asked: int | None, given: int) -> None:
    stop = StopConditions() if asked is None else StopConditions(asked)
    command = GenerateCommand(FITS, stop=stop, has_max_tokens=asked is not None)
    assert fit(command, prompt_tokens, Limits(4096, VOCAB)).max_tokens == given


def test_what_does_not_fit_says_how_much_would() -> None:
    with pytest.raises(PromptTooLongError) as long:
        fit(GenerateCommand(FITS), 4096, Limits(4096, VOCAB))
    assert long.value.fields["prompt_tokens"] == "4096" and long.value.fields["limit_tokens"] == "4096"
    with pytest.raises(InvalidMaxTokensError) as much:
        fit(GenerateCommand(FITS, stop=StopConditions(97), has_max_tokens=True), 4000, Limits(4096, VOCAB))
    assert much.value.fields["max_tokens"] == "97" and much.value.fields["limit_tokens"] == "96"
