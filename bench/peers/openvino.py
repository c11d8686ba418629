"""OpenVINO GenAI: its continuous-batching pipeline, which reads the GGUF file straight (F16 for the 16- and 32-bit classes)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import numpy as np
import openvino
import openvino_genai as genai

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, random_prompt, serve

VOCAB = 49152
"""Of the demo model."""


class OpenVino:
    """One pipeline, stepped by hand, so that prompts and tokens are timed apart."""

    def __init__(self, setup: Setup, kv_precision: str = "f32") -> None:
        """With float32 arithmetic its kernels take keys and values in 'f32' or in 'u8', which is its own choice."""
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = 4096
        scheduler.max_num_seqs = 64
        scheduler.enable_prefix_caching = True
        self._kv_precision = kv_precision
        precisions = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": kv_precision}
        properties = {**precisions, "INFERENCE_NUM_THREADS": setup.threads, "NUM_STREAMS": 1}
        if setup.threads == 1:
            properties["ENABLE_CPU_PINNING"] = False
        self._pipeline = genai.ContinuousBatchingPipeline(setup.model, scheduler, "CPU", properties)
        self._ids = 0

    def versions(self) -> Mapping[str, str]:
        return {
            "openvino-genai": genai.__version__,
            "openvino": openvino.__version__,
            "settings": f"CPU plugin, f32 inference precision, {self._kv_precision} KV, prefix caching",
        }

    def run(self, cell: Cell) -> float:
        if cell.phase == "prefill":
            seconds = 0.0
            for _ in range(cell.prompts):
                self._ids += 1
                handle = self._add(random_prompt(1_000_000 + self._ids, cell.prompt, VOCAB), 1)
                seconds += self._drain()
                assert len(handle.read_all()[0].generated_ids) == 1
            return seconds
        if cell.phase == "decode":
            # The same prompts every time: from the second run on their prefix is cached, and all begin in one step.
            prompts = [random_prompt(number, cell.context, VOCAB) for number in range(cell.batch)]
            handles = [self._add(prompt, cell.steps + 1) for prompt in prompts]
            self._pipeline.step()
            started = time.perf_counter()
            for _ in range(cell.steps):
                self._pipeline.step()
            seconds = time.perf_counter() - started
            self._drain()
            assert all(len(handle.read_all()[0].generated_ids) == cell.steps + 1 for handle in handles)
            return seconds
        raise NotMeasured("its scheduler takes decodes and a bounded chunk together only with another setting")

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        handle = self._add(token_ids, count)
        self._drain()
        return list(handle.read_all()[0].generated_ids)

    # A handle that is dropped cancels its request.
    def _add(self, token_ids: Sequence[int], count: int) -> genai.GenerationHandle:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        self._ids += 1
        return self._pipeline.add_request(self._ids, openvino.Tensor(np.array([token_ids], dtype=np.int64)), config)

    def _drain(self) -> float:
        started = time.perf_counter()
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return time.perf_counter() - started


if __name__ == "__main__":
    serve(OpenVino)
