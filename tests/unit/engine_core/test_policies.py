"""What each scheduling policy is known for."""

from __future__ import annotations

import pytest

from kvrelay.errors import ConfigError
from kvrelay.values import StopConditions
from services.engine.api import Admitted, EngineRequest, Finished, PrefillProgress, TokenDrawn
from services.engine.scheduling.scheduler import SchedulerLimits
from tests.unit.engine_core.fakes import Bench, LinearCost, expected_answer


def request(name: str, first: int, tokens: int, max_tokens: int = 4, **kwargs: bool) -> EngineRequest:
    """Prompts with different `first` share nothing."""
    return EngineRequest(name, [first] * tokens, stop=StopConditions(max_tokens=max_tokens, ignore_eos=True), **kwargs)


def lengths(bench: Bench) -> list[list[int]]:
    """Tokens of each entry of each step: a decode is a 1."""
    return [[len(entry.token_ids) for entry in entries] for entries in bench.model.steps]


def answered(bench: Bench, *requests: EngineRequest) -> bool:
    return all([event.token.token_id for event in bench.of(one.request_id, TokenDrawn)] == expected_answer(one) for one in requests)


class TestWhole:
    def test_a_prompt_longer_than_the_budget_is_one_step_and_decodes_ride_along(self) -> None:
        bench = Bench(policy="whole", max_num_batched_tokens=16)
        first, long, short = request("a", 1, 8), request("b", 2, 40), request("c", 3, 5)
        for one in (first, long, short):
            bench.add(one)
        bench.run()
        assert lengths(bench)[:4] == [[8], [1, 40], [1, 1, 5], [1, 1, 1]]
        assert [event.computed_tokens for event in bench.of("b", PrefillProgress)] == [40]
        assert answered(bench, first, long, short)

    def test_prompts_that_fit_together_share_a_step_and_none_is_cut(self) -> None:
        bench = Bench(policy="whole", max_num_batched_tokens=16)
        for index in range(4):
            bench.add(request(f"r{index}", 1 + index, 7, max_tokens=1))
        bench.run()
        assert lengths(bench) == [[7, 7], [7, 7]]


class TestDynamic:
    def test_a_chunk_is_as_large_as_the_objective_allows(self) -> None:
        # A step of n tokens from position s costs n + (n s + n (n + 1) / 2) / 20 ms: 12 tokens cost 15.9, 16 would cost 22.8.
        bench = Bench(policy="dynamic", tbt_objective_ms=17, cost=LinearCost())
        one = request("a", 1, 40)
        bench.add(one)
        bench.run()
        chunks = [entry[0] for entry in lengths(bench) if entry[0] > 1]
        assert chunks == [12, 8, 8, 4, 4, 4] or chunks[0] == 12
        assert chunks == sorted(chunks, reverse=True), "the later chunk sees more and so must be smaller"
        assert all(LinearCost().predict_s(plan.shape) <= 0.017 for plan in bench.plans)  # type: ignore[operator]
        assert answered(bench, one)

    def test_decodes_take_their_part_of_the_time_first(self) -> None:
        alone, beside = (Bench(policy="dynamic", tbt_objective_ms=17, cost=LinearCost()) for _ in range(2))
        for index in range(4):
            beside.add(request(f"d{index}", 10 + index, 3, max_tokens=50))
        beside.step()
        for bench in (alone, beside):
            bench.add(request("long", 1, 40))
            bench.step()
        assert 0 < beside.plans[-1].shape.prefill_tokens < alone.plans[-1].shape.prefill_tokens
        assert beside.plans[-1].shape.decode_seqs == 4 and beside.plans[-1].why == "step time objective"

    def test_an_objective_that_cannot_be_kept_still_lets_a_token_through(self) -> None:
        bench = Bench(policy="dynamic", tbt_objective_ms=0.1, cost=LinearCost())
        one = request("a", 1, 6)
        bench.add(one)
        bench.run()
        assert lengths(bench)[:6] == [[1]] * 6 and answered(bench, one)

    @pytest.mark.parametrize("cost", [None, LinearCost(known=False)])
    def test_without_a_known_cost_it_is_chunked(self, cost: LinearCost | None) -> None:
        bench, chunked = Bench(policy="dynamic", tbt_objective_ms=1, cost=cost), Bench()
        for each in (bench, chunked):
            each.add(request("a", 1, 70))
            each.run()
        assert lengths(bench) == lengths(chunked)

    def test_the_core_tells_the_cost_model_of_every_step(self) -> None:
        cost = LinearCost()
        bench = Bench(cost=cost)
        bench.add(request("a", 1, 8, max_tokens=3))
        bench.run()
        assert [shape for shape, _ in cost.observed] == [plan.shape for plan in bench.plans if plan.chunks]
        assert [(shape.prefill_tokens, shape.prefill_context, shape.decode_seqs, shape.decode_context) for shape, _ in cost.observed] == [
            (8, 36, 0, 0),
            (0, 0, 1, 9),
            (0, 0, 1, 10),
        ]
        assert all(seconds > 0 for _, seconds in cost.observed)


class TestSeparateSteps:
    @pytest.mark.parametrize("policy", ["decode-only", "prefill-only"])
    def test_prompts_and_decodes_take_turns_and_never_mix(self, policy: str) -> None:
        bench = Bench(policy=policy, max_num_batched_tokens=8)
        decoding, long = request("a", 1, 4, max_tokens=9), request("b", 2, 32)
        bench.add(decoding)
        bench.step()
        bench.add(long)
        bench.run()
        assert lengths(bench)[:9] == [[4], [1], [8], [1], [8], [1], [8], [1], [8]]
        assert answered(bench, decoding, long)

    def test_decodes_alone_are_steps_of_decodes(self) -> None:
        bench = Bench(policy="decode-only")
        for index in range(3):
            bench.add(request(f"r{index}", 1 + index, 4, hold=True))
        bench.step()
        for index in range(3):
            for page in bench.of(f"r{index}", Admitted)[0].pages:
                bench.model.cells[page] = [1 + index] * 4
            bench.resume(f"r{index}", 4, 9)
        bench.run()
        assert lengths(bench) == [[1, 1, 1]] * 3

    def test_short_prompts_are_batched_and_not_cut_but_long_ones_fill_what_is_left(self) -> None:
        bench = Bench(policy="prefill-only", max_num_batched_tokens=16)
        for name, first, tokens in (("a", 1, 7), ("b", 2, 7), ("c", 3, 7), ("long", 4, 40), ("d", 5, 9)):
            bench.add(request(name, first, tokens, prefill_only=True))
        bench.run()
        assert lengths(bench) == [[7, 7], [7, 8], [16], [16], [9]]
        assert [event.computed_tokens for event in bench.of("long", PrefillProgress)] == [8, 24, 40], "handed over chunk by chunk"


class TestShortestFirst:
    @pytest.mark.parametrize("policy", ["prefill-only", "chunked", "whole"])
    def test_a_short_prompt_overtakes_a_long_one_that_waits_or_is_computed(self, policy: str) -> None:
        bench = Bench(policy=policy, max_num_batched_tokens=16, prefill_order="shortest")
        bench.add(request("long", 1, 60, prefill_only=True))
        if policy != "whole":
            bench.step()
        bench.add(request("longer", 2, 80, prefill_only=True))
        bench.add(request("short", 3, 8, prefill_only=True))
        bench.run()
        finished = [name for name, kind in bench.order if kind == "Finished"]
        assert finished == ["short", "long", "longer"]

    def test_first_come_first_served_is_the_default(self) -> None:
        bench = Bench(policy="prefill-only", max_num_batched_tokens=16)
        bench.add(request("long", 1, 60, prefill_only=True))
        bench.add(request("short", 3, 8, prefill_only=True))
        bench.run()
        assert [name for name, kind in bench.order if kind == "Finished"] == ["long", "short"]

    def test_a_long_prompt_is_overtaken_by_no_more_than_its_own_length(self) -> None:
        bench = Bench(policy="prefill-only", max_num_batched_tokens=16, prefill_order="shortest", max_waiting=100)
        bench.add(request("long", 1, 64, prefill_only=True))
        for index in range(40):
            # As much comes in every step as a step can take.
            bench.add(request(f"a{index}", 2 + index, 8, prefill_only=True))
            bench.add(request(f"b{index}", 50 + index, 8, prefill_only=True))
            bench.step()
            for name in [name for name, events in bench.events.items() if isinstance(events[-1], Finished)]:
                bench.core.release(name)
            if "long" in bench.events and isinstance(bench.events["long"][-1], Finished):
                break
        before = [name for name, kind in bench.order if kind == "Finished"]
        assert before[-1] == "long" and 64 // 8 <= len(before) - 1 <= 64 // 8 + 4


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"policy": "fastest"}, "policy must be one of whole, chunked, dynamic"),
        ({"policy": "dynamic"}, "policy dynamic needs tbt_objective_ms"),
        ({"policy": "dynamic", "tbt_objective_ms": -1.0}, "policy dynamic needs tbt_objective_ms"),
        ({"policy": "dynamic", "tbt_objective_ms": float("nan")}, "policy dynamic needs tbt_objective_ms"),
        ({"policy": "whole", "tbt_objective_ms": 5.0}, "tbt_objective_ms is for policy dynamic"),
        ({"prefill_order": "random"}, "prefill_order must be one of fcfs, shortest"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings: dict[str, object], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        SchedulerLimits(**settings)  # type: ignore[arg-type]
