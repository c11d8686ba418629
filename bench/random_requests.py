"""Requests of any length that share prefixes, and what their answers are compared by. Reproducible."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kvrelay.values import SamplingParams, StopConditions, Token
from services.engine.api import EngineRequest

BLOCK = 16
"""Tokens a page holds in most places."""
LONGEST_ANSWER = 40
SHORT = 32
"""Prompt tokens of requests that mostly decode."""
FIRST_ID = 3
"""Smaller ids are often special."""
Answers = dict[str, list[Token]]
"""By request id."""


def random_requests(seed: int, count: int, vocab_size: int, longest: int) -> list[EngineRequest]:
    """Prompts of 1 to `longest` tokens, of any magnitude alike; half begin like an earlier one. Greedy, sampled and penalised in turn."""
    script = random.Random(seed)
    requests: list[EngineRequest] = []
    for index in range(count):
        length = round(longest ** (script.random() ** 1.5))
        if index % 4 == 3:
            # Around the edges of blocks.
            length = min(longest, max(1, BLOCK * script.randrange(1, 6) + script.choice((-1, 0, 1))))
        if index < 2:
            length = (1, longest)[index]
        prompt = [script.randrange(FIRST_ID, vocab_size) for _ in range(length)]
        if requests and script.random() < 0.5:
            stem = max(script.choices(requests[-20:], k=3), key=lambda request: len(request.token_ids)).token_ids[:length]
            shared = script.choice((len(stem), script.randrange(len(stem) + 1)))
            prompt = [*stem[:shared], *prompt[shared:]]
        sampling = (
            SamplingParams(logprobs=2),
            SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=script.randrange(2**64), logprobs=1),
            SamplingParams(
                temperature=1.2, min_p=0.01, seed=index, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logprobs=1
            ),
        )[index % 3]
        answer = script.choice((1, 2, 4, 8, 16) if len(prompt) <= SHORT else (1, 1, 2))
        if index % 50 == 5:
            answer = script.randrange(BLOCK, LONGEST_ANSWER + 1)
        stop = StopConditions(max_tokens=answer, strings=["e", "in"] if index % 7 == 0 else [], ignore_eos=index % 2 == 0)
        requests.append(EngineRequest(f"r{index}", prompt, sampling, stop))
    return requests


def differences(requests: Sequence[EngineRequest], wanted: Answers, got: Answers) -> list[str]:
    """A line for each request whose answer (tokens, texts, log probabilities) is not what it is alone."""
    lines = []
    for request in requests:
        alone, crowded = wanted[request.request_id], got[request.request_id]
        if alone != crowded:
            at = next((index for index, (one, other) in enumerate(zip(alone, crowded, strict=False)) if one != other), len(alone))
            lines.append(
                f"{request.request_id}, {len(request.token_ids)} prompt tokens: from token {at} on {crowded[at:]}, not {alone[at:]}"
            )
    return lines
