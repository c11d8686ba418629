"""How many requests may be under way: a bounded number in flight, a bounded line behind them, nobody waiting for long."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from kvrelay.errors import DrainingError, OverloadedError
from services.runtime.clock import Clock

MIN_RETRY_S, MAX_RETRY_S = 0.1, 30.0


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """Bounds of the router's door."""

    max_in_flight: int = 256
    max_waiting: int = 512
    max_wait_s: float = 10.0


class Admission:
    """First come, first served. All methods belong to the event loop."""

    def __init__(self, limits: AdmissionLimits, clock: Clock) -> None:
        self._limits = limits
        self._clock = clock
        self._in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._draining = False
        self._mean_hold_s = 1.0

    @property
    def in_flight(self) -> int:
        return self._in_flight

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def admitted(self) -> AsyncIterator[None]:
        """Holds a place. Raises `OverloadedError` with a retry hint when the line is full or too slow, `DrainingError` at shutdown."""
        await self._enter()
        start = self._clock.monotonic()
        try:
            yield
        finally:
            self._mean_hold_s += 0.1 * (self._clock.monotonic() - start - self._mean_hold_s)
            self._leave()

    def drain(self) -> None:
        """Nobody new from now on; those in line are turned away, those admitted go on."""
        self._draining = True
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(DrainingError("the router is shutting down"))

    async def _enter(self) -> None:
        if self._draining:
            raise DrainingError("the router is shutting down")
        if self._in_flight < self._limits.max_in_flight:
            self._in_flight += 1
            return
        if len(self._waiting) >= self._limits.max_waiting:
            raise self._overloaded(f"{self._in_flight} requests in flight and {len(self._waiting)} waiting")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                await turn
        except BaseException as failure:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The place was given in the same moment in which the wait ended.
                self._leave()
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(failure, TimeoutError):
                raise self._overloaded(f"no place came free within {self._limits.max_wait_s:g} s") from None
            raise

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._in_flight -= 1

    def _overloaded(self, why: str) -> OverloadedError:
        turns = (len(self._waiting) + 1) / self._limits.max_in_flight
        return OverloadedError(why, retry_after_s=min(MAX_RETRY_S, max(MIN_RETRY_S, turns * self._mean_hold_s)))
