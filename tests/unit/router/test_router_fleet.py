"""The view of the fleet: events in, answers out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import NoWorkerError, UnknownModelError
from services.router.fleet import Fleet
from services.router.placement import Mode
from services.runtime.ports import BlocksChanged, FleetEvent, FleetSnapshot, RegistryLost, WorkerGone, WorkerInfo, WorkerLoad, WorkerSeen
from tests.simulation.router_world import IDENTITY, LAYOUT, worker

BLOCKS = [bytes([n]) * 32 for n in range(8)]
OTHER = replace(IDENTITY, weights_digest="sha256:cc")


def fleet_of(*workers: WorkerInfo) -> Fleet:
    fleet = Fleet()
    fleet.apply(FleetSnapshot(workers, {}), 0.0)
    return fleet


def ids(workers: list[WorkerInfo]) -> list[str]:
    return [info.worker_id for info in workers]


def test_nothing_is_known_before_the_first_snapshot() -> None:
    fleet = Fleet()
    assert not fleet.has_snapshot and not fleet.connected and fleet.models() == []
    with pytest.raises(NoWorkerError):
        fleet.resolve_model("")


def test_an_empty_name_asks_for_the_only_model() -> None:
    fleet = fleet_of(worker("decode"))
    assert fleet.resolve_model("") == fleet.resolve_model("tiny") == "tiny"
    with pytest.raises(UnknownModelError) as unknown:
        fleet.resolve_model("huge")
    assert "tiny" in unknown.value.message and unknown.value.fields["known"] == "tiny"
    fleet.apply(WorkerSeen(worker("decode", 1, identity=replace(IDENTITY, model="small"))), 0.0)
    with pytest.raises(UnknownModelError, match="name one"):
        fleet.resolve_model("")


def test_only_workers_of_one_revision_are_candidates() -> None:
    fleet = fleet_of(worker("decode", 0), worker("decode", 1, identity=OTHER), worker("decode", 2, layout=replace(LAYOUT, layers=3)))
    revision = fleet.choose_revision("tiny", Mode.COLOCATED, 0.0)
    assert len(fleet.candidates(revision, "decode", [], 100, 0.0)) == 1


@pytest.mark.parametrize(
    ("workers", "chosen"),
    [
        ([worker("decode", 0), worker("decode", 1), worker("decode", 2, identity=OTHER), worker("prefill", 3, identity=OTHER)], OTHER),
        ([worker("decode", 0), worker("prefill", 1), worker("decode", 2, identity=OTHER), worker("decode", 3, identity=OTHER)], IDENTITY),
        ([worker("decode", 0), worker("decode", 1), worker("decode", 2, identity=OTHER)], IDENTITY),
        ([worker("decode", 0, incarnation=5), worker("decode", 1, identity=OTHER, incarnation=6)], OTHER),
        ([worker("decode", 0), worker("decode", 1, state="draining"), worker("decode", 2, identity=OTHER, incarnation=9)], OTHER),
        ([worker("prefill", 0, identity=OTHER), worker("prefill", 1, identity=OTHER), worker("decode", 2)], IDENTITY),
    ],
    ids=["complete beats many", "complete", "many", "newer", "draining does not count", "must decode"],
)
def test_the_revision_for_new_requests(workers: list[WorkerInfo], chosen: object) -> None:
    fleet = fleet_of(*workers)
    revision = fleet.choose_revision("tiny", Mode.HYBRID, 0.0)
    assert revision.fingerprint == chosen.fingerprint  # type: ignore[attr-defined]


def test_a_restart_does_not_make_an_old_version_the_newest() -> None:
    fleet = fleet_of(
        worker("decode", 0, incarnation=1),
        worker("decode", 1, incarnation=2),
        worker("decode", 2, identity=OTHER, incarnation=5),
        worker("decode", 3, identity=OTHER, incarnation=6),
    )
    fleet.apply(WorkerSeen(worker("decode", 1, incarnation=9)), 1.0)
    assert fleet.choose_revision("tiny", Mode.COLOCATED, 0.0).fingerprint == OTHER.fingerprint


def test_a_version_whose_workers_fail_calls_is_left_for_one_that_works() -> None:
    fleet = fleet_of(worker("decode", 0), worker("decode", 1), worker("decode", 2, identity=OTHER))
    for number in (0, 1):
        fleet.mark_down(worker("decode", number), 0.0)
    assert fleet.choose_revision("tiny", Mode.COLOCATED, 1.0).fingerprint == OTHER.fingerprint
    fleet.mark_down(worker("decode", 2), 0.0)
    assert fleet.choose_revision("tiny", Mode.COLOCATED, 1.0).fingerprint == IDENTITY.fingerprint, "a try is better than none"


def test_a_model_without_a_ready_decode_worker_names_the_role() -> None:
    fleet = fleet_of(worker("prefill"), worker("decode", state="draining"))
    with pytest.raises(NoWorkerError) as caught:
        fleet.choose_revision("tiny", Mode.SPLIT, 0.0)
    assert caught.value.fields["role"] == "decode"
    state = fleet.model_state("tiny", Mode.SPLIT)
    assert (state.missing_role, state.prefill_workers, state.decode_workers) == ("decode", 1, 0)
    assert fleet_of(worker("decode")).model_state("tiny", Mode.SPLIT).missing_role == "prefill"
    assert fleet_of(worker("decode")).model_state("tiny", Mode.COLOCATED).missing_role == ""


def test_differing_workers_are_listed_with_both_values() -> None:
    other = worker("decode", 1, identity=replace(IDENTITY, dtype="bfloat16"), layout=replace(LAYOUT, block_size=32))
    fleet = fleet_of(worker("prefill"), worker("decode"), other, worker("decode", 2, identity=replace(OTHER, model="unrelated")))
    (pair,) = fleet.incompatibilities()
    assert (pair.prefill_worker, pair.decode_worker) == ("prefill-0", "decode-1")
    assert list(pair.differences) == [("dtype", "float32", "bfloat16"), ("block_size", "16", "32")]


def test_workers_that_compute_otherwise_are_never_paired() -> None:
    torch = replace(IDENTITY, numerics="torch-2.13.0/AVX2/AuthenticAMD-25-1/threads-1")
    fleet = fleet_of(worker("prefill"), worker("decode", 1, identity=torch))
    (pair,) = fleet.incompatibilities()
    assert list(pair.differences) == [("numerics", "native-1", torch.numerics)]
    revision = fleet.choose_revision("tiny", Mode.SPLIT, 0.0)
    assert revision.fingerprint == torch.fingerprint != IDENTITY.fingerprint
    assert fleet.ready(revision, "prefill") == []


def test_prefix_hits_count_leading_blocks_and_never_the_whole_prompt() -> None:
    fleet = fleet_of(worker("decode"))
    revision = fleet.choose_revision("tiny", Mode.COLOCATED, 0.0)
    fleet.apply(BlocksChanged("decode-0", 1, [BLOCKS[0], BLOCKS[1], BLOCKS[3]], []), 0.0)
    assert fleet.cached_blocks("decode-0", BLOCKS, 0.0) == 2
    fleet.apply(BlocksChanged("decode-0", 1, [BLOCKS[2]], [BLOCKS[1]]), 0.0)
    assert fleet.cached_blocks("decode-0", BLOCKS, 0.0) == 1
    fleet.apply(BlocksChanged("decode-0", 1, BLOCKS, []), 0.0)
    (found,) = fleet.candidates(revision, "decode", BLOCKS, 128, 0.0)
    assert found.cached_tokens == 112
    (found,) = fleet.candidates(revision, "decode", BLOCKS, 129, 0.0)
    assert found.cached_tokens == 128


def test_another_life_of_a_worker_has_none_of_its_blocks() -> None:
    fleet = fleet_of(worker("decode"))
    fleet.apply(BlocksChanged("decode-0", 1, BLOCKS, []), 0.0)
    fleet.apply(WorkerSeen(worker("decode", incarnation=2)), 0.0)
    assert fleet.cached_blocks("decode-0", BLOCKS, 0.0) == 0
    fleet.apply(BlocksChanged("decode-0", 1, BLOCKS, []), 0.0)
    fleet.apply(WorkerGone("decode-0", 1), 0.0)
    fleet.apply(WorkerSeen(worker("decode", incarnation=1, state="draining")), 0.0)
    assert fleet.cached_blocks("decode-0", BLOCKS, 0.0) == 0
    assert [info.state for info in fleet.workers(0.0)] == ["ready"]


def test_a_worker_that_failed_a_call_is_avoided_for_a_while() -> None:
    fleet = fleet_of(worker("prefill", 0), worker("prefill", 1), worker("decode"))
    revision = fleet.choose_revision("tiny", Mode.SPLIT, 0.0)
    fleet.mark_down(worker("prefill", 0), 10.0)
    fleet.mark_down(worker("prefill", 1, incarnation=7), 10.0)
    assert [c.worker.worker_id for c in fleet.candidates(revision, "prefill", [], 10, 12.9)] == ["prefill-1"]
    assert {info.worker_id: info.state for info in fleet.workers(12.9)}["prefill-0"] == "lost"
    assert len(fleet.candidates(revision, "prefill", [], 10, 13.0)) == 2
    fleet.mark_down(worker("prefill", 0), 20.0)
    fleet.apply(WorkerSeen(worker("prefill", 0, incarnation=2)), 20.1)
    assert len(fleet.candidates(revision, "prefill", [], 10, 20.1)) == 2, "a new life starts clean"


def test_a_down_decode_worker_is_the_last_resort_and_a_down_prefill_worker_none() -> None:
    fleet = fleet_of(worker("prefill"), worker("decode"))
    revision = fleet.choose_revision("tiny", Mode.SPLIT, 0.0)
    for role in ("prefill", "decode"):
        fleet.mark_down(worker(role), 0.0)
    assert fleet.candidates(revision, "prefill", [], 10, 1.0) == []
    assert len(fleet.candidates(revision, "decode", [], 10, 1.0)) == 1


def test_a_lost_registry_keeps_the_last_view() -> None:
    fleet = fleet_of(worker("prefill"), worker("decode"))
    fleet.apply(BlocksChanged("decode-0", 1, BLOCKS, []), 5.0)
    fleet.apply(RegistryLost(), 8.0)
    assert not fleet.connected and fleet.view_age_s(900.0) == 895.0
    assert len(fleet.workers(900.0)) == 2
    assert fleet.cached_blocks("decode-0", BLOCKS, 37.0) == 8
    assert fleet.cached_blocks("decode-0", BLOCKS, 39.0) == 0, "prefixes are not trusted for long"


def test_a_snapshot_replaces_what_was_known_and_ends_an_outage() -> None:
    fleet = fleet_of(worker("prefill"), worker("decode"))
    fleet.apply(BlocksChanged("decode-0", 1, BLOCKS, []), 5.0)
    fleet.mark_down(worker("decode"), 9.0)
    fleet.apply(RegistryLost(), 8.0)
    fleet.apply(FleetSnapshot([worker("decode")], {"decode-0": BLOCKS[:3]}), 10.0)
    assert fleet.connected and fleet.view_age_s(10.0) == 0.0
    assert [(info.worker_id, info.state) for info in fleet.workers(10.0)] == [("decode-0", "lost")], "the router's own word stays"
    assert fleet.cached_blocks("decode-0", BLOCKS, 10.0) == 3


def test_a_worker_that_leaves_is_gone_at_once() -> None:
    fleet = fleet_of(worker("prefill"), worker("decode"))
    fleet.apply(WorkerGone("decode-0", 1), 1.0)
    assert ids(fleet.workers(1.0)) == ["prefill-0"]


def test_limits_are_those_of_the_roomiest_decode_worker() -> None:
    tight = WorkerLoad(total_pages=10, available_pages=10)
    fleet = fleet_of(worker("decode", 0, load=tight), worker("decode", 1, max_context_tokens=150), worker("prefill"))
    limits = fleet.limits(fleet.choose_revision("tiny", Mode.SPLIT, 0.0))
    assert limits.max_context_tokens == 161, "ten pages, and a last token that needs none"


def test_requests_sent_count_until_a_report_holds_them() -> None:
    fleet = fleet_of(worker("decode"))
    dispatch = fleet.dispatch(worker("decode"), 1.0, prefill_tokens=100, pages=9)
    load = fleet.corrected_load("decode-0")
    assert load is not None and (load.running, load.prefill_backlog_tokens, load.available_pages) == (1, 100, 1015)
    dispatch.prefilled(1.1)
    assert fleet.corrected_load("decode-0") == replace(load, prefill_backlog_tokens=0)
    fleet.apply(WorkerSeen(worker("decode", load=load)), 2.0)
    assert fleet.corrected_load("decode-0") == load, "the report already counts it"
    dispatch.close(2.5)
    dispatch.close(2.6)
    corrected = fleet.corrected_load("decode-0")
    assert corrected is not None and (corrected.running, corrected.available_pages) == (0, 1024)


def test_a_report_written_before_a_request_was_sent_does_not_hide_it() -> None:
    fleet = fleet_of(worker("decode"))
    fleet.dispatch(worker("decode"), 1.0, prefill_tokens=100, pages=9)
    fleet.apply(WorkerSeen(worker("decode")), 1.1)
    corrected = fleet.corrected_load("decode-0")
    assert corrected is not None and corrected.running == 1


def test_a_silent_registry_does_not_let_corrections_pile_up_or_drift() -> None:
    fleet = fleet_of(worker("decode"))
    for n in range(1000):
        fleet.dispatch(worker("decode"), float(n), prefill_tokens=10, pages=1).close(n + 0.5)
    assert fleet.corrected_load("decode-0") == worker("decode").load


WORKERS = st.builds(
    worker,
    st.sampled_from(["prefill", "decode"]),
    st.integers(0, 2),
    incarnation=st.integers(1, 3),
    identity=st.sampled_from([IDENTITY, OTHER]),
    state=st.sampled_from(["ready", "draining"]),
)
CHUNKS = st.lists(st.sampled_from(BLOCKS), max_size=4)
NAMES = st.sampled_from([f"{role}-{n}" for role in ("prefill", "decode") for n in range(3)])
EVENTS: st.SearchStrategy[FleetEvent] = st.one_of(
    st.builds(WorkerSeen, WORKERS),
    st.builds(WorkerGone, NAMES, st.integers(1, 3)),
    st.builds(BlocksChanged, NAMES, st.integers(1, 3), CHUNKS, CHUNKS),
    st.builds(
        FleetSnapshot,
        st.lists(WORKERS, max_size=4, unique_by=lambda info: info.worker_id),
        st.dictionaries(NAMES, CHUNKS, max_size=3),
    ),
    st.just(RegistryLost()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.sampled_from([0.0, 0.5, 5.0, 20.0])), max_size=40))
def test_any_order_of_events_leaves_a_view_that_holds_together(steps: list[tuple[FleetEvent, float]]) -> None:
    fleet, now = Fleet(), 0.0
    for event, pause in steps:
        before = {info.worker_id: info.incarnation for info in fleet.workers(now)}
        fleet.apply(event, now)
        for info in fleet.workers(now):
            assert info.incarnation >= before.get(info.worker_id, 0), "an older life never replaces a newer one"
        if isinstance(event, BlocksChanged) and event.worker_id not in before:
            assert fleet.cached_blocks(event.worker_id, list(event.stored), now) == 0
        for model in fleet.models():
            for mode in Mode:
                state = fleet.model_state(model, mode)
                try:
                    revision = fleet.choose_revision(model, mode, now)
                except NoWorkerError:
                    assert state.decode_workers == 0 and state.missing_role == "decode"
                    continue
                decodes = fleet.candidates(revision, "decode", BLOCKS, 1000, now)
                assert len(decodes) == state.decode_workers > 0
                assert all(c.worker.state == "ready" for c in decodes)
                for prefill in fleet.candidates(revision, "prefill", BLOCKS, 1000, now):
                    assert prefill.worker.identity is not None and prefill.worker.identity.fingerprint == revision.fingerprint
        now += pause
