"""The seven phases partition the total, whatever the marks are."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.values import Timings, WorkerMarks
from services.router.timeline import RouterMarks, timings

S = 1_000_000_000
T0 = 1_700_000_000 * S


def at(seconds: float) -> int:
    return T0 + round(seconds * S)


ROUTER = RouterMarks(received=at(0), admitted=at(1), planned=at(2), first_token=at(9), end=at(20))


def phases(value: Timings) -> list[float]:
    return [getattr(value, field.name) for field in fields(value)[:7]]


def test_a_split_uses_the_marks_of_both_workers() -> None:
    found = timings(
        ROUTER,
        WorkerMarks(prefill_start=at(4), prefill_end=at(8)),
        WorkerMarks(kv_ready=at(11), decode_start=at(12), end=at(19)),
    )
    assert phases(found) == pytest.approx([1, 1, 2, 4, 3, 1, 8])
    assert found.total_s == 20 and found.ttft_s == 9


def test_a_local_request_exposes_no_transfer() -> None:
    found = timings(ROUTER, None, WorkerMarks(prefill_start=at(4), prefill_end=at(8), decode_start=at(10), end=at(19)))
    assert phases(found) == pytest.approx([1, 1, 2, 4, 0, 2, 10])


def test_an_answer_of_one_token_has_no_decode_but_its_way_to_the_client() -> None:
    found = timings(ROUTER, WorkerMarks(prefill_start=at(4), prefill_end=at(8)), None)
    assert phases(found) == pytest.approx([1, 1, 2, 4, 0, 0, 12])


def test_what_a_failed_try_cost_is_waiting_for_prefill() -> None:
    found = timings(ROUTER, None, WorkerMarks(prefill_start=at(15), prefill_end=at(16), decode_start=at(16), end=at(19)))
    assert phases(found) == pytest.approx([1, 1, 13, 1, 0, 0, 4])
    assert found.ttft_s == 9


def test_a_prefill_without_a_last_word_ends_when_its_token_was_sent() -> None:
    found = timings(ROUTER, WorkerMarks(), WorkerMarks(kv_ready=at(11), decode_start=at(12), end=at(19)))
    assert phases(found) == pytest.approx([1, 1, 0, 7, 2, 1, 8])


MOMENTS = st.one_of(st.just(0), st.integers(T0 - 5 * S, T0 + 40 * S))
MARKS = st.builds(WorkerMarks, prefill_start=MOMENTS, prefill_end=MOMENTS, kv_ready=MOMENTS, decode_start=MOMENTS, end=MOMENTS)


@given(
    st.builds(RouterMarks, received=st.just(T0), admitted=MOMENTS, planned=MOMENTS, first_token=MOMENTS, end=MOMENTS),
    st.none() | MARKS,
    st.none() | MARKS,
)
def test_phases_always_add_up(router: RouterMarks, prefill: WorkerMarks | None, decode: WorkerMarks | None) -> None:
    found = timings(router, prefill, decode)
    assert min(phases(found)) >= 0
    assert sum(phases(found)) == pytest.approx(found.total_s, abs=1e-6)
    assert 0 <= found.ttft_s <= found.total_s
