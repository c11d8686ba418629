"""Where phases run, by what is known of the workers."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kvrelay.errors import NoWorkerError
from services.router.placement import Candidate, Local, Mode, Policy, PromptShape, Reason, Restriction, Split, place
from services.runtime.ports import WorkerLoad
from tests.simulation.router_world import worker

IDLE = WorkerLoad(total_pages=1000, available_pages=1000)
LONG = PromptShape(tokens=1000, max_tokens=100, block_size=16)
SHORT = PromptShape(tokens=100, max_tokens=100, block_size=16)


def candidate(role: str, number: int = 0, cached: int = 0, load: WorkerLoad = IDLE, context: int = 4096) -> Candidate:
    return Candidate(worker(role, number, max_context_tokens=context, load=load), load, cached)


P, D = candidate("prefill"), candidate("decode")


@pytest.mark.parametrize(
    ("mode", "prompt", "prefills", "decodes", "reason"),
    [
        (Mode.COLOCATED, LONG, [P], [D], Reason.MODE_COLOCATED),
        (Mode.SPLIT, SHORT, [P], [D], Reason.MODE_SPLIT),
        (Mode.SPLIT, LONG, [], [D], Reason.NO_PREFILL),
        (Mode.HYBRID, LONG, [P], [D], Reason.LONG_PROMPT),
        (Mode.HYBRID, SHORT, [P], [D], Reason.SHORT_PROMPT),
        (Mode.HYBRID, replace(SHORT, tokens=255), [P], [D], Reason.SHORT_PROMPT),
        (Mode.HYBRID, replace(SHORT, tokens=256), [P], [D], Reason.LONG_PROMPT),
        (Mode.HYBRID, LONG, [], [D], Reason.NO_PREFILL),
        (Mode.HYBRID, LONG, [P], [candidate("decode", cached=752)], Reason.SHORT_PROMPT),
        (Mode.HYBRID, LONG, [candidate("prefill", load=replace(IDLE, prefill_backlog_tokens=16385))], [D], Reason.PREFILL_BUSY),
        (Mode.SPLIT, LONG, [candidate("prefill", load=replace(IDLE, prefill_backlog_tokens=10**6))], [D], Reason.MODE_SPLIT),
    ],
)
def test_mode_and_prompt_decide_where_prefill_runs(mode, prompt, prefills, decodes, reason) -> None:  # type: ignore[no-untyped-def]
    plan = place(Policy(mode), prompt, prefills, decodes)
    assert plan.reason is reason
    splits = reason in (Reason.MODE_SPLIT, Reason.LONG_PROMPT)
    assert isinstance(plan.route, Split if splits else Local)
    assert plan.decision.startswith("split over" if splits else "local on")


def test_no_decode_worker_is_an_error_that_names_the_role() -> None:
    with pytest.raises(NoWorkerError) as caught:
        place(Policy(), LONG, [P], [])
    assert caught.value.fields["role"] == "decode"


def test_a_prefix_hit_draws_a_request_until_load_outweighs_it() -> None:
    warm = candidate("decode", 1, cached=960)
    assert place(Policy(), LONG, [P], [D, warm]).route.decode.worker_id == "decode-1"
    busy = candidate("decode", 1, cached=960, load=replace(IDLE, running=20))
    assert place(Policy(), LONG, [P], [D, busy]).route.decode.worker_id == "decode-0"


def test_a_worker_without_pages_is_the_dearer_one() -> None:
    full = candidate("decode", 0, load=replace(IDLE, available_pages=10))
    assert place(Policy(), LONG, [P], [full, candidate("decode", 1)]).route.decode.worker_id == "decode-1"


def test_prefill_goes_where_least_has_to_be_computed() -> None:
    for better, worse in (
        (candidate("prefill", 1), candidate("prefill", 0, load=replace(IDLE, prefill_backlog_tokens=500))),
        (candidate("prefill", 1, cached=512), candidate("prefill", 0)),
    ):
        route = place(Policy(), LONG, [worse, better], [D]).route
        assert isinstance(route, Split) and route.prefill.worker_id == "prefill-1"


def test_a_worker_whose_context_or_pool_is_too_small_is_passed_over() -> None:
    small = candidate("decode", 0, context=1099)
    tight = candidate("decode", 1, load=WorkerLoad(total_pages=60, available_pages=60))
    assert place(Policy(), LONG, [P], [small, tight, candidate("decode", 2)]).route.decode.worker_id == "decode-2"
    assert place(Policy(), LONG, [candidate("prefill", context=1099)], [D]).reason is Reason.NO_PREFILL


def test_ties_and_order_of_candidates_change_nothing() -> None:
    draw = random.Random(5)
    prefills, decodes = [candidate("prefill", n) for n in range(4)], [candidate("decode", n) for n in range(4)]
    for _ in range(20):
        draw.shuffle(prefills)
        draw.shuffle(decodes)
        route = place(Policy(), LONG, prefills, decodes).route
        assert isinstance(route, Split)
        assert (route.prefill.worker_id, route.decode.worker_id) == ("prefill-0", "decode-0")


def test_earlier_tries_restrict_the_next() -> None:
    two = [D, candidate("decode", 1)]
    assert place(Policy(), LONG, [P], two, Restriction(avoid={"decode-0"})).route.decode.worker_id == "decode-1"
    assert place(Policy(), LONG, [P], two, Restriction(shun={"decode-0"})).route.decode.worker_id == "decode-1"
    assert place(Policy(), LONG, [P], [D], Restriction(shun={"decode-0"})).route.decode.worker_id == "decode-0"
    assert place(Policy(), LONG, [P], two, Restriction(avoid={"prefill-0"})).reason is Reason.NO_PREFILL
    assert place(Policy(Mode.SPLIT), LONG, [P], two, Restriction(local_only=True)).reason is Reason.FALLBACK
    with pytest.raises(NoWorkerError):
        place(Policy(), LONG, [P], [D], Restriction(avoid={"decode-0"}))
