"""Time as an argument: services are given a clock, so that tests can turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two readings: one for durations within this process, one for moments that other processes compare."""

    def monotonic(self) -> float:
        """Seconds; only differences mean anything, and only within this process."""
        ...

    def time_ns(self) -> int:
        """Nanoseconds since the epoch; may be stepped by the host."""
        ...


class SystemClock:
    """The host's clocks."""

    __slots__ = ()

    def monotonic(self) -> float:
        return time.monotonic()

    def time_ns(self) -> int:
        return time.time_ns()


class ManualClock:
    """A clock that stands still until `advance`; both readings move together."""

    __slots__ = ("_epoch_ns", "_now_ns")

    def __init__(self, now_s: float = 1_000.0, epoch_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = round(now_s * 1e9)
        self._epoch_ns = epoch_ns

    def advance(self, seconds: float) -> None:
        """Moves time forward; a negative step is a bug in the test."""
        assert seconds >= 0, f"a clock does not go back, asked for {seconds} s"
        step_ns = round(seconds * 1e9)
        self._now_ns += step_ns
        self._epoch_ns += step_ns

    def monotonic(self) -> float:
        return self._now_ns / 1e9

    def time_ns(self) -> int:
        return self._epoch_ns
