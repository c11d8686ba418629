"""Random requests through real engine cores: among others on workers with too few pages, over a split, and each of them alone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tokenizers import Tokenizer

from bench.exact_worker import Counts, Worker
from bench.random_requests import BLOCK, SHORT, Answers, random_requests
from kvrelay.values import Token
from services.engine.api import EngineRequest
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.policies import ORDERS, POLICIES
from services.engine.scheduling.scheduler import SchedulerLimits

SESSION = 100
"""Requests that one worker, or pair of workers, sees before the next begins with other settings."""


@dataclass(slots=True)
class Exactness:
    """One model under test: the same requests crowded together and alone."""

    model: LlamaModel
    tokenizer: Tokenizer
    longest: int = 1500
    """Prompt tokens."""
    counts: Counts = field(default_factory=Counts)
    """Of the crowded runs."""
    _text: TokenBytes = field(init=False)

    def __post_init__(self) -> None:
        self._text = TokenBytes(self.tokenizer)

    def requests(self, seed: int, count: int) -> list[EngineRequest]:
        return random_requests(seed, count, self.model.config.vocab_size, self.longest)

    def alone(self, requests: Sequence[EngineRequest], done: Callable[[], None] = lambda: None) -> Answers:
        """Each request in a core of its own with an empty cache, its prompt in one piece."""
        answers = {}
        pool = self._pool(_pages(requests, BLOCK), BLOCK)
        for request in requests:
            worker = Worker(self.model, self._text, pool, SchedulerLimits(self.longest, 1))
            worker.add(request)
            while not worker.ended(request.request_id):
                worker.step()
            answers[request.request_id] = worker.tokens(request.request_id)
            done()
        return answers

    def crowded(
        self, seed: int, requests: Sequence[EngineRequest], *, split: bool = False, done: Callable[[], None] = lambda: None
    ) -> Answers:
        """`together` or `split`, in sessions: some of requests of any length, some of short ones, for which the pools are small."""
        short = [request for request in requests[::2] if len(request.token_ids) <= SHORT]
        apart = {request.request_id for request in short}
        answers = Answers()
        run = self.split if split else self.together
        for queue, blocks in (([request for request in requests if request.request_id not in apart], (8, 16, 32)), (short, (1, 2))):
            for start in range(0, len(queue), SESSION):
                script = random.Random(seed + start)
                answers |= run(script, queue[start : start + SESSION], script.choice(blocks), done)
        return answers

    def together(self, script: random.Random, requests: Sequence[EngineRequest], block: int, done: Callable[[], None]) -> Answers:
        """On one worker with hardly the pages for the two largest of them, under a random policy, at random times."""
        worker = self._random_worker(script, requests, block, POLICIES)
        arriving, answers = deque(requests), Answers()
        while arriving or worker.events:
            for _ in range(min(len(arriving), script.choice((0, 0, 1, 2, 16)))):
                worker.add(arriving.popleft())
            worker.step()
            for name in [name for name in worker.events if worker.ended(name)]:
                answers[name] = worker.tokens(name)
                worker.release(name)
                done()
        self._end(worker, requests, answers)
        return answers

    def split(self, script: random.Random, requests: Sequence[EngineRequest], block: int, done: Callable[[], None]) -> Answers:
        """On a prefill and a decode worker: pages of whole prompts, or of their first blocks, are copied; some prompts stay whole."""
        prefill = self._random_worker(script, requests, block, ("prefill-only", "chunked"))
        decode = self._random_worker(script, requests, block, ("decode-only", "chunked"))
        arriving, answers = deque(requests), Answers()
        by_name = {request.request_id: request for request in requests}
        while arriving or prefill.events or decode.events:
            for _ in range(min(len(arriving), script.choice((0, 0, 1, 2, 16)))):
                request = arriving.popleft()
                if script.random() < 0.15:
                    decode.add(request)
                else:
                    prefill.add(replace(request, prefill_only=True))
            prefill.step()
            for name in [name for name in prefill.events if prefill.ended(name) and name not in decode.events]:
                decode.add(replace(by_name[name], hold=True))
            decode.step()
            for name in [name for name in decode.events if name in prefill.events and decode.admitted(name)]:
                answers[name] = self._hand_over(script, prefill, decode, by_name[name])
                prefill.release(name)
            for name in [name for name in decode.events if decode.ended(name)]:
                answers[name] = [*answers.get(name, ()), *decode.tokens(name)]
                decode.release(name)
                done()
        self._end(prefill, (), {})
        self._end(decode, requests, answers)
        return answers

    def _hand_over(self, script: random.Random, prefill: Worker, decode: Worker, request: EngineRequest) -> list[Token]:
        """Copies KV into a held request and lets it run; returns the part of its answer that is there already."""
        name, prompt = request.request_id, len(request.token_ids)
        source, target = prefill.admitted(name), decode.admitted(name)
        assert source is not None and target is not None
        whole = script.random() < 0.75
        block = decode.pool.page_size
        end = len(target.pages) if whole else script.randrange((prompt - 1) // block + 1)
        for index in range(target.cached_tokens // block, end):
            decode.pool.page_view(target.pages[index])[:] = prefill.pool.page_view(source.pages[index])
        first = prefill.tokens(name)
        decode.resume(name, prompt if whole else end * block, first[0].token_id if whole else None)
        return first if whole else []

    def _pool(self, pages: int, block: int) -> KvPool:
        return KvPool(self.model.config, pages, block, self.model.options.kv_dtype, self.model.options.device)

    def _random_worker(self, script: random.Random, requests: Sequence[EngineRequest], block: int, policies: Sequence[str]) -> Worker:
        policy = script.choice(policies)
        limits = SchedulerLimits(
            max_num_batched_tokens=script.choice((40, 256, 1000, 1600)),
            max_num_seqs=script.choice((8, 24, 40)),
            max_waiting=10**6,
            policy=policy,
            tbt_objective_ms=50.0 if policy == "dynamic" else 0.0,
            prefill_order=script.choice(ORDERS),
        )
        return Worker(self.model, self._text, self._pool(round(_pages(requests, block) * script.uniform(1, 2)), block), limits)

    def _end(self, worker: Worker, requests: Sequence[EngineRequest], answers: Answers) -> None:
        worker.check_empty()
        self.counts.add(worker.counts)
        self.counts.requests += len(requests)
        self.counts.prompt_tokens += sum(len(request.token_ids) for request in requests)
        self.counts.answer_tokens += sum(map(len, answers.values()))


def _pages(requests: Sequence[EngineRequest], block: int) -> int:
    """What the largest of them needs."""
    return max(-(-(len(request.token_ids) + request.stop.max_tokens) // block) for request in requests)
