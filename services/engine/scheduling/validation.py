"""Whether a request can ever be served by this engine: checked at the door, before anything is reserved. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import (
    EmptyPromptError,
    InvalidMaxTokensError,
    InvalidTokenIdError,
    PromptTooLongError,
)
from services.engine.api import EngineRequest


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for."""

    vocab_size: int
    max_context_tokens: int
    """Prompt and answer together."""
    pool_tokens: int
    """Tokens the whole KV pool can hold."""

    def check(self, request: EngineRequest) -> None:
        """Raises the `InvalidRequestError` that names what is wrong."""
        request.sampling.validate()
        request.stop.validate()
        prompt = len(request.token_ids)
        if prompt == 0:
            raise EmptyPromptError("the prompt holds no token", field="token_ids")
        self._check_ids(request)
        self._check_sizes(request, prompt)

    def _check_ids(self, request: EngineRequest) -> None:
        smallest, largest = min(request.token_ids), max(request.token_ids)
        for token_id in (smallest, largest, *request.sampling.logit_bias, *request.stop.token_ids):
            if not 0 <= token_id < self.vocab_size:
                raise InvalidTokenIdError(
                    f"token id {token_id} is not in the vocabulary of {self.vocab_size}", token_id=token_id, vocab_size=self.vocab_size
                )

    def _check_sizes(self, request: EngineRequest, prompt: int) -> None:
        """The context counts every token; the pool needs no room for the last one drawn, which is never fed back."""
        answer = request.stop.max_tokens
        self._check_fit("context", self.max_context_tokens, prompt, prompt + 1, prompt + answer, answer)
        self._check_fit("KV pool", self.pool_tokens, prompt, prompt, prompt if request.prefill_only else prompt + answer - 1, answer)

    @staticmethod
    def _check_fit(room: str, limit: int, prompt: int, least: int, whole: int, max_tokens: int) -> None:
        if least > limit:
            raise PromptTooLongError(
                f"a prompt of {prompt} tokens does not fit the {room} of {limit}", prompt_tokens=prompt, limit_tokens=limit
            )
        if whole > limit:
            raise InvalidMaxTokensError(
                f"{prompt} prompt tokens and max_tokens {max_tokens} do not fit the {room} of {limit}",
                max_tokens=max_tokens,
                limit_tokens=limit,
                prompt_tokens=prompt,
            )
