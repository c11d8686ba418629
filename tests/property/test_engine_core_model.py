"""Scheduler and core under any arrivals, releases, holds and resumes: every answer is the right one, and nobody starves.

The fake model reads what the pages hold and refuses to go on from anything but the request's own tokens (see `FakeModel`), so
each example also proves that no page was ever shared, reused or published too early.
"""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay.errors import OverloadedError
from kvrelay.values import SamplingParams, StopConditions
from services.engine.api import Admitted, EngineRequest, Finished, PrefillProgress, TokenDrawn
from tests.unit.engine_core.fakes import VOCAB_SIZE, Bench, expected_answer

SHARED = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
PROMPTS = st.builds(
    lambda shared, own: [*SHARED[:shared], *own],
    st.integers(0, len(SHARED)),
    st.lists(st.integers(1, 3), min_size=1, max_size=24),
)


class EngineMachine(RuleBasedStateMachine):
    """A core with a small pool, so that requests wait, pages are evicted and the budget binds."""

    def __init__(self) -> None:
        super().__init__()
        self.bench = Bench(num_pages=20, block_size=4, max_num_batched_tokens=10, max_num_seqs=3, max_waiting=4)
        self.requests: dict[str, EngineRequest] = {}
        self.arrived: list[str] = []
        self.resumed: dict[str, int | None] = {}
        self.count = 0

    @rule(
        prompt=PROMPTS,
        seed=st.integers(0, 2),
        max_tokens=st.integers(1, 20),
        kind=st.sampled_from(["plain", "plain", "prefill_only", "hold", "held_prefill"]),
        salt=st.sampled_from(["", "", "tenant"]),
        stop_ids=st.lists(st.integers(1, VOCAB_SIZE - 1), max_size=40),
        min_tokens=st.integers(0, 3),
    )
    def add(self, prompt: list[int], seed: int, max_tokens: int, kind: str, salt: str, stop_ids: list[int], min_tokens: int) -> None:
        self.count += 1
        request = EngineRequest(
            f"r{self.count}",
            prompt,
            SamplingParams(seed=seed, min_tokens=min_tokens),
            StopConditions(max_tokens=max_tokens, token_ids=stop_ids),
            cache_salt=salt,
            prefill_only=kind in ("prefill_only", "held_prefill"),
            hold=kind in ("hold", "held_prefill"),
        )
        waiting = self.bench.core.load().waiting
        try:
            self.bench.add(request)
        except OverloadedError:
            assert waiting == 4
            return
        assert waiting < 4
        self.requests[request.request_id] = request
        self.arrived.append(request.request_id)

    @rule(count=st.integers(1, 5))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.check_step()

    def check_step(self) -> None:
        before = len(self.bench.model.steps)
        scheduler = self.bench.core._scheduler
        decoding = [name for name, each in list(scheduler.running.items())[:3] if each.phase.value == "decoding"]
        events = self.bench.step()
        for entries in self.bench.model.steps[before:]:
            assert 1 <= len(entries) <= 3 and 1 <= sum(len(entry.token_ids) for entry in entries) <= 10
        drawn = [name for name, event in events if isinstance(event, TokenDrawn)]
        assert [name for name in drawn if name in decoding] == decoding, "a decode was left out, or out of order"

    def held(self) -> list[str]:
        return [name for name in self.bench.core._scheduler.held]

    @precondition(lambda self: self.held())
    @rule(data=st.data(), whole=st.booleans())
    def resume(self, data: st.DataObject, whole: bool) -> None:
        name = data.draw(st.sampled_from(self.held()))
        request = self.requests[name]
        tokens = len(request.token_ids)
        imported = tokens if whole else data.draw(st.integers(0, tokens))
        first = expected_answer(request)[0] if whole and not request.prefill_only else None
        self.finish_import(name, imported, first)

    def finish_import(self, name: str, imported: int, first: int | None) -> None:
        admitted: Admitted = self.bench.of(name, Admitted)[0]
        for at in range(admitted.cached_tokens, imported):
            self.bench.model.cells[admitted.pages[at // 4]][at % 4] = self.requests[name].token_ids[at]
        self.resumed[name] = first
        self.bench.resume(name, imported, first)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """In any phase; what had finished by then must have had the right answer."""
        self.end(data.draw(st.sampled_from(sorted(self.requests))))

    def end(self, name: str) -> None:
        if any(isinstance(event, Finished) for event in self.bench.events.get(name, [])):
            self.check_answer(name)
        self.bench.core.release(name)
        del self.requests[name]

    def check_answer(self, name: str) -> None:
        request = self.requests[name]
        answer = expected_answer(request)
        drawn: list[TokenDrawn] = self.bench.of(name, TokenDrawn)
        first = 1 if self.resumed.get(name) is not None else 0
        assert [event.token.token_id for event in drawn] == answer[first:]
        assert [event.token.index for event in drawn] == list(range(first, len(answer)))
        progress: list[PrefillProgress] = self.bench.of(name, PrefillProgress)
        assert [p.computed_tokens for p in progress] == sorted({p.computed_tokens for p in progress})
        finished: Finished = self.bench.events[name][-1]  # type: ignore[assignment]
        assert finished.usage.completion_tokens == len(answer) and finished.usage.prompt_tokens == len(request.token_ids)
        if first == 0:
            assert progress[-1].computed_tokens == len(request.token_ids)
            computed_by_others = finished.usage.cached_tokens
            assert 0 <= computed_by_others < len(request.token_ids)

    @invariant()
    def sound(self) -> None:
        self.bench.core.check_integrity()
        load = self.bench.core.load()
        assert load.free_pages + load.cached_pages + load.held_pages == load.total_pages == 20
        assert min(load.prefill_backlog_tokens, load.decode_backlog_tokens, load.running, load.waiting) >= 0

    @invariant()
    def admitted_in_order_of_arrival(self) -> None:
        admitted = [name for name, kind in self.bench.order if kind == "Admitted"]
        given = [name for name in self.arrived if name in set(admitted)]
        assert admitted == given

    def teardown(self) -> None:
        """Everything still open finishes once the holds end and finished requests let go of their pages."""
        for _ in range(1000):
            while self.bench.core.has_work:
                self.check_step()
            if not self.requests:
                break
            for name in self.held():
                self.finish_import(name, 0, None)
            for name in list(self.requests):
                if any(isinstance(event, Finished) for event in self.bench.events.get(name, [])):
                    self.end(name)
        assert not self.requests, "a request starved"
        self.bench.core.check_integrity()
        assert self.bench.core.load().held_pages == 0


EngineMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestEngineCore = EngineMachine.TestCase


def play(seed: int) -> tuple[list[tuple[str, str]], list[object]]:
    """A random script of arrivals, steps and releases."""
    script, bench = random.Random(seed), Bench(num_pages=24, max_num_batched_tokens=12, max_num_seqs=3)
    for index in range(12):
        prompt = [*SHARED[: script.randrange(12)], *(script.randrange(1, 4) for _ in range(script.randrange(1, 20)))]
        bench.add(EngineRequest(f"r{index}", prompt, SamplingParams(seed=seed), StopConditions(max_tokens=script.randrange(1, 12))))
        for _ in range(script.randrange(4)):
            bench.step()
        if index % 3 == 2:
            bench.core.release(f"r{script.randrange(index)}")
    bench.run()
    return bench.order, [bench.events, bench.model.steps, bench.core.take_block_changes()]


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_the_same_arrivals_give_the_same_steps_events_and_pages(seed: int) -> None:
    assert play(seed) == play(seed)
