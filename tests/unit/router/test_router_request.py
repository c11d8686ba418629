"""One request's state machine, driven by hand and by anything hypothesis can think of."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay.errors import (
    CancelledByClientError,
    ChecksumMismatchError,
    DeadlineExceededError,
    DrainingError,
    FingerprintMismatchError,
    InternalError,
    InvalidMaxTokensError,
    KvRelayError,
    KvTransferError,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    WorkerLostError,
)
from kvrelay.values import FinishReason, Token, TransferStats, Usage, WorkerMarks
from services.router.placement import Local, Plan, Reason, Split
from services.router.request import (
    Action,
    CancelLeg,
    Emit,
    Event,
    Fail,
    Finish,
    FromDecode,
    FromPrefill,
    Leg,
    LegFailed,
    Phase,
    Planned,
    Replan,
    RequestMachine,
    Role,
    Settle,
    SettleTimeout,
    StartLeg,
    Unplaceable,
)
from services.runtime.ports import DecodeAccepted, DecodeDone, DecodeToken, FirstToken, Job, KvReady, PrefillAccepted, PrefillDone
from tests.simulation.router_world import _handle, command, worker

MARKS = WorkerMarks(prefill_start=1, prefill_end=2)
STATS = TransferStats(kv_bytes=7, transport="grpc")
JOB = Job("r", b"", tuple(range(32)), command().sampling, command().stop)
HANDLE = _handle("kvHandles/1", worker("prefill"), JOB)


def split(prefill: int = 0, decode: int = 0) -> Planned:
    return Planned(Plan(Split(worker("prefill", prefill), worker("decode", decode)), Reason.MODE_SPLIT, "split"))


def local(decode: int = 0) -> Planned:
    return Planned(Plan(Local(worker("decode", decode)), Reason.MODE_COLOCATED, "local"))


def token(index: int, token_id: int | None = None) -> Token:
    return Token(index, 100 + index if token_id is None else token_id, "x")


class Driver:
    """A machine with short words for its events; keeps what it said."""

    def __init__(self, plan: Planned) -> None:
        self.machine = RequestMachine()
        self.sent: list[Token] = []
        self.legs: set[Leg] = set()
        self.end: Finish | Fail | None = None
        self.feed(plan)

    @property
    def attempt(self) -> int:
        return self.machine.attempt

    def feed(self, event: Event) -> list[Action]:
        if isinstance(event, LegFailed) or (
            isinstance(event, FromPrefill | FromDecode) and isinstance(event.event, PrefillDone | DecodeDone)
        ):
            self.legs.discard(event.leg)
        actions = self.machine.handle(event)
        for action in actions:
            assert self.end is None, "nothing follows the end"
            match action:
                case Emit(sent):
                    self.sent.append(sent)
                case StartLeg(leg):
                    assert leg not in self.legs
                    self.legs.add(leg)
                case CancelLeg(leg):
                    self.legs.discard(leg)
                case Finish() | Fail():
                    self.end = action
        return actions

    def leg(self, role: Role, worker_number: int = 0, attempt: int | None = None) -> Leg:
        return Leg(attempt or self.attempt, role, worker(role.value, worker_number))

    def prefill(self, event, number: int = 0) -> list[Action]:  # type: ignore[no-untyped-def]
        return self.feed(FromPrefill(self.leg(Role.PREFILL, number), event))

    def decode(self, event, number: int = 0) -> list[Action]:  # type: ignore[no-untyped-def]
        return self.feed(FromDecode(self.leg(Role.DECODE, number), event))

    def fails(self, role: Role, error: KvRelayError, number: int = 0) -> list[Action]:
        return self.feed(LegFailed(self.leg(role, number), error))

    def run_split(self, tokens: int = 3) -> None:
        self.prefill(PrefillAccepted(HANDLE))
        self.prefill(FirstToken(token(0)))
        self.prefill(PrefillDone(None, Usage(32, 16, 1), MARKS))
        self.decode(DecodeAccepted(0))
        self.decode(KvReady(STATS))
        for index in range(1, tokens):
            self.decode(DecodeToken(token(index)))


def done(completion_tokens: int = 3) -> DecodeDone:
    return DecodeDone(FinishReason.LENGTH, Usage(32, 0, completion_tokens), WorkerMarks(end=9), STATS)


def replan(actions: list[Action]) -> Replan:
    (found,) = [action for action in actions if isinstance(action, Replan)]
    return found


def test_a_split_starts_decode_as_soon_as_there_is_a_handle() -> None:
    driver = Driver(split())
    assert [leg.role for leg in driver.legs] == [Role.PREFILL]
    assert driver.prefill(PrefillAccepted(HANDLE)) == [StartLeg(driver.leg(Role.DECODE), HANDLE)]


def test_a_split_ends_with_decode_and_counts_what_prefill_found_cached() -> None:
    driver = Driver(split())
    driver.run_split()
    driver.decode(done())
    assert driver.end == Finish(FinishReason.LENGTH, Usage(32, 16, 3), "split", STATS, MARKS, WorkerMarks(end=9))
    assert [sent.index for sent in driver.sent] == [0, 1, 2]


def test_a_local_request_needs_one_leg() -> None:
    driver = Driver(local())
    assert [leg.role for leg in driver.legs] == [Role.DECODE]
    driver.decode(DecodeAccepted(16))
    driver.decode(DecodeToken(token(0)))
    driver.decode(DecodeDone(FinishReason.STOP, Usage(32, 16, 1), MARKS))
    assert driver.end == Finish(FinishReason.STOP, Usage(32, 16, 1), "local", None, None, MARKS)


def test_an_answer_of_one_token_ends_with_prefill_and_cancels_decode() -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    driver.prefill(FirstToken(token(0)))
    actions = driver.prefill(PrefillDone(FinishReason.STOP, Usage(32, 0, 1), MARKS))
    assert CancelLeg(driver.leg(Role.DECODE)) in actions
    assert driver.end == Finish(FinishReason.STOP, Usage(32, 0, 1), "split", None, MARKS, None)


def test_a_decode_token_that_overtakes_prefills_waits_for_it() -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    driver.decode(KvReady(STATS))
    driver.decode(DecodeToken(token(1)))
    driver.decode(DecodeToken(token(2)))
    (settle,) = driver.decode(done())
    assert isinstance(settle, Settle) and driver.sent == [] and driver.machine.phase is Phase.SETTLING
    driver.prefill(FirstToken(token(0)))
    assert [sent.index for sent in driver.sent] == [0, 1, 2]
    driver.prefill(PrefillDone(None, Usage(32, 16, 1), MARKS))
    assert isinstance(driver.end, Finish) and driver.end.usage == Usage(32, 16, 3)


@pytest.mark.parametrize("last_word", ["timeout", "failure"])
def test_prefills_last_word_can_be_done_without(last_word: str) -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    driver.prefill(FirstToken(token(0)))
    driver.decode(KvReady(STATS))
    driver.decode(DecodeToken(token(1)))
    driver.decode(done())
    if last_word == "timeout":
        driver.feed(SettleTimeout(driver.leg(Role.PREFILL)))
    else:
        driver.fails(Role.PREFILL, WorkerLostError("killed"))
    assert isinstance(driver.end, Finish) and driver.end.prefill_marks == WorkerMarks()


def test_a_failed_prefill_is_tried_once_elsewhere_then_locally() -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    actions = driver.fails(Role.PREFILL, WorkerLostError("killed"))
    assert CancelLeg(driver.leg(Role.DECODE)) in actions
    assert set(replan(actions).restriction.avoid) == {"prefill-0"} and not replan(actions).restriction.local_only
    driver.feed(split(prefill=1))
    restriction = replan(driver.fails(Role.PREFILL, DrainingError("going"), 1)).restriction
    assert restriction.local_only and set(restriction.avoid) == {"prefill-0", "prefill-1"}
    driver.feed(local())
    driver.decode(DecodeToken(token(0)))
    driver.decode(DecodeDone(FinishReason.LENGTH, Usage(32, 0, 1), MARKS))
    assert isinstance(driver.end, Finish) and driver.end.path == "fallback" and driver.end.transfer is None


@pytest.mark.parametrize("error", [KvTransferError("cut"), ChecksumMismatchError("flipped"), FingerprintMismatchError("other model")])
def test_a_failed_hand_over_is_the_holders_fault(error: KvRelayError) -> None:
    driver = Driver(split())
    driver.run_split(tokens=1)
    restriction = replan(driver.fails(Role.DECODE, error)).restriction
    assert set(restriction.avoid) == {"prefill-0"} and set(restriction.shun) == {"decode-0"} and not restriction.local_only


def test_a_decode_worker_lost_before_its_first_token_is_replaced_and_prefill_kept() -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    restriction = replan(driver.fails(Role.DECODE, WorkerLostError("killed"))).restriction
    assert set(restriction.shun) == {"decode-0"} and not restriction.avoid and not restriction.local_only


def test_a_decode_worker_that_refuses_is_not_asked_again() -> None:
    driver = Driver(local())
    assert set(replan(driver.fails(Role.DECODE, OverloadedError("full"))).restriction.avoid) == {"decode-0"}


def test_after_tokens_were_sent_only_one_worker_goes_on_and_repeats_nothing() -> None:
    driver = Driver(split())
    driver.run_split(tokens=3)
    assert replan(driver.fails(Role.DECODE, WorkerLostError("killed"))).restriction.local_only
    driver.feed(local(decode=1))
    for index in range(5):
        driver.decode(DecodeToken(token(index)), 1)
    driver.decode(DecodeDone(FinishReason.LENGTH, Usage(32, 0, 5), MARKS), 1)
    assert [sent.index for sent in driver.sent] == [0, 1, 2, 3, 4]
    assert isinstance(driver.end, Finish) and driver.end.usage.completion_tokens == 5 and driver.end.path == "fallback"


def test_another_try_that_draws_another_token_is_a_bug_not_an_answer() -> None:
    driver = Driver(split())
    driver.run_split(tokens=3)
    driver.fails(Role.DECODE, WorkerLostError("killed"))
    driver.feed(local(decode=1))
    driver.decode(DecodeToken(token(0)), 1)
    driver.decode(DecodeToken(token(1, token_id=5)), 1)
    assert isinstance(driver.end, Fail) and isinstance(driver.end.error, InternalError)
    assert [sent.token_id for sent in driver.sent] == [100, 101, 102]


def test_a_gap_fails_the_try() -> None:
    driver = Driver(local())
    driver.decode(DecodeToken(token(0)))
    assert isinstance(replan(driver.decode(DecodeToken(token(2)))).error, InternalError)


@pytest.mark.parametrize(
    "error",
    [PromptTooLongError("pool"), InvalidMaxTokensError("pool"), DeadlineExceededError("late"), CancelledByClientError("gone")],
    ids=lambda error: error.reason,
)
def test_what_nobody_can_mend_is_not_tried_again(error: KvRelayError) -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    actions = driver.fails(Role.PREFILL, error)
    assert driver.end == Fail(error) and CancelLeg(driver.leg(Role.DECODE)) in actions


def test_the_third_failure_is_the_last_and_its_error_is_reported() -> None:
    driver = Driver(local())
    driver.fails(Role.DECODE, WorkerLostError("first"))
    driver.feed(local(decode=1))
    restriction = replan(driver.fails(Role.DECODE, WorkerLostError("second"), 1)).restriction
    assert restriction.local_only, "the last try depends on one worker only"
    driver.feed(local(decode=2))
    last = OverloadedError("third")
    driver.fails(Role.DECODE, last, 2)
    assert driver.end == Fail(last)


def test_when_nobody_is_left_the_reason_of_the_last_try_is_reported() -> None:
    driver = Driver(local())
    why = OverloadedError("full", retry_after_s=2.0)
    driver.fails(Role.DECODE, why)
    driver.feed(Unplaceable(NoWorkerError("none", role="decode")))
    assert driver.end == Fail(why)


def test_events_of_a_try_that_is_over_change_nothing() -> None:
    driver = Driver(split())
    driver.prefill(PrefillAccepted(HANDLE))
    old_prefill, old_decode = driver.leg(Role.PREFILL), driver.leg(Role.DECODE)
    driver.fails(Role.PREFILL, WorkerLostError("killed"))
    for event in (
        FromDecode(old_decode, DecodeToken(token(1))),
        LegFailed(old_decode, KvTransferError("cut")),
        FromPrefill(old_prefill, FirstToken(token(0))),
        SettleTimeout(old_prefill),
    ):
        assert driver.feed(event) == []
    driver.feed(split(prefill=1))
    assert driver.feed(FromDecode(old_decode, DecodeToken(token(1)))) == []
    assert driver.sent == []


ERRORS = st.sampled_from(
    [
        WorkerLostError("killed"),
        KvTransferError("cut"),
        OverloadedError("full"),
        ChecksumMismatchError("flipped"),
        InternalError("bug"),
        PromptTooLongError("pool"),
        DeadlineExceededError("late"),
    ]
)
PREFILL_EVENTS = st.one_of(
    st.just(PrefillAccepted(HANDLE)),
    st.builds(FirstToken, st.builds(token, st.sampled_from([0, 0, 0, 1]))),
    st.builds(PrefillDone, st.sampled_from([None, None, FinishReason.STOP]), st.just(Usage(32, 0, 1)), st.just(MARKS)),
)
DECODE_EVENTS = st.one_of(
    st.just(DecodeAccepted(0)),
    st.just(KvReady(STATS)),
    st.builds(DecodeToken, st.builds(token, st.integers(0, 6), st.sampled_from([None, None, None, None, 5]))),
    st.just(done()),
)
STEPS = st.one_of(
    st.tuples(st.just("next"), st.none()),
    st.tuples(st.just("prefill"), PREFILL_EVENTS),
    st.tuples(st.just("decode"), DECODE_EVENTS),
    st.tuples(st.sampled_from(["prefill fails", "decode fails"]), ERRORS),
    st.tuples(st.just("settle"), st.none()),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_whatever_workers_do_the_client_sees_one_contiguous_stream_and_one_end(data: st.DataObject) -> None:
    """Workers here may break every rule; a well-behaved one goes on with 'next'."""
    plans = st.sampled_from([split(), split(prefill=1), split(decode=1), local(), local(decode=1)])
    plan = data.draw(plans)
    driver = Driver(plan)
    due = 0
    for _ in range(data.draw(st.integers(0, 40))):
        if driver.end is not None:
            break
        if driver.machine.phase is Phase.PLANNING:
            assert not driver.legs, "a failed try leaves no leg behind"
            plan = data.draw(plans)
            driver.feed(plan if data.draw(st.integers(0, 9)) else Unplaceable(NoWorkerError("none")))
            due = 0
            continue
        prefills = [leg for leg in driver.legs if leg.role is Role.PREFILL and leg.attempt == driver.attempt]
        decodes = [leg for leg in driver.legs if leg.role is Role.DECODE and leg.attempt == driver.attempt]
        what, value = data.draw(STEPS)
        if what == "next" and decodes:
            driver.feed(FromDecode(decodes[0], DecodeToken(token(due))))
            due += 1
        elif what == "prefill" and prefills:
            driver.feed(FromPrefill(prefills[0], value))
        elif what == "decode" and decodes:
            driver.feed(FromDecode(decodes[0], value))
        elif what == "prefill fails" and prefills:
            driver.feed(LegFailed(prefills[0], value))
        elif what == "decode fails" and decodes:
            driver.feed(LegFailed(decodes[0], value))
        elif what == "settle" and prefills:
            driver.feed(SettleTimeout(prefills[0]))
        assert [sent.index for sent in driver.sent] == list(range(len(driver.sent)))
        assert driver.attempt <= 3
    if isinstance(driver.end, Finish):
        assert driver.end.usage.completion_tokens == len(driver.sent) > 0
        assert driver.machine.phase is Phase.DONE
    if isinstance(driver.end, Fail):
        assert driver.machine.phase is Phase.FAILED
    if driver.end is not None:
        assert not driver.legs, "nothing runs on after the end"
        for leg in (driver.leg(Role.PREFILL), driver.leg(Role.DECODE)):
            assert driver.feed(LegFailed(leg, WorkerLostError("late"))) == []
