"""The door of the router."""

from __future__ import annotations

import asyncio

import pytest

from kvrelay.errors import DrainingError, OverloadedError
from services.router.admission import Admission, AdmissionLimits
from tests.simulation.virtual_time import LoopClock, finished, run_virtual


async def hold(admission: Admission, seconds: float, log: list[str], name: str) -> None:
    async with admission.admitted():
        log.append(name)
        await asyncio.sleep(seconds)


def test_places_are_given_in_order_and_never_more_than_there_are() -> None:
    async def main() -> None:
        admission, log = Admission(AdmissionLimits(2, 10, 100.0), LoopClock()), list[str]()
        tasks = [asyncio.create_task(hold(admission, 1.0, log, str(n))) for n in range(6)]
        await asyncio.sleep(0.5)
        assert log == ["0", "1"] and (admission.in_flight, admission.waiting) == (2, 4)
        await asyncio.sleep(1.0)
        assert log == ["0", "1", "2", "3"] and admission.in_flight == 2
        await asyncio.gather(*tasks)
        assert log == list("012345") and (admission.in_flight, admission.waiting) == (0, 0)

    run_virtual(main)


def test_a_full_line_refuses_with_a_hint_that_follows_how_long_requests_take() -> None:
    async def main() -> None:
        admission, log = Admission(AdmissionLimits(1, 1, 1000.0), LoopClock()), list[str]()
        for _ in range(40):
            await hold(admission, 8.0, log, "warm")
        tasks = [asyncio.create_task(hold(admission, 1.0, log, str(n))) for n in range(2)]
        await asyncio.sleep(0)
        refused = await finished(hold(admission, 1.0, log, "late"))
        assert isinstance(refused, OverloadedError) and refused.retry_after_s == pytest.approx(16, rel=0.1)
        await asyncio.gather(*tasks)
        assert "late" not in log

    run_virtual(main)


def test_nobody_waits_longer_than_allowed_and_no_place_is_lost() -> None:
    async def main() -> None:
        admission, log = Admission(AdmissionLimits(1, 5, 2.0), LoopClock()), list[str]()
        first = asyncio.create_task(hold(admission, 10.0, log, "first"))
        await asyncio.sleep(0)
        assert isinstance(await finished(hold(admission, 1.0, log, "second")), OverloadedError)
        assert asyncio.get_running_loop().time() == 2.0 and admission.waiting == 0
        await first
        await hold(admission, 1.0, log, "third")
        assert log == ["first", "third"] and admission.in_flight == 0

    run_virtual(main)


def test_a_waiter_cancelled_in_the_moment_of_its_turn_passes_it_on() -> None:
    async def main() -> None:
        admission, log = Admission(AdmissionLimits(1, 5, 100.0), LoopClock()), list[str]()
        async with admission.admitted():
            second, third = (asyncio.create_task(hold(admission, 1.0, log, name)) for name in ("second", "third"))
            await asyncio.sleep(0.5)
        # Its turn has come, but it has not run since.
        second.cancel()
        await finished(second)
        await third
        assert log == ["third"] and admission.in_flight == 0

    run_virtual(main)


def test_draining_turns_away_who_waits_and_lets_run_who_is_in() -> None:
    async def main() -> None:
        admission, log = Admission(AdmissionLimits(1, 5, 100.0), LoopClock()), list[str]()
        first = asyncio.create_task(hold(admission, 5.0, log, "first"))
        second = asyncio.create_task(hold(admission, 5.0, log, "second"))
        await asyncio.sleep(1.0)
        admission.drain()
        assert isinstance(await finished(second), DrainingError)
        assert isinstance(await finished(hold(admission, 1.0, log, "new")), DrainingError)
        await first
        assert log == ["first"] and admission.in_flight == 0

    run_virtual(main)
