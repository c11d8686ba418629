"""Leases and what is left of them: a pure table, told the time with every call.

A lease is live until it ends, and it ends once: released (by its taker, or because it was used up), expired or failed. What ended is
remembered for a while, so that a late or replayed handle is refused by its true reason instead of "unknown".
"""

from __future__ import annotations

import enum
import hmac
import math
from collections import OrderedDict
from dataclasses import dataclass

from kvrelay.errors import (
    HandleConsumedError,
    HandleError,
    HandleForgedError,
    KvAbortedError,
    KvNotFoundError,
    LeaseExpiredError,
    OverloadedError,
)


class LeaseEnd(enum.StrEnum):
    """Why a lease is over."""

    RELEASED = "released"
    """Its taker let go of it, or used it up: handles are single-use."""
    EXPIRED = "expired"
    FAILED = "failed"
    """Its producer gave up."""


@dataclass(slots=True)
class _Live:
    lease_id: str
    deadline: float
    until: float
    consumed: bool = False


def refusal(name: str, why: LeaseEnd) -> HandleError:
    """The error that says why an ended handle is refused."""
    if why is LeaseEnd.EXPIRED:
        return LeaseExpiredError("the lease ran out", handle=name)
    if why is LeaseEnd.FAILED:
        return KvAbortedError("the producer gave up before the KV was complete", handle=name)
    return HandleConsumedError("the handle was used already", handle=name)


class LeaseTable:
    """Live leases by name, and the tombstones of ended ones.

    `now` is seconds on one monotonic clock and never goes back. A lease lives while `now < granted or renewed + ttl_s`, and never past
    its `until`: renewing keeps a taker's promise that it is there, and gives nobody more time than his request has.
    """

    def __init__(self, ttl_s: float, *, max_live: int = 1024, max_tombstones: int = 8192, tombstone_s: float = 600.0) -> None:
        """Tombstones are kept for `tombstone_s` seconds, the newest `max_tombstones` of them."""
        self.ttl_s = ttl_s
        self._max_live = max_live
        self._max_tombstones = max_tombstones
        self._tombstone_s = tombstone_s
        self._live: dict[str, _Live] = {}
        self._tombstones: OrderedDict[str, tuple[LeaseEnd, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, name: str, lease_id: str, now: float, until: float = math.inf) -> None:
        """Raises `OverloadedError` when `max_live` leases are out; the hint is when the next one can expire."""
        assert name not in self._live and name not in self._tombstones, f"{name} was given out before"
        if len(self._live) >= self._max_live:
            first = min(live.deadline for live in self._live.values())
            raise OverloadedError(f"{self._max_live} handles are out", retry_after_s=min(max(first - now, 0.1), 1.0), limit=self._max_live)
        self._live[name] = _Live(lease_id, min(now + self.ttl_s, until), until)

    def check(self, name: str, lease_id: str, now: float) -> None:
        """Raises what is wrong with a handle: `KvNotFoundError`, `LeaseExpiredError`, `HandleConsumedError` or `KvAbortedError` for one
        that ended, `HandleForgedError` for a wrong secret. A lease past its time is refused even before `expire` swept it."""
        live = self._live.get(name)
        if live is None:
            if name in self._tombstones:
                raise refusal(name, self._tombstones[name][0])
            raise KvNotFoundError("no such handle", handle=name)
        if not hmac.compare_digest(live.lease_id.encode(), lease_id.encode(errors="replace")):
            raise HandleForgedError("the lease secret is wrong", handle=name)
        if now >= live.deadline:
            raise refusal(name, LeaseEnd.EXPIRED)

    def is_live(self, name: str, now: float) -> bool:
        live = self._live.get(name)
        return live is not None and now < live.deadline

    def consume(self, name: str) -> None:
        """Takes the one use of a live lease; raises `HandleConsumedError` when it is gone."""
        live = self._live[name]
        if live.consumed:
            raise refusal(name, LeaseEnd.RELEASED)
        live.consumed = True

    def touch(self, name: str, now: float) -> None:
        """Extends a lease that is still live; no effect on any other."""
        if self.is_live(name, now):
            live = self._live[name]
            live.deadline = min(now + self.ttl_s, live.until)

    def renew(self, name: str, lease_id: str, now: float) -> float | None:
        """Extends a live lease whose secret is right: its new time to live in seconds, else None."""
        try:
            self.check(name, lease_id, now)
        except HandleError:
            return None
        self.touch(name, now)
        return self._live[name].deadline - now

    def end(self, name: str, why: LeaseEnd, now: float) -> bool:
        """Ends a live lease and says whether it was live."""
        if self._live.pop(name, None) is None:
            return False
        self._forget(now)
        self._tombstones[name] = (why, now + self._tombstone_s)
        while len(self._tombstones) > self._max_tombstones:
            self._tombstones.popitem(last=False)
        return True

    def expire(self, now: float) -> list[str]:
        """Ends every lease whose time is over, earliest first, and names them."""
        over = [(live.deadline, name) for name, live in self._live.items() if now >= live.deadline]
        names = [name for _, name in sorted(over)]
        for name in names:
            self.end(name, LeaseEnd.EXPIRED, now)
        self._forget(now)
        return names

    def _forget(self, now: float) -> None:
        while self._tombstones:
            name, (_, until) = next(iter(self._tombstones.items()))
            if now < until:
                return
            del self._tombstones[name]
