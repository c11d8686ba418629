"""What one step does, request by request, over a model whose answers prove that its KV was right."""

from __future__ import annotations

import pytest

from kvrelay.errors import (
    ConfigError,
    EmptyPromptError,
    InternalError,
    InvalidMaxTokensError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidStopError,
    InvalidTokenIdError,
    KvRelayError,
    OverloadedError,
    PromptTooLongError,
)
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Usage
from services.engine.api import Admitted, EngineRequest, Failed, Finished, PrefillProgress, TokenDrawn
from services.engine.sampling.detokenizer import AnswerText
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from services.engine.scheduling.sequence import Phase, SequenceState
from tests.unit.engine_core.fakes import EOS, FINGERPRINT, VOCAB_SIZE, Bench, byte_tokens, expected_answer, ids_of


def request(name: str, prompt: list[int] | int = 10, max_tokens: int = 4, **kwargs: object) -> EngineRequest:
    token_ids = [*range(1, prompt + 1)] if isinstance(prompt, int) else prompt
    stop = kwargs.pop("stop", StopConditions(max_tokens=max_tokens, ignore_eos=True))
    return EngineRequest(name, token_ids, stop=stop, **kwargs)  # type: ignore[arg-type]


def scripted(bench: Bench, text: str, **kwargs: object) -> EngineRequest:
    """A request whose answer is `text`, byte by byte."""
    bench.model.script[(1, 2, 3)] = [*ids_of(text), *[EOS] * 50]
    return EngineRequest("scripted", [1, 2, 3], **kwargs)  # type: ignore[arg-type]


def text_of(bench: Bench, name: str) -> str:
    return "".join(event.token.text for event in bench.of(name, TokenDrawn))


def outcome(bench: Bench, name: str) -> Finished | Failed:
    event = bench.events[name][-1]
    assert isinstance(event, Finished | Failed)
    return event


class TestOneRequest:
    def test_its_events_come_in_order_and_its_answer_is_the_models(self) -> None:
        bench = Bench(max_num_batched_tokens=8)
        one = request("a", 18)
        bench.add(one)
        bench.run()
        kinds = [type(event) for event in bench.events["a"]]
        assert kinds == [Admitted, *[PrefillProgress] * 3, *[TokenDrawn] * 4, Finished]
        assert [event.token.token_id for event in bench.of("a", TokenDrawn)] == expected_answer(one)
        assert [event.token.index for event in bench.of("a", TokenDrawn)] == [0, 1, 2, 3]
        assert [event.computed_tokens for event in bench.of("a", PrefillProgress)] == [8, 16, 18]
        assert outcome(bench, "a") == Finished(FinishReason.LENGTH, Usage(18, 0, 4), outcome(bench, "a").marks)  # type: ignore[union-attr]

    def test_marks_name_the_moments_in_order(self) -> None:
        bench = Bench()
        bench.add(request("a"))
        bench.run()
        marks = outcome(bench, "a").marks  # type: ignore[union-attr]
        moments = [marks.received, marks.admitted, marks.prefill_start, marks.prefill_end, marks.decode_start, marks.end]
        assert moments == sorted(moments) and moments[0] > 0 and len(set(moments)) == 6 and marks.kv_ready == 0

    def test_pages_stay_until_the_release_and_then_are_cached_or_free(self) -> None:
        bench = Bench()
        bench.add(request("a", 10, max_tokens=3))
        bench.run()
        assert bench.core.load().held_pages == 3
        bench.core.release("a")
        bench.core.release("a")
        load = bench.core.load()
        assert (load.held_pages, load.cached_pages, load.free_pages) == (0, 3, 125)
        bench.core.check_integrity()

    def test_pages_are_reserved_for_what_is_fed_and_not_for_the_last_token_drawn(self) -> None:
        bench = Bench()
        bench.add(request("a", 8, max_tokens=1))
        bench.add(request("b", [*range(50, 58)], max_tokens=2))
        bench.run()
        assert bench.core.load().held_pages == 2 + 3

    def test_prefill_only_draws_one_token_and_reserves_the_prompt_only(self) -> None:
        bench = Bench()
        one = request("a", 8, max_tokens=40, prefill_only=True)
        bench.add(one)
        bench.run()
        assert [event.token.token_id for event in bench.of("a", TokenDrawn)] == expected_answer(one)
        finished = outcome(bench, "a")
        assert isinstance(finished, Finished) and finished.finish_reason is None and finished.usage == Usage(8, 0, 1)
        assert bench.core.load().held_pages == 2

    def test_prefill_only_says_when_its_first_token_ends_the_answer(self) -> None:
        bench = Bench()
        bench.add(request("length", 8, max_tokens=1, prefill_only=True))
        one = request("stop", [9, 9, 9], prefill_only=True)
        bench.add(request("stop", [9, 9, 9], prefill_only=True, stop=StopConditions(token_ids=expected_answer(one))))
        bench.run()
        assert [outcome(bench, name).finish_reason for name in ("length", "stop")] == [FinishReason.LENGTH, FinishReason.STOP]  # type: ignore[union-attr]

    def test_a_warm_cache_changes_the_count_and_not_the_answer(self) -> None:
        bench = Bench()
        bench.add(request("cold", 13))
        bench.run()
        bench.core.release("cold")
        bench.add(request("warm", 13))
        bench.run()
        assert bench.of("warm", Admitted)[0].cached_tokens == 12
        assert [e.token for e in bench.of("warm", TokenDrawn)] == [e.token for e in bench.of("cold", TokenDrawn)]
        assert outcome(bench, "warm").usage == Usage(13, 12, 4)  # type: ignore[union-attr]


class TestEndings:
    def test_an_end_token_ends_the_answer_and_counts(self) -> None:
        bench = Bench()
        bench.add(scripted(bench, "hi"))
        bench.run()
        assert text_of(bench, "scripted") == "hi"
        assert outcome(bench, "scripted") == Finished(FinishReason.STOP, Usage(3, 0, 3), outcome(bench, "scripted").marks)  # type: ignore[union-attr]

    def test_ignore_eos_goes_on_but_a_stop_id_still_ends(self) -> None:
        bench = Bench()
        bench.model.script[(1, 2, 3)] = [EOS, EOS, 7, 8]
        bench.add(EngineRequest("a", [1, 2, 3], stop=StopConditions(max_tokens=9, ignore_eos=True, token_ids=[7])))
        bench.run()
        assert [event.token.token_id for event in bench.of("a", TokenDrawn)] == [EOS, EOS, 7]
        assert outcome(bench, "a").finish_reason is FinishReason.STOP  # type: ignore[union-attr]

    def test_the_text_of_a_stop_id_is_no_part_of_the_answer(self) -> None:
        bench = Bench()
        bench.add(scripted(bench, "ab!c", stop=StopConditions(token_ids=ids_of("!"))))
        bench.run()
        assert text_of(bench, "scripted") == "ab"

    @pytest.mark.parametrize(
        ("answer", "stops", "text", "reason", "tokens"),
        [
            ("one END two", ["END"], "one ", FinishReason.STOP, 7),
            ("one EN two", ["END"], "one EN two", FinishReason.STOP, 11),
            ("日本語", ["本"], "日", FinishReason.STOP, 6),
            ("abcdefgh", ["cde", "d"], "abc", FinishReason.STOP, 4),
            ("abcdefgh" * 3, ["xyz", "hh"], "abcdefgh" * 2 + "abcd", FinishReason.LENGTH, 20),
            ("aaaaaaaaaaaaaaaaaaaEND", ["END"], "aaaaaaaaaaaaaaaaaaaE", FinishReason.LENGTH, 20),
        ],
    )
    def test_stop_strings_cut_the_text_and_held_text_comes_with_the_last_token(
        self, answer: str, stops: list[str], text: str, reason: FinishReason, tokens: int
    ) -> None:
        bench = Bench()
        bench.add(scripted(bench, answer, stop=StopConditions(max_tokens=20, strings=stops)))
        bench.run()
        finished = outcome(bench, "scripted")
        assert text_of(bench, "scripted") == text
        assert isinstance(finished, Finished) and finished.finish_reason is reason and finished.usage.completion_tokens == tokens

    def test_held_text_comes_with_the_end_token(self) -> None:
        bench = Bench()
        bench.add(scripted(bench, "the EN", stop=StopConditions(strings=["END"])))
        bench.run()
        assert [event.token.text for event in bench.of("scripted", TokenDrawn)][-3:] == ["", "", "EN"]

    def test_an_unfinished_character_is_flushed_with_the_last_token(self) -> None:
        bench = Bench()
        bench.add(scripted(bench, "a😀", stop=StopConditions(max_tokens=3)))
        bench.run()
        assert [event.token.text for event in bench.of("scripted", TokenDrawn)] == ["a", "", "\ufffd"]

    def test_end_and_stop_ids_are_blocked_before_min_tokens(self) -> None:
        bench = Bench()
        bench.model.script[(1, 2, 3)] = [EOS, 7, EOS, 7]
        bench.add(EngineRequest("a", [1, 2, 3], SamplingParams(min_tokens=3), StopConditions(token_ids=[7])))
        bench.run()
        assert [event.token.token_id for event in bench.of("a", TokenDrawn)] == [1, 8, 1, 7]

    def test_log_probabilities_travel_with_the_token(self) -> None:
        bench = Bench()
        bench.add(request("a", sampling=SamplingParams(logprobs=1)))
        bench.run()
        token = bench.of("a", TokenDrawn)[0].token
        assert token.logprob == -0.5 and token.top_logprobs[0].token_id == token.token_id


class TestBatching:
    def test_a_request_that_arrives_while_others_decode_joins_the_next_step(self) -> None:
        bench = Bench()
        bench.add(request("a", 8, max_tokens=20))
        for _ in range(3):
            bench.step()
        bench.add(request("b", [70, 71, 72], max_tokens=5))
        bench.step()
        assert [len(entry.token_ids) for entry in bench.model.steps[-1]] == [1, 3]
        bench.step()
        assert [len(entry.token_ids) for entry in bench.model.steps[-1]] == [1, 1]

    def test_decodes_ride_along_while_a_long_prompt_is_chunked(self) -> None:
        bench = Bench(max_num_batched_tokens=16)
        bench.add(request("a", 8, max_tokens=30))
        bench.step()
        bench.add(request("long", [*range(100, 200)], max_tokens=1))
        bench.run()
        steps = bench.model.steps[1:9]
        assert [[len(entry.token_ids) for entry in step] for step in steps] == [[1, 12]] * 8
        tokens = [event for event in bench.order if event[1] == "TokenDrawn"]
        assert [name for name, _ in tokens[:9]] == ["a"] * 9

    def test_several_prompts_share_a_steps_budget_in_order_of_arrival(self) -> None:
        bench = Bench(max_num_batched_tokens=16)
        for name, first in (("a", 10), ("b", 50), ("c", 90)):
            bench.add(request(name, [*range(first, first + 7)]))
        bench.step()
        assert [len(entry.token_ids) for entry in bench.model.steps[-1]] == [7, 7, 2]

    def test_chunks_end_on_block_edges_where_they_can(self) -> None:
        bench = Bench(max_num_batched_tokens=10)
        bench.add(request("a", 30, max_tokens=1))
        bench.run()
        assert [event.computed_tokens for event in bench.of("a", PrefillProgress)] == [8, 16, 24, 30]

    def test_no_more_sequences_than_allowed_take_part_in_a_step(self) -> None:
        bench = Bench(max_num_seqs=2)
        for index in range(5):
            bench.add(request(f"r{index}", [10 * index + 1, 2], max_tokens=3))
        bench.run()
        assert max(len(step) for step in bench.model.steps) == 2
        assert all(isinstance(outcome(bench, f"r{index}"), Finished) for index in range(5))

    def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit(self) -> None:
        bench = Bench(num_pages=8)
        bench.add(request("first", 12, max_tokens=9))
        bench.step()
        bench.add(request("large", [*range(50, 70)], max_tokens=9))
        bench.add(request("small", [99], max_tokens=1))
        bench.run()
        assert "large" not in bench.events and "small" not in bench.events and not bench.core.has_work
        bench.core.release("first")
        bench.run()
        admitted = [name for name, kind in bench.order if kind == "Admitted"]
        assert admitted == ["first", "large", "small"]

    def test_a_prefix_shared_by_requests_that_arrive_together_is_computed_once(self) -> None:
        bench = Bench(max_num_batched_tokens=16)
        for index in range(6):
            bench.add(request(f"r{index}", [*range(1, 65), 100 + index], max_tokens=1))
        bench.run()
        computed = sum(len(entry.token_ids) for step in bench.model.steps for entry in step)
        assert computed < 65 + 5 * 17
        assert [bench.of(f"r{index}", Admitted)[0].cached_tokens for index in range(6)] == [0, *[64] * 5]

    def test_giving_up_the_large_one_lets_the_small_ones_in(self) -> None:
        bench = Bench(num_pages=8)
        bench.add(request("first", 12, max_tokens=9))
        bench.step()
        bench.add(request("large", [*range(50, 70)], max_tokens=9))
        bench.add(request("small", [99], max_tokens=1))
        bench.run()
        bench.core.release("large")
        bench.run()
        assert isinstance(outcome(bench, "small"), Finished)

    def test_an_engine_without_anything_to_compute_has_no_work(self) -> None:
        bench = Bench()
        assert not bench.core.has_work and bench.step() == []
        bench.add(request("held", hold=True))
        bench.step()
        assert not bench.core.has_work and bench.step() == []


class TestHolds:
    def import_kv(self, bench: Bench, name: str, prompt: list[int], upto: int) -> None:
        admitted = bench.of(name, Admitted)[0]
        for at in range(admitted.cached_tokens, upto):
            bench.model.cells[admitted.pages[at // bench.block_size]][at % bench.block_size] = prompt[at]

    def test_a_held_request_takes_pages_and_computes_nothing(self) -> None:
        bench = Bench()
        bench.add(request("held", 10, hold=True))
        bench.add(request("other", [50], max_tokens=2))
        bench.run()
        assert bench.core.load().held_pages == 3 + 1 and bench.core.load().running == 1
        assert isinstance(outcome(bench, "other"), Finished) and len(bench.events["held"]) == 1

    @pytest.mark.parametrize("imported", [0, 4, 6, 8, 12, 13])
    def test_without_a_first_token_prefill_computes_the_rest(self, imported: int) -> None:
        bench = Bench()
        one = request("a", 13, hold=True)
        bench.add(one)
        bench.step()
        self.import_kv(bench, "a", [*one.token_ids], imported)
        bench.resume("a", imported)
        bench.run()
        assert [event.token.token_id for event in bench.of("a", TokenDrawn)] == expected_answer(one)
        assert sum(len(entry.token_ids) for entry in bench.model.steps[0]) == 13 - min(imported, 12)
        assert outcome(bench, "a").usage.cached_tokens == min(imported, 12)  # type: ignore[union-attr]

    def test_a_failed_import_falls_back_on_what_the_own_cache_had(self) -> None:
        bench = Bench()
        one = request("warm", 13)
        bench.add(one)
        bench.run()
        bench.add(request("a", 13, hold=True))
        bench.step()
        assert bench.of("a", Admitted)[0].cached_tokens == 12
        bench.resume("a", 0)
        bench.step()
        assert [(entry.start, len(entry.token_ids)) for entry in bench.model.steps[-1]] == [(12, 1)]
        bench.run()
        assert outcome(bench, "a").usage.cached_tokens == 12  # type: ignore[union-attr]

    def test_with_a_first_token_it_goes_on_as_if_it_had_drawn_that_token(self) -> None:
        bench = Bench()
        bench.model.script[(1, 2, 3)] = ids_of("日本 END")
        stop = StopConditions(max_tokens=20, strings=["本 E"])
        bench.add(EngineRequest("whole", [1, 2, 3], stop=stop))
        bench.run()
        bench.add(EngineRequest("split", [1, 2, 3], stop=stop, hold=True))
        bench.step()
        self.import_kv(bench, "split", [1, 2, 3], 3)
        bench.resume("split", 3, ids_of("日")[0])
        bench.run()
        assert [e.token for e in bench.of("split", TokenDrawn)] == [e.token for e in bench.of("whole", TokenDrawn)][1:]
        whole, split = outcome(bench, "whole"), outcome(bench, "split")
        assert isinstance(whole, Finished) and isinstance(split, Finished)
        assert (split.finish_reason, split.usage) == (whole.finish_reason, whole.usage)
        assert split.marks.prefill_start == split.marks.prefill_end == 0 < split.marks.kv_ready < split.marks.decode_start

    def test_imported_blocks_are_found_by_others_from_the_resume_on(self) -> None:
        bench = Bench()
        one = request("a", 9, hold=True)
        bench.add(one)
        bench.step()
        assert not bench.core.take_block_changes().stored
        self.import_kv(bench, "a", [*one.token_ids], 9)
        bench.resume("a", 9, 5)
        assert len(bench.core.take_block_changes().stored) == 2
        bench.add(request("b", 9))
        bench.run()
        assert bench.of("b", Admitted)[0].cached_tokens == 8

    @pytest.mark.parametrize(("first", "max_tokens", "reason"), [(7, 9, FinishReason.STOP), (8, 1, FinishReason.LENGTH)])
    def test_a_first_token_that_ends_the_answer_finishes_at_once(self, first: int, max_tokens: int, reason: FinishReason) -> None:
        bench = Bench()
        bench.add(request("a", 5, hold=True, stop=StopConditions(max_tokens=max_tokens, token_ids=[7])))
        bench.step()
        self.import_kv(bench, "a", [*range(1, 6)], 5)
        bench.resume("a", 5, first)
        bench.run()
        finished = outcome(bench, "a")
        assert isinstance(finished, Finished) and finished.finish_reason is reason and finished.usage.completion_tokens == 1
        assert not bench.of("a", TokenDrawn) and not bench.model.steps

    def test_nothing_is_heard_of_a_request_after_its_release(self) -> None:
        bench = Bench()
        bench.add(request("a", 5, max_tokens=1, hold=True))
        bench.step()
        bench.resume("a", 5, 7)
        bench.core.release("a")
        assert not bench.core.has_work and bench.step() == []

    def test_a_first_token_out_of_the_vocabulary_fails_the_request(self) -> None:
        bench = Bench()
        bench.add(request("a", 5, hold=True))
        bench.step()
        bench.resume("a", 5, VOCAB_SIZE)
        bench.run()
        assert isinstance(outcome(bench, "a").error, InvalidTokenIdError)  # type: ignore[union-attr]

    @pytest.mark.parametrize("phase", ["waiting", "held", "prefilling", "decoding", "finished"])
    def test_a_release_in_any_phase_gives_all_pages_back(self, phase: str) -> None:
        bench = Bench(max_num_batched_tokens=8)
        bench.add(request("a", 20, max_tokens=3, hold=phase == "held"))
        steps = {"waiting": 0, "held": 1, "prefilling": 1, "decoding": 4, "finished": 8}[phase]
        for _ in range(steps):
            bench.step()
        sequence = bench.core._live["a"]
        assert sequence.phase is Phase(phase)
        bench.core.release("a")
        bench.core.check_integrity()
        assert bench.core.load().held_pages == 0 and not bench.core.has_work and bench.step() == []


class TestErrors:
    def test_a_request_whose_draw_fails_fails_alone_and_its_last_block_is_not_published(self) -> None:
        bench = Bench()
        bench.model.poisoned = {8}
        bench.add(request("bad", 8))
        bench.add(request("good", [50, 51, 52]))
        bench.run()
        assert isinstance(outcome(bench, "bad"), Failed) and isinstance(outcome(bench, "bad").error, InternalError)  # type: ignore[union-attr]
        assert isinstance(outcome(bench, "good"), Finished)
        bench.core.release("bad")
        assert bench.core.load().cached_pages == 0

    def test_a_failing_forward_fails_its_batch_and_the_engine_goes_on(self) -> None:
        bench = Bench(max_num_seqs=2)
        for name, first in (("a", 10), ("b", 20), ("c", 30)):
            bench.add(request(name, [first, 2, 3]))
        bench.model.broken = True
        bench.step()
        assert all(isinstance(outcome(bench, name), Failed) for name in "ab") and "c" not in bench.events
        bench.model.broken = False
        bench.core.release("a")
        bench.run()
        assert isinstance(outcome(bench, "c"), Finished)

    @pytest.mark.parametrize(
        ("bad", "error"),
        [
            (EngineRequest("x", []), EmptyPromptError),
            (EngineRequest("x", [1, VOCAB_SIZE]), InvalidTokenIdError),
            (EngineRequest("x", [-1]), InvalidTokenIdError),
            (EngineRequest("x", [1], SamplingParams(logit_bias={VOCAB_SIZE: 1.0})), InvalidTokenIdError),
            (EngineRequest("x", [1], stop=StopConditions(token_ids=[VOCAB_SIZE])), InvalidTokenIdError),
            (EngineRequest("x", [1], SamplingParams(temperature=float("nan"))), InvalidSamplingError),
            (EngineRequest("x", [1], stop=StopConditions(max_tokens=0)), InvalidMaxTokensError),
            (EngineRequest("x", [1], stop=StopConditions(strings=[""])), InvalidStopError),
            (EngineRequest("x", [1] * 100, stop=StopConditions(max_tokens=1)), PromptTooLongError),
            (EngineRequest("x", [1] * 90, stop=StopConditions(max_tokens=11)), InvalidMaxTokensError),
            (EngineRequest("x", [1] * 90, stop=StopConditions(max_tokens=11), prefill_only=True), InvalidMaxTokensError),
        ],
    )
    def test_what_can_never_be_served_is_refused_at_the_door(self, bad: EngineRequest, error: type[KvRelayError]) -> None:
        bench = Bench(max_context_tokens=100)
        with pytest.raises(error):
            bench.add(bad)
        assert not bench.core.has_work and bench.core.load().held_pages == 0

    def test_what_can_never_fit_the_pool_is_refused_with_the_numbers(self) -> None:
        bench = Bench(num_pages=4)
        with pytest.raises(PromptTooLongError) as too_long:
            bench.add(request("a", 17, max_tokens=1))
        assert too_long.value.fields == {"prompt_tokens": "17", "limit_tokens": "16"}
        with pytest.raises(InvalidMaxTokensError) as too_many:
            bench.add(request("a", 16, max_tokens=2))
        assert too_many.value.fields["limit_tokens"] == "16" and too_many.value.fields["max_tokens"] == "2"
        bench.add(request("a", 16, max_tokens=1))
        bench.add(request("b", 16, max_tokens=99, prefill_only=True))

    def test_a_full_queue_refuses_with_a_hint(self) -> None:
        bench = Bench(max_waiting=2)
        bench.add(request("a"))
        bench.add(request("b"))
        with pytest.raises(OverloadedError) as refused:
            bench.add(request("c"))
        assert refused.value.retry_after_s
        bench.step()
        bench.add(request("c"))
        bench.run()
        assert isinstance(outcome(bench, "c"), Finished)

    def test_a_live_id_cannot_be_used_twice(self) -> None:
        bench = Bench()
        bench.add(request("a"))
        with pytest.raises(InvalidRequestError):
            bench.add(request("a"))

    @pytest.mark.parametrize("limits", [(8, 9, 1), (8, 0, 1), (8, 4, 0)])
    def test_settings_that_could_starve_a_request_are_refused(self, limits: tuple[int, int, int]) -> None:
        with pytest.raises(ConfigError):
            SchedulerLimits(*limits)

    def test_illegal_phase_changes_are_bugs(self) -> None:
        bench = Bench()
        bench.add(request("a", hold=True))
        bench.step()
        bench.resume("a", 0)
        with pytest.raises(AssertionError):
            bench.resume("a", 0)


def test_a_waiting_request_that_leaves_unblocks_the_next_by_itself() -> None:
    blocks = BlockManager(4, 4, FINGERPRINT)
    scheduler = Scheduler(SchedulerLimits(8, 2, 4), blocks)
    sequences = {}
    for name, tokens in (("first", 12), ("large", 8), ("small", 4)):
        one = request(name, tokens, max_tokens=1)
        sequences[name] = SequenceState(one, blocks.open(one.token_ids), AnswerText(byte_tokens(), ()), frozenset(), 0)
        scheduler.enqueue(sequences[name])
    assert [each.request_id for each in scheduler.admit()] == ["first"]
    sequences["first"].computed = 12
    assert not list(scheduler.admit()) and not scheduler.can_admit
    scheduler.remove(sequences["large"])
    assert [each.request_id for each in scheduler.admit()] == ["small"]
