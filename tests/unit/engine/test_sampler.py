"""Draws: reproducible, of the right distribution, with penalties as computed by hand."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import torch

from kvrelay.errors import InternalError
from kvrelay.values import SamplingParams
from services.engine.sampling.sampler import SampledToken, sample, uniform

LOGITS = torch.tensor([1.0, 3.0, -1.0, 2.0, 0.5])


def draw(logits: torch.Tensor = LOGITS, *, index: int = 0, **params: Any) -> int:
    ids = {name: params.pop(name) for name in ("prompt_ids", "output_ids", "blocked_ids") if name in params}
    return sample(logits, SamplingParams(**params), index=index, **ids).token_id


def shares(count: int = 4000, logits: torch.Tensor = LOGITS, **params: Any) -> dict[int, float]:
    drawn = Counter(draw(logits, index=index, seed=17, **params) for index in range(count))
    return {token_id: number / count for token_id, number in drawn.items()}


def assert_distribution(found: dict[int, float], expected: list[float], count: int = 4000) -> None:
    """Each share lies within four standard deviations."""
    for token_id, probability in enumerate(expected):
        spread = 4 * math.sqrt(probability * (1 - probability) / count)
        assert abs(found.get(token_id, 0.0) - probability) <= spread, (token_id, found, expected)


def test_greedy_takes_the_likeliest_and_the_lowest_id_of_equals() -> None:
    assert draw() == 1
    assert draw(torch.tensor([0.0, 2.0, 2.0])) == 1


def test_greedy_leaves_the_logits_alone() -> None:
    logits = LOGITS.clone()
    draw(logits, logit_bias={0: 50.0}, repetition_penalty=2.0, presence_penalty=1.0, prompt_ids=[1], output_ids=[3])
    assert torch.equal(logits, LOGITS)


def test_plain_sampling_follows_the_softmax() -> None:
    assert_distribution(shares(temperature=1.0), torch.softmax(LOGITS, 0).tolist())


def test_temperature_divides_the_logits() -> None:
    assert_distribution(shares(temperature=0.5), torch.softmax(LOGITS / 0.5, 0).tolist())


def test_top_k_keeps_k_tokens() -> None:
    expected = torch.softmax(LOGITS.masked_fill(LOGITS < 2.0, -math.inf), 0).tolist()
    assert_distribution(shares(temperature=1.0, top_k=2), expected)
    assert set(shares(50, temperature=100.0, top_k=1)) == {1}


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = shares(logits=probabilities.log(), temperature=1.0, top_p=0.7)
    assert_distribution(found, [0.5 / 0.8, 0.3 / 0.8, 0.0, 0.0])
    assert set(shares(50, logits=probabilities.log(), temperature=1.0, top_p=1e-9)) == {0}


def test_min_p_drops_tokens_far_below_the_likeliest() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found = shares(logits=probabilities.log(), temperature=1.0, min_p=0.29)
    assert_distribution(found, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0])


def test_top_k_comes_before_top_p() -> None:
    probabilities = torch.tensor([0.4, 0.3, 0.2, 0.1])
    found = shares(logits=probabilities.log(), temperature=1.0, top_k=2, top_p=0.5)
    assert set(found) == {0}, "0.4 is 57 % of what top-k left"


def test_repetition_penalty_shrinks_positive_and_stretches_negative_logits() -> None:
    logits = torch.tensor([2.0, 1.5, -1.0])
    assert draw(logits, repetition_penalty=1.5, prompt_ids=[0]) == 1, "2 / 1.5 < 1.5"
    assert draw(logits, repetition_penalty=1.3, prompt_ids=[0]) == 0, "2 / 1.3 > 1.5"
    assert draw(torch.tensor([-1.0, -1.5]), repetition_penalty=2.0, output_ids=[0]) == 1, "-1 * 2 < -1.5"


def test_presence_and_frequency_penalties_count_the_answer_only() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0])
    assert draw(logits, presence_penalty=1.5, prompt_ids=[0]) == 0
    assert draw(logits, presence_penalty=1.5, output_ids=[0, 0, 0]) == 1
    assert draw(logits, presence_penalty=0.9, output_ids=[0, 0, 0]) == 0
    assert draw(logits, frequency_penalty=0.4, output_ids=[0, 0]) == 0, "2 - 0.8 > 1"
    assert draw(logits, frequency_penalty=0.4, output_ids=[0, 0, 0]) == 1, "2 - 1.2 < 1"


def test_logit_bias_moves_the_choice() -> None:
    assert draw(logit_bias={2: 5.0}) == 2
    assert draw(logit_bias={1: -100.0}) == 3
    assert draw(logit_bias={99: 100.0, -1: 100.0}) == 1, "ids outside the vocabulary are ignored"


def test_end_tokens_are_blocked_until_min_tokens() -> None:
    for index, expected in ((0, 3), (1, 3), (2, 1)):
        assert draw(index=index, min_tokens=2, blocked_ids={1, 77}) == expected
    assert 1 not in shares(200, temperature=1.0, min_tokens=10_000, blocked_ids=[1])


def test_draws_depend_on_seed_and_index_only() -> None:
    first = [draw(index=index, temperature=1.0, seed=5) for index in range(50)]
    again = [draw(index=index, temperature=1.0, seed=5) for index in reversed(range(50))][::-1]
    assert first == again
    assert first != [draw(index=index, temperature=1.0, seed=6) for index in range(50)]


def test_the_generator_is_the_documented_one_in_every_process() -> None:
    expected = [uniform(seed, index) for seed, index in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 7))]
    code = (
        "from services.engine.sampling.sampler import uniform\nprint([uniform(s, i) for s, i in ((0, 0), (0, 1), (1, 0), (2**64 - 1, 7))])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == str(expected)
    for (seed, index), number in zip(((0, 0), (0, 1), (1, 0), (2**64 - 1, 7)), expected, strict=True):
        assert number == (_philox(seed, index + 1) >> 11) * 2.0**-53
    assert len({uniform(3, index) for index in range(1000)}) == 1000


def _philox(key: int, counter: int) -> int:
    """First word of Philox4x64-10, written from the paper."""
    words, keys, mask = [counter, 0, 0, 0], [key, 0], 2**64 - 1
    for _ in range(10):
        first, second = words[0] * 0xD2E7470EE14C6C93, words[2] * 0xCA5A826395121157
        words = [(second >> 64) ^ words[1] ^ keys[0], second & mask, (first >> 64) ^ words[3] ^ keys[1], first & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


def test_logprobs_are_of_the_model_itself() -> None:
    params = SamplingParams(logprobs=3, logit_bias={2: 50.0})
    token = sample(LOGITS, params, index=0)
    expected = torch.log_softmax(LOGITS, 0).tolist()
    assert token.token_id == 2
    assert token.logprob == pytest.approx(expected[2], abs=1e-6)
    assert [item for item, _ in token.top] == [1, 3, 0]
    assert [value for _, value in token.top] == pytest.approx([expected[1], expected[3], expected[0]], abs=1e-6)


def test_logprobs_come_only_when_asked_for() -> None:
    assert sample(LOGITS, SamplingParams(), index=0) == SampledToken(1)
    assert sample(LOGITS, SamplingParams(logprobs=0), index=0).top == ()
    assert sample(torch.zeros(6), SamplingParams(logprobs=4), index=0).top == tuple((i, pytest.approx(-math.log(6))) for i in range(4))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers_are_an_error(temperature: float) -> None:
    for logits in (torch.tensor([0.0, math.nan]), torch.full((3,), -math.inf)):
        with pytest.raises(InternalError):
            draw(logits, temperature=temperature)


def test_a_hot_draw_over_a_large_vocabulary_stays_in_the_filtered_set() -> None:
    logits = torch.randn(49_152, generator=torch.Generator().manual_seed(3))
    likeliest = set(torch.topk(logits, 40).indices.tolist())
    for index in range(50):
        assert draw(logits, index=index, temperature=50.0, top_k=40, top_p=0.99, seed=index) in likeliest
