"""What the client refuses by itself, before anything is sent; and the pure retry policy."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from kvrelay import errors
from kvrelay.options import _KINDS, MAX_TIMEOUT_S, checked
from kvrelay.request import GenerateOptions, build_request
from kvrelay.retry import RetryPolicy
from kvrelay.values import ChatMessage

NAN = float("nan")
LONE = "\ud800"


@pytest.mark.parametrize(
    ("prompt", "options", "error"),
    [
        (None, {}, errors.InvalidPromptError),
        ("x", {"token_ids": [1]}, errors.InvalidPromptError),
        (None, {"text": "x", "token_ids": [1]}, errors.InvalidPromptError),
        ("x", {"messages": [ChatMessage("user", "x")]}, errors.InvalidPromptError),
        (b"bytes", {}, errors.InvalidPromptError),
        ({"role": "user"}, {}, errors.InvalidPromptError),
        (7, {}, errors.InvalidPromptError),
        (["a", "b"], {}, errors.InvalidPromptError),
        ([1, 2.5], {}, errors.InvalidPromptError),
        (None, {"text": 7}, errors.InvalidPromptError),
        (LONE, {}, errors.InvalidPromptError),
        ("", {}, errors.EmptyPromptError),
        ([], {}, errors.EmptyPromptError),
        (None, {"messages": []}, errors.InvalidChatError),
        ([{"role": "user"}], {}, errors.InvalidChatError),
        ([{"role": "user", "content": 7}], {}, errors.InvalidChatError),
        ([ChatMessage("user", "x"), 7], {}, errors.InvalidChatError),
        ([ChatMessage("user", LONE)], {}, errors.InvalidChatError),
        ([-1], {}, errors.InvalidTokenIdError),
        ([2**32], {}, errors.InvalidTokenIdError),
        ("x", {"logit_bias": {-1: 1.0}}, errors.InvalidTokenIdError),
        ("x", {"temperature": NAN}, errors.InvalidSamplingError),
        ("x", {"temperature": -0.1}, errors.InvalidSamplingError),
        ("x", {"top_p": 0.0}, errors.InvalidSamplingError),
        ("x", {"top_p": 1.1}, errors.InvalidSamplingError),
        ("x", {"seed": 2**64}, errors.InvalidSamplingError),
        ("x", {"logprobs": 6}, errors.InvalidSamplingError),
        ("x", {"logit_bias": {1: NAN}}, errors.InvalidSamplingError),
        ("x", {"max_tokens": 0}, errors.InvalidMaxTokensError),
        ("x", {"max_tokens": 2**40}, errors.InvalidMaxTokensError),
        ("x", {"stop": ["s"] * 17}, errors.InvalidStopError),
        ("x", {"stop": ""}, errors.InvalidStopError),
        ("x", {"stop": [LONE]}, errors.InvalidStopError),
        ("x", {"stop_token_ids": [-1]}, errors.InvalidStopError),
        ("x", {"stop_token_ids": [1] * 65}, errors.InvalidStopError),
        ("x", {"model": LONE}, errors.InvalidRequestError),
    ],
)  # fmt: skip
def test_each_mistake_has_its_own_error(prompt: Any, options: Any, error: type[errors.KvRelayError]) -> None:
    with pytest.raises(errors.KvRelayError) as caught:
        build_request(prompt, options)
    assert type(caught.value) is error


SAMPLING, STOP, CHAT, PROMPT = errors.InvalidSamplingError, errors.InvalidStopError, errors.InvalidChatError, errors.InvalidPromptError
WRONG_KINDS: list[tuple[str, list[Any], type[errors.InvalidRequestError]]] = [
    ("max_tokens", ["5", 1.5, NAN, True], errors.InvalidMaxTokensError),
    ("temperature", ["hot", "0.5", [1.0], True, 10**400], SAMPLING),
    ("top_k", [1.5, NAN], SAMPLING),
    ("seed", ["x", 1.5], SAMPLING),
    ("logprobs", ["x"], SAMPLING),
    ("logit_bias", [[1], 5, {"a": 1.0}, {1.5: 1.0}, {1: "x"}], SAMPLING),
    ("stop", [5, [5], b"x", {"a"}], STOP),
    ("stop_token_ids", [3, ["a"], "12", [1.5]], STOP),
    ("messages", [5, iter([ChatMessage("user", "x")]), "x"], CHAT),
    ("token_ids", [12, iter([1]), b"ab", {1}], PROMPT),
    ("text", [7, b"x"], PROMPT),
    ("model", [5], errors.InvalidRequestError),
    ("request_id", [5, LONE], errors.InvalidRequestError),
    ("cache_salt", [5, LONE], errors.InvalidRequestError),
    ("ignore_eos", ["no", 1], errors.InvalidRequestError),
    ("timeout", ["5", NAN, 0, -1.0, float("-inf"), True], errors.InvalidRequestError),
    ("traceparent", ["a\nb", 5], errors.InvalidRequestError),
    ("metadata", [[1], {"Bad Key": "x"}, {"": "x"}], errors.InvalidRequestError),
    ("metadata", [{"x": "a\nb"}, {"x": "é"}, {"x": 5}, {"x": b"5"}, {"x-bin": "5"}], errors.InvalidRequestError),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "error"), [(name, value, error) for name, values, error in WRONG_KINDS for value in values])
def test_a_value_of_a_wrong_kind_is_refused_by_name(name: str, value: Any, error: type[errors.InvalidRequestError]) -> None:
    prompt = None if name in ("text", "messages", "token_ids") else "x"
    with pytest.raises(errors.InvalidRequestError) as caught:
        build_request(prompt, {name: value})  # type: ignore[misc]
    assert type(caught.value) is error
    assert caught.value.message.startswith(f"{name} must be ") and caught.value.fields["field"].startswith(name.split("_")[0])


def test_an_error_does_not_carry_what_is_private() -> None:
    for name, value in (("metadata", {"authorization": "s3cret\n"}), ("cache_salt", b"s3cret"), ("text", "s3cret" + LONE)):
        with pytest.raises(errors.InvalidRequestError) as caught:
            checked(name, value)
        assert "s3cret" not in str(caught.value)


def test_every_keyword_has_a_kind() -> None:
    assert set(_KINDS) == set(GenerateOptions.__annotations__) | {"prompt"}


def test_a_set_is_no_prompt_because_its_order_is_undefined() -> None:
    with pytest.raises(errors.InvalidPromptError):
        build_request({1, 2}, {})  # type: ignore[arg-type]


def test_numpys_numbers_are_numbers() -> None:
    options: Any = {"max_tokens": np.int64(5), "temperature": np.float32(0.5), "logit_bias": {np.int32(7): 1}}
    request = build_request(np.array([3, 4]), options)  # type: ignore[arg-type]
    assert request.token_ids == [3, 4] and request.stop.max_tokens == 5
    assert request.sampling.temperature == 0.5 and request.sampling.logit_bias == {7: 1.0}


@pytest.mark.parametrize(
    ("timeout", "deadline_s"), [(5, 5.0), (float("inf"), None), (1e12, MAX_TIMEOUT_S), (sys.float_info.max, MAX_TIMEOUT_S)]
)
def test_no_end_is_no_deadline_and_a_huge_timeout_is_cut(timeout: float, deadline_s: float | None) -> None:
    assert checked("timeout", timeout) == deadline_s


def test_the_three_kinds_of_prompt_are_told_apart() -> None:
    assert build_request("text", {}).text == "text"
    assert build_request([1, 2], {}).token_ids == [1, 2]
    mixed = build_request([{"role": "system", "content": "a"}, ChatMessage("user", "b")], {})
    assert mixed.messages == (ChatMessage("system", "a"), ChatMessage("user", "b"))
    assert build_request(None, {"token_ids": range(3)}).token_ids == [0, 1, 2]


def test_none_is_absent_and_one_stop_string_is_a_list_of_one() -> None:
    request = build_request("x", {"temperature": None, "seed": None, "max_tokens": None, "stop": "END", "text": None})
    assert not request.seed_given and not request.max_tokens_given and request.stop.strings == ("END",)
    assert build_request("x", {"seed": 0}).seed_given


def test_a_keyword_that_does_not_exist_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="temprature"):
        build_request("x", {"temprature": 1.0})  # type: ignore[typeddict-unknown-key]


def test_only_unavailability_is_retried_and_only_so_often() -> None:
    policy = RetryPolicy(tries=3, base_s=0.1, max_s=2.0, draw=lambda: 0.5)
    busy = errors.OverloadedError("full")
    assert [policy.delay_s(attempt, busy) for attempt in (1, 2, 3)] == [0.05, 0.1, None]
    assert policy.delay_s(1, errors.WorkerLostError("gone")) == 0.05
    for error in (errors.InternalError("x"), errors.DeadlineExceededError("x"), errors.EmptyPromptError("x")):
        assert policy.delay_s(1, error) is None


def test_a_servers_hint_is_a_lower_bound_and_too_long_a_hint_gives_up() -> None:
    policy = RetryPolicy(base_s=0.1, max_s=2.0, draw=lambda: 0.5)
    assert policy.delay_s(1, errors.OverloadedError("full", retry_after_s=1.0)) == pytest.approx(1.05)
    assert policy.delay_s(1, errors.OverloadedError("full", retry_after_s=2.0)) == 2.0
    assert policy.delay_s(1, errors.OverloadedError("full", retry_after_s=2.1)) is None
