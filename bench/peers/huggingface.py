"""transformers in eager mode with SDPA: the reference everybody has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import torch
import transformers

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, random_prompt, serve


class Transformers:
    """A causal language model and its `DynamicCache`, cut back after each run."""

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(setup.threads)
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[setup.kind]
        self._model = transformers.AutoModelForCausalLM.from_pretrained(setup.model, dtype=dtype, attn_implementation="sdpa")
        self._model.train(False)
        self._vocab = self._model.config.vocab_size
        self._kept: tuple[tuple[int, int], transformers.DynamicCache] | None = None

    def versions(self) -> Mapping[str, str]:
        return {"transformers": transformers.__version__, "torch": torch.__version__, "settings": "eager, sdpa, DynamicCache"}

    @torch.inference_mode()
    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            prompts = [self._ids([random_prompt(number, cell.prompt, self._vocab)]) for number in range(cell.prompts)]
            started = time.perf_counter()
            for prompt in prompts:
                self._model(prompt, past_key_values=transformers.DynamicCache(), logits_to_keep=1).logits.argmax(-1)
            return time.perf_counter() - started
        if cell.phase == "decode":
            cache = self._cache(cell.batch, cell.context)
            tokens = self._ids([[7]] * cell.batch)
            started = time.perf_counter()
            for _ in range(cell.steps):
                logits = self._model(tokens, past_key_values=cache, logits_to_keep=1).logits
                # numpy's argmax is several times faster than torch's.
                tokens = torch.from_numpy(logits.float().numpy().argmax(-1))
            seconds = time.perf_counter() - started
            cache.crop(-cell.steps)
            return seconds
        raise NotMeasured("it has no batches of mixed phases")

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        cache = transformers.DynamicCache()
        tokens = self._ids([list(token_ids)])
        answer: list[int] = []
        for _ in range(count):
            tokens = self._model(tokens, past_key_values=cache, logits_to_keep=1).logits.argmax(-1)
            answer.append(int(tokens))
        return answer

    def _cache(self, batch: int, context: int) -> transformers.DynamicCache:
        """One prompt's keys and values, once for each sequence."""
        if self._kept is None or self._kept[0] != (batch, context):
            cache = transformers.DynamicCache()
            self._model(self._ids([random_prompt(0, context, self._vocab)]), past_key_values=cache, logits_to_keep=1)
            cache.batch_repeat_interleave(batch)
            self._kept = (batch, context), cache
        return self._kept[1]

    @staticmethod
    def _ids(rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return torch.tensor(rows, dtype=torch.int64)


if __name__ == "__main__":
    serve(Transformers)
