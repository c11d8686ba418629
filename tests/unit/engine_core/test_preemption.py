"""More answers than pages: who loses its pages, who never does, and that nobody can tell afterwards."""

from __future__ import annotations

import pytest

from kvrelay.values import SamplingParams, StopConditions, Usage
from services.engine.api import Admitted, EngineRequest, Finished, PrefillProgress, TokenDrawn
from services.engine.scheduling.sequence import Phase
from tests.unit.engine_core.fakes import Bench, expected_answer


def request(name: str, first: int, tokens: int, max_tokens: int, **kwargs: bool) -> EngineRequest:
    """Prompts with different `first` share nothing."""
    stop = StopConditions(max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(name, [first] * tokens, SamplingParams(seed=first), stop, **kwargs)


def bench_of(*requests: EngineRequest, pages: int = 8) -> Bench:
    bench = Bench(num_pages=pages)
    for one in requests:
        bench.add(one)
    return bench


def run_until_preempted(bench: Bench) -> list[str]:
    while not bench.plans or not bench.plans[-1].preempted:
        assert bench.core.has_work, "nobody was preempted"
        bench.step()
    return [sequence.request_id for sequence in bench.plans[-1].preempted]


def let_finish(bench: Bench) -> None:
    """To the end, with finished requests released."""
    while bench.core.has_work:
        let_finish_a_step(bench)


def let_finish_a_step(bench: Bench) -> None:
    bench.step()
    for name in list(bench.core._live):
        if isinstance(bench.events.get(name, [None])[-1], Finished):
            bench.core.release(name)


def tokens(bench: Bench, name: str) -> list[int]:
    return [event.token.token_id for event in bench.of(name, TokenDrawn)]


def import_kv(bench: Bench, one: EngineRequest) -> None:
    for page in bench.of(one.request_id, Admitted)[0].pages:
        bench.model.cells[page] = [one.token_ids[0]] * bench.block_size


def test_the_newest_loses_its_pages_and_nobody_can_tell() -> None:
    # Two requests of six pages in eight.
    old, new = request("old", 1, 8, 17), request("new", 2, 8, 17)
    bench = bench_of(old, new)
    assert run_until_preempted(bench) == ["new"]
    load = bench.core.load()
    assert (load.running, load.waiting, load.prefill_backlog_tokens) == (1, 1, len(bench.core._live["new"].token_ids))
    let_finish(bench)
    assert bench.core.preemptions == sum(len(plan.preempted) for plan in bench.plans) >= 1
    for one in (old, new):
        assert tokens(bench, one.request_id) == expected_answer(one)
        assert [event.token.index for event in bench.of(one.request_id, TokenDrawn)] == [*range(17)]
        assert len(bench.of(one.request_id, Admitted)) == 1
        assert [event.computed_tokens for event in bench.of(one.request_id, PrefillProgress)] == [8]
        assert bench.events[one.request_id][-1].usage == Usage(8, 0, 17)  # type: ignore[union-attr]
    marks = bench.events["new"][-1].marks  # type: ignore[union-attr]
    assert marks.received < marks.admitted < marks.prefill_start < marks.prefill_end < marks.decode_start < marks.end
    assert marks.prefill_end < bench.of("old", TokenDrawn)[-1].at_ns, "its first token is where it was"


def test_the_blocks_it_had_published_are_found_again_unless_they_were_needed() -> None:
    bench = bench_of(request("old", 1, 8, 17), request("new", 2, 8, 17))
    run_until_preempted(bench)
    before = len(bench.plans)
    let_finish(bench)
    again = next(chunk for plan in bench.plans[before:] for chunk in plan.chunks if chunk.sequence.preemptions)
    assert again.start > 0 and again.start % 4 == 0 and again.draws


def test_cached_blocks_go_before_anybody_is_preempted() -> None:
    bench = bench_of(request("gone", 9, 12, 1), pages=10)
    let_finish(bench)
    assert bench.core.load().cached_pages == 3
    for one in (request("old", 1, 8, 13), request("new", 2, 8, 13)):
        bench.add(one)
    let_finish(bench)
    assert not any(plan.preempted for plan in bench.plans)


def test_several_are_preempted_newest_first_and_come_back_oldest_first_before_those_who_wait() -> None:
    # The first one needs the whole pool in the end.
    bench = bench_of(*(request(name, index, 4, most) for index, (name, most) in enumerate([("a", 29), ("b", 20), ("c", 20)], 1)))
    order = run_until_preempted(bench)
    bench.add(request("late", 9, 1, 2))
    while bench.core.has_work and not isinstance(bench.events["a"][-1], Finished):
        bench.step()
        order += [sequence.request_id for sequence in bench.plans[-1].preempted]
    assert order[:2] == ["c", "b"] and "a" not in order and "late" not in bench.events
    bench.core.release("a")
    assert {*bench.scheduler.waiting} == {"b", "c", "late"}
    back = []
    while bench.scheduler.waiting:
        before = {*bench.scheduler.waiting}
        let_finish_a_step(bench)
        back += sorted(before - {*bench.scheduler.waiting})
    assert back[:3] == ["b", "c", "late"]
    let_finish(bench)
    assert all(isinstance(bench.events[name][-1], Finished) for name in ("a", "b", "c", "late"))


def test_a_preempted_prompt_is_not_reported_twice() -> None:
    bench = Bench(num_pages=12, max_num_batched_tokens=2, max_num_seqs=2)
    old, new = request("old", 1, 12, 36), request("new", 2, 20, 2)
    for one in (old, new):
        bench.add(one)
    assert run_until_preempted(bench) == ["new"] and not bench.of("new", TokenDrawn)
    let_finish(bench)
    computed = [event.computed_tokens for event in bench.of("new", PrefillProgress)]
    assert computed == sorted(set(computed)) and computed[-1] == 20
    assert tokens(bench, "new") == expected_answer(new)


def test_an_imported_answer_goes_on_after_a_preemption_as_if_nothing_had_been() -> None:
    old, new = request("old", 1, 8, 17), request("new", 2, 8, 17, hold=True)
    bench = bench_of(old, new)
    bench.step()
    import_kv(bench, new)
    bench.resume("new", 8, expected_answer(new)[0])
    assert run_until_preempted(bench) == ["new"]
    let_finish(bench)
    assert tokens(bench, "new") == expected_answer(new)[1:] and tokens(bench, "old") == expected_answer(old)
    finished = bench.events["new"][-1]
    assert isinstance(finished, Finished) and finished.usage == Usage(8, 0, 17)
    assert not bench.of("new", PrefillProgress), "the prompt came from elsewhere"
    assert finished.marks.prefill_start == finished.marks.prefill_end == 0 < finished.marks.kv_ready < finished.marks.decode_start


class TestPagesThatOthersUse:
    def test_a_prompt_computed_for_others_keeps_its_pages_and_the_oldest_waits_for_their_release(self) -> None:
        old, reader = request("old", 1, 8, 25), request("read", 2, 16, 1, prefill_only=True)
        bench = bench_of(old, reader)
        bench.run()
        assert len(bench.core._live["old"].table.pages) == 4 and bench.core.load().free_pages == 0
        assert not bench.core.has_work and not any(plan.preempted for plan in bench.plans), "it waits with its pages, asleep"
        assert bench.core._live["read"].table.pages == list(bench.of("read", Admitted)[0].pages)
        bench.core.release("read")
        assert bench.core.has_work
        bench.run()
        assert tokens(bench, "old") == expected_answer(old)

    def test_a_running_prompt_for_others_is_not_preempted_either(self) -> None:
        bench = Bench(num_pages=8, max_num_batched_tokens=2, max_num_seqs=2)
        old, reader = request("old", 1, 8, 25), request("read", 2, 16, 1, prefill_only=True)
        for one in (old, reader):
            bench.add(one)
        while len(bench.core._live["old"].table.pages) < 4 or bench.plans[-1].shape.decode_seqs:
            bench.step()
        assert bench.core._live["read"].phase is Phase.PREFILLING, "the older one waits while the prompt is computed"
        bench.run()
        assert isinstance(bench.events["read"][-1], Finished) and not any(plan.preempted for plan in bench.plans)
        bench.core.release("read")
        bench.run()
        assert tokens(bench, "old") == expected_answer(old)

    def test_a_held_request_keeps_its_pages_until_it_runs(self) -> None:
        old, held = request("old", 1, 8, 25), request("held", 2, 16, 9, hold=True)
        bench = bench_of(old, held)
        bench.run()
        assert not bench.core.has_work and bench.core.load().free_pages == 0
        import_kv(bench, held)
        bench.resume("held", 16, expected_answer(held)[0])
        assert run_until_preempted(bench) == ["held"]
        let_finish(bench)
        assert tokens(bench, "old") == expected_answer(old) and tokens(bench, "held") == expected_answer(held)[1:]

    def test_a_finished_request_keeps_its_pages_until_the_release(self) -> None:
        first, second = request("first", 1, 12, 4), request("second", 2, 8, 20)
        bench = bench_of(first, second)
        bench.run()
        assert isinstance(bench.events["first"][-1], Finished) and not bench.core.has_work
        bench.core.release("first")
        bench.run()
        assert tokens(bench, "second") == expected_answer(second)


class TestAdmission:
    def test_a_page_is_left_to_everybody_who_grows(self) -> None:
        bench = bench_of(request("a", 1, 8, 9), request("b", 2, 8, 9), request("c", 3, 16, 9))
        bench.step()
        # Four pages are left, and c's prompt has four; but each of the three may soon need one more.
        assert [name for name, kind in bench.order if kind == "Admitted"] == ["a", "b"]

    def test_who_comes_alone_may_have_the_whole_pool(self) -> None:
        one = request("a", 1, 31, 2)
        bench = bench_of(one)
        bench.run()
        assert tokens(bench, "a") == expected_answer(one) and bench.core.load().held_pages == 8

    def test_a_prompt_that_was_computed_twice_at_once_does_not_take_twice_the_pages_for_ever(self) -> None:
        # Both prompts in one step, so neither finds the other's blocks; the second answer then needs all eight pages.
        first, second = request("a", 1, 8, 1), request("b", 1, 8, 24)
        bench = bench_of(first, second)
        let_finish(bench)
        assert tokens(bench, "a") == expected_answer(first) and tokens(bench, "b") == expected_answer(second)

    def test_answers_do_not_take_pages_before_they_need_them_but_the_load_tells_what_is_claimed(self) -> None:
        bench = bench_of(request("a", 1, 8, 17))
        bench.step()
        load = bench.core.load()
        assert (load.held_pages, load.claimed_pages, load.free_pages) == (2, 4, 6)
        bench.run()
        assert (bench.core.load().held_pages, bench.core.load().claimed_pages) == (6, 0)

    @pytest.mark.parametrize("phase", ["waiting", "recomputing"])
    def test_a_preempted_request_can_leave_at_any_time(self, phase: str) -> None:
        bench = bench_of(request("old", 1, 8, 17), request("new", 2, 8, 17))
        run_until_preempted(bench)
        while phase == "recomputing" and bench.core._live["new"].phase is Phase.WAITING:
            bench.step()
            for name in list(bench.core._live):
                if isinstance(bench.events[name][-1], Finished):
                    bench.core.release(name)
        bench.core.release("new")
        bench.core.check_integrity()
        bench.core.release("old")
        assert bench.core.load().held_pages == 0 and not bench.core.has_work
