"""vLLM for CPUs: its engine stepped by hand in this process, so that prompts and tokens are timed apart."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, random_prompt, serve


class Vllm:
    """`LLMEngine` with prefix caching; a run's requests are dropped when it is over."""

    def __init__(self, setup: Setup) -> None:
        # A worker process of its own could not be stepped, and would poll the core it shares with this one.
        os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        import torch
        import vllm

        self._vllm, self._torch = vllm, torch
        cpus = os.sched_getaffinity(0)
        arguments = vllm.EngineArgs(
            model=setup.model, dtype=setup.kind, enforce_eager=True, enable_prefix_caching=True, max_model_len=4096,
            max_num_batched_tokens=4096, max_num_seqs=64, disable_log_stats=True,
        )  # fmt: skip
        self._engine = vllm.LLMEngine.from_engine_args(arguments)
        os.sched_setaffinity(0, cpus)
        self._vocab = self._engine.model_config.get_vocab_size()
        self._ids = 0
        self._cached = (0, 0)
        """Sequences whose first `context` tokens are in the prefix cache."""

    def versions(self) -> Mapping[str, str]:
        return {
            "vllm": self._vllm.__version__,
            "settings": f"CPU, {self._torch.get_num_threads()} thread(s), enforce_eager, prefix caching",
        }

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            seconds = 0.0
            for _ in range(cell.prompts):
                self._add(random_prompt(1_000_000 + self._ids, cell.prompt, self._vocab), 1)
                seconds += self._drain()[0]
            return seconds
        if cell.phase == "decode":
            prompts = [random_prompt(number, cell.context, self._vocab) for number in range(cell.batch)]
            # The same prompts every time, and each alone first: with their prefixes cached, all begin in one step.
            if (cell.batch, cell.context) != self._cached:
                for prompt in prompts:
                    self._add(prompt, 1)
                    self._drain()
                self._cached = cell.batch, cell.context
            for prompt in prompts:
                self._add(prompt, cell.steps + 1)
            self._step_until(cell.batch)
            seconds = self._step_until(cell.batch * cell.steps)
            self._drain()
            return seconds
        raise NotMeasured("its scheduler takes decodes and a bounded chunk together only with another setting")

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        self._add(token_ids, count)
        return self._drain()[1]

    def _add(self, token_ids: Sequence[int], count: int) -> None:
        self._ids += 1
        params = self._vllm.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False)
        self._engine.add_request(str(self._ids), {"prompt_token_ids": list(token_ids)}, params)

    def _step_until(self, tokens: int) -> float:
        """Seconds until so many tokens have come out."""
        started = time.perf_counter()
        while tokens > 0:
            tokens -= len(self._engine.step())
        seconds = time.perf_counter() - started
        if tokens < 0:
            self._drain()
            raise NotMeasured("its sequences did not begin in one step")
        return seconds

    def _drain(self) -> tuple[float, list[int]]:
        """Seconds until nothing is left to do, and the tokens of the last request to end."""
        last: list[int] = []
        started = time.perf_counter()
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                last = list(output.outputs[0].token_ids)
        return time.perf_counter() - started, last


if __name__ == "__main__":
    serve(Vllm)
