"""The engine over real tiny models: whatever else runs, is cached or was computed elsewhere, an answer keeps its bits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from tokenizers import Tokenizer

from kvrelay.values import SamplingParams, StopConditions, Token
from services.engine.api import Admitted, EngineEvent, EngineRequest, Finished, TokenDrawn
from services.engine.device_model import DeviceModel
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, load_model
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.core import EngineCore
from services.engine.scheduling.scheduler import SchedulerLimits
from services.engine.scheduling.validation import RequestLimits
from tests.engine_runs import KERNELS, MODES, options
from tests.tiny_models import FAMILIES, write_tiny_model

Event = TypeVar("Event")
BLOCK = 16


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_tiny_model(root / family, family, seed=11) for family in FAMILIES}


class Worker:
    """One engine core over one model, driven by hand."""

    def __init__(self, model: LlamaModel, folder: Path, *, budget: int = 256, max_num_seqs: int = 8, num_pages: int = 400) -> None:
        self.pool = KvPool(model.config, num_pages, BLOCK, model.options.kv_dtype)
        self.core = EngineCore(
            DeviceModel(model, self.pool),
            TokenBytes(Tokenizer.from_file(str(folder / "tokenizer.json"))),
            BlockManager(num_pages, BLOCK, b"t" * 32),
            SchedulerLimits(budget, max_num_seqs, max_waiting=1000),
            RequestLimits(model.config.vocab_size, model.config.max_positions, num_pages * BLOCK),
            model.config.eos_ids,
        )
        self.events: dict[str, list[EngineEvent]] = {}
        self._now = 0

    def clock(self) -> int:
        self._now += 1
        return self._now

    def step(self) -> None:
        for request_id, event in self.core.step(self.clock):
            self.events.setdefault(request_id, []).append(event)

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def of(self, request_id: str, kind: type[Event]) -> list[Event]:
        return [event for event in self.events[request_id] if isinstance(event, kind)]

    def tokens(self, request_id: str) -> list[Token]:
        assert isinstance(self.events[request_id][-1], Finished), self.events[request_id][-1]
        return [event.token for event in self.of(request_id, TokenDrawn)]

    def answers(self, requests: list[EngineRequest], *, together: int = 8) -> list[list[Token]]:
        """Runs the requests, `together` at a time, and releases them."""
        for start in range(0, len(requests), together):
            for request in requests[start : start + together]:
                self.core.add(request, self.clock())
            self.run()
        found = [self.tokens(request.request_id) for request in requests]
        for request in requests:
            self.release(request.request_id)
        self.nothing_left()
        return found

    def release(self, request_id: str) -> None:
        self.core.release(request_id)
        self.events.pop(request_id, None)

    def nothing_left(self) -> None:
        self.core.check_integrity()
        load = self.core.load()
        assert (load.held_pages, load.running, load.waiting) == (0, 0, 0)


def random_requests(seed: int, count: int, vocab_size: int = 300) -> list[EngineRequest]:
    """Prompts of 1 to 300 tokens, half of them sharing prefixes; greedy, sampled and penalised in turn, log probabilities asked for."""
    script = random.Random(seed)
    stem = [script.randrange(3, vocab_size) for _ in range(160)]
    requests = []
    for index in range(count):
        length = script.choice([1, 2, 15, 16, 17, 31, 33, script.randrange(1, 130), script.randrange(130, 300)])
        shared = script.choice([0, script.randrange(len(stem))])
        prompt = [*stem[:shared], *(script.randrange(3, vocab_size) for _ in range(length))][:300]
        sampling = SamplingParams(logprobs=2)
        if index % 3 == 1:
            sampling = SamplingParams(temperature=0.9, top_k=40, top_p=0.95, seed=script.randrange(2**64), logprobs=2)
        if index % 3 == 2:
            sampling = SamplingParams(
                temperature=1.2, min_p=0.01, seed=index, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3, logprobs=2
            )
        stop = StopConditions(max_tokens=script.randrange(1, 14), strings=["e", "in"] if index % 4 == 0 else [])
        requests.append(EngineRequest(f"{seed}-{index}", prompt, sampling, stop))
    return requests


def split_answers(prefill: Worker, decode: Worker, requests: list[EngineRequest]) -> list[list[Token]]:
    """Prompts computed on one worker, their pages copied into requests that the other holds, the answers generated there."""
    answers = []
    for request in requests:
        prefill.core.add(replace(request, prefill_only=True), prefill.clock())
        decode.core.add(replace(request, hold=True), decode.clock())
    prefill.run()
    decode.run()
    for request in requests:
        name, prompt = request.request_id, len(request.token_ids)
        first = prefill.tokens(name)[0]
        source, target = prefill.of(name, Admitted)[0], decode.of(name, Admitted)[0]
        if prefill.of(name, TokenDrawn)[0].finish is None:
            for block in range(target.cached_tokens // BLOCK, len(target.pages)):
                decode.pool.page_view(target.pages[block])[:] = prefill.pool.page_view(source.pages[block])
            decode.core.resume(name, prompt, first.token_id, decode.clock())
        answers.append([first])
    decode.run()
    for request, answer in zip(requests, answers, strict=True):
        if prefill.of(request.request_id, TokenDrawn)[0].finish is None:
            answer.extend(decode.tokens(request.request_id))
        prefill.release(request.request_id)
        decode.release(request.request_id)
    prefill.nothing_left()
    decode.nothing_left()
    return answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_keeps_its_bits_alone_batched_chunked_cached_and_split(
    folders: dict[str, Path], family: str, kernels: str, mode: str
) -> None:
    model = load_model(folders[family], options(mode, kernels))
    requests = random_requests(FAMILIES.index(family), 16)

    def worker(budget: int) -> Worker:
        return Worker(model, folders[family], budget=budget)

    alone = []
    for request in requests:
        alone += worker(4096).answers([request])
    for budget in (64, 256, 4096):
        one = worker(budget)
        assert one.answers(requests) == alone, f"cold, 8 at a time, budget {budget}"
        assert one.answers(requests) == alone, f"warm, 8 at a time, budget {budget}"
        assert one.answers(requests[::-1], together=1)[::-1] == alone, f"warm, one at a time, budget {budget}"
    prefill, decode = worker(64), worker(256)
    assert split_answers(prefill, decode, requests) == alone, "split, cold"
    assert split_answers(prefill, decode, requests) == alone, "split, warm"
    assert split_answers(worker(256), decode, requests) == alone, "split, taker warm"
    assert any(len(answer) > 1 for answer in alone) and len({token.token_id for answer in alone for token in answer}) > 20


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_fp32_is_what_transformers_generates(folders: dict[str, Path], family: str, kernels: str) -> None:
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(folders[family], dtype=torch.float32).eval()
    script = random.Random(5)
    prompts = [[script.randrange(3, 300) for _ in range(length)] for length in [1, 2, 16, 17, 64, 200, *range(5, 100, 7)]]
    prompts += [[*prompts[5][:150], *prompt[:20]] for prompt in prompts[:4]]
    wanted = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=10, do_sample=False)
        wanted.append(out[0, len(prompt) :].tolist())
    requests = [EngineRequest(f"r{index}", prompt, stop=StopConditions(max_tokens=10)) for index, prompt in enumerate(prompts)]
    worker = Worker(load_model(folders[family], options("float32", kernels)), folders[family], budget=64)
    for state in ("cold", "warm"):
        got = [[token.token_id for token in answer] for answer in worker.answers(requests)]
        assert got == wanted, state


@pytest.mark.parametrize("mode", MODES)
def test_a_prefix_from_elsewhere_gives_the_answer_that_computing_it_gives(folders: dict[str, Path], mode: str) -> None:
    model = load_model(folders["llama"], MODES[mode])
    source, target = Worker(model, folders["llama"]), Worker(model, folders["llama"], budget=48)
    requests = [request for request in random_requests(77, 24) if len(request.token_ids) > BLOCK]
    wanted = source.answers(requests)
    for request in requests:
        source.core.add(replace(request, prefill_only=True), 0)
        target.core.add(replace(request, hold=True), 0)
    source.run()
    target.run()
    script = random.Random(3)
    for request in requests:
        name = request.request_id
        blocks = script.randrange(1 + (len(request.token_ids) - 1) // BLOCK)
        here, there = target.of(name, Admitted)[0], source.of(name, Admitted)[0]
        for block in range(here.cached_tokens // BLOCK, blocks):
            target.pool.page_view(here.pages[block])[:] = source.pool.page_view(there.pages[block])
        target.core.resume(name, blocks * BLOCK, None, target.clock())
    target.run()
    assert [target.tokens(request.request_id) for request in requests] == wanted
    for request in requests:
        source.release(request.request_id)
        target.release(request.request_id)
    source.nothing_left()
    target.nothing_left()


def test_pages_are_reused_and_evicted_under_pressure_without_a_wrong_answer(folders: dict[str, Path]) -> None:
    model = load_model(folders["qwen3"], MODES["bfloat16"])
    requests = random_requests(123, 60)
    roomy = Worker(model, folders["qwen3"], num_pages=2000).answers(requests, together=60)
    tight = Worker(model, folders["qwen3"], num_pages=40, budget=64)
    script = random.Random(9)
    waiting, open_ids, got = list(requests), [], {}
    while waiting or open_ids:
        for _ in range(min(len(waiting), script.randrange(4))):
            tight.core.add(waiting[0], tight.clock())
            open_ids.append(waiting.pop(0).request_id)
        tight.step()
        for name in [name for name in open_ids if isinstance(tight.events.get(name, [None])[-1], Finished)]:
            got[name] = tight.tokens(name)
            tight.core.release(name)
            open_ids.remove(name)
        tight.core.check_integrity()
    assert [got[request.request_id] for request in requests] == roomy
    assert tight.core.take_block_changes().stored
    tight.nothing_left()
