"""LeaseTable against a plain dict, with time as one of the events; and each refusal by its reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvrelay.errors import (
    HandleConsumedError,
    HandleError,
    HandleForgedError,
    KvAbortedError,
    KvNotFoundError,
    LeaseExpiredError,
    OverloadedError,
)
from services.relay.leases import LeaseEnd, LeaseTable

TTL_S = 10.0
TOMBSTONE_S = 25.0
REFUSALS = {LeaseEnd.RELEASED: HandleConsumedError, LeaseEnd.EXPIRED: LeaseExpiredError, LeaseEnd.FAILED: KvAbortedError}


class LeaseModel(RuleBasedStateMachine):
    """`live`: name to (secret, deadline, used); `ended`: name to (why, when)."""

    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable(TTL_S, max_live=4, max_tombstones=1000, tombstone_s=TOMBSTONE_S)
        self.now = 0.0
        self.count = 0
        self.live: dict[str, tuple[str, float, bool]] = {}
        self.ended: dict[str, tuple[LeaseEnd, float]] = {}
        self.until: dict[str, float] = {}
        """When each must end, however often it is renewed."""

    def expected(self, name: str, secret: str) -> type[HandleError] | None:
        if name in self.live:
            own, deadline, _ = self.live[name]
            return HandleForgedError if secret != own else LeaseExpiredError if self.now >= deadline else None
        if name in self.ended:
            return REFUSALS[self.ended[name][0]]
        return KvNotFoundError

    def extended(self, name: str) -> float:
        return min(self.now + TTL_S, self.until[name])

    def forget(self) -> None:
        self.ended = {n: (w, at) for n, (w, at) in self.ended.items() if self.now < at + TOMBSTONE_S}

    @rule(target=names, lasts_s=st.sampled_from([2.0, 25.0, math.inf]))
    def grant(self, lasts_s: float) -> str:
        self.count += 1
        name = f"h{self.count}"
        self.until[name] = self.now + lasts_s
        if len(self.live) == 4:
            with pytest.raises(OverloadedError) as caught:
                self.table.grant(name, f"s{name}", self.now, self.until[name])
            assert caught.value.retry_after_s is not None and 0 < caught.value.retry_after_s <= 1
        else:
            self.table.grant(name, f"s{name}", self.now, self.until[name])
            self.live[name] = (f"s{name}", self.extended(name), False)
        return name

    @rule(name=names, right=st.booleans())
    def check(self, name: str, right: bool) -> None:
        secret = f"s{name}" if right else "guess"
        error = self.expected(name, secret)
        if error is None:
            self.table.check(name, secret, self.now)
        elif name in self.ended and self.now >= self.ended[name][1] + TOMBSTONE_S:
            with pytest.raises(HandleError):  # forgotten or not: swept lazily
                self.table.check(name, secret, self.now)
        else:
            with pytest.raises(error):
                self.table.check(name, secret, self.now)

    @rule(name=names)
    def consume(self, name: str) -> None:
        if self.expected(name, f"s{name}") is not None:
            return
        secret, deadline, used = self.live[name]
        if used:
            with pytest.raises(HandleConsumedError):
                self.table.consume(name)
        else:
            self.table.consume(name)
            self.live[name] = (secret, deadline, True)

    @rule(name=names, right=st.booleans())
    def renew(self, name: str, right: bool) -> None:
        secret = f"s{name}" if right else "guess"
        alive = self.expected(name, secret) is None
        assert self.table.renew(name, secret, self.now) == (self.extended(name) - self.now if alive else None)
        if alive:
            self.live[name] = (secret, self.extended(name), self.live[name][2])

    @rule(name=names)
    def touch(self, name: str) -> None:
        self.table.touch(name, self.now)
        if self.expected(name, f"s{name}") is None:
            self.live[name] = (f"s{name}", self.extended(name), self.live[name][2])

    @rule(name=names, why=st.sampled_from(LeaseEnd))
    def end(self, name: str, why: LeaseEnd) -> None:
        assert self.table.end(name, why, self.now) is (name in self.live)
        if self.live.pop(name, None) is not None:
            self.forget()
            self.ended[name] = (why, self.now)

    @rule(seconds=st.sampled_from([0.5, 3.0, 10.0, 30.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        due = sorted((deadline, name) for name, (_, deadline, _) in self.live.items() if self.now >= deadline)
        swept = self.table.expire(self.now)
        assert sorted(swept) == sorted(name for _, name in due)
        for name in swept:
            del self.live[name]
            self.ended[name] = (LeaseEnd.EXPIRED, self.now)
        self.forget()

    @invariant()
    def same_size(self) -> None:
        assert len(self.table) == len(self.live)


LeaseModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLeaseModel = LeaseModel.TestCase


def test_sweep_names_the_earliest_first() -> None:
    table = LeaseTable(TTL_S)
    for name, at in (("a", 0.0), ("b", 1.0), ("c", 2.0)):
        table.grant(name, "s", at)
    assert table.renew("a", "s", 3.0)
    assert table.expire(20.0) == ["b", "c", "a"]


def test_tombstones_are_bounded_by_number_and_time() -> None:
    table = LeaseTable(TTL_S, max_tombstones=2, tombstone_s=5.0)
    for name in "abc":
        table.grant(name, "s", 0.0)
        table.end(name, LeaseEnd.RELEASED, 0.0)
    with pytest.raises(KvNotFoundError):
        table.check("a", "s", 0.0)
    with pytest.raises(HandleConsumedError):
        table.check("c", "s", 0.0)
    table.expire(6.0)
    with pytest.raises(KvNotFoundError):
        table.check("c", "s", 6.0)


def test_a_secret_that_is_no_text_is_a_forgery() -> None:
    table = LeaseTable(TTL_S)
    table.grant("a", "s", 0.0)
    with pytest.raises(HandleForgedError):
        table.check("a", "\ud800é", 0.0)
