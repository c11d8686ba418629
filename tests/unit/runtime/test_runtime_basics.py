"""Clock, off-loop work and deadlines."""

from __future__ import annotations

import asyncio
import contextvars
import math
import threading

import pytest

from services.runtime.clock import ManualClock, SystemClock
from services.runtime.offloop import assert_off_loop, run_off_loop
from services.runtime.rpc.deadline import deadline_scope, remaining_s


def test_a_manual_clock_moves_both_readings_together_and_only_forward() -> None:
    clock = ManualClock()
    monotonic, epoch_ns = clock.monotonic(), clock.time_ns()
    clock.advance(1.25)
    assert clock.monotonic() - monotonic == 1.25
    assert clock.time_ns() - epoch_ns == 1_250_000_000
    with pytest.raises(AssertionError):
        clock.advance(-1)


def test_the_system_clock_reads_seconds_and_nanoseconds() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.time_ns() > 1_600_000_000 * 10**9


async def test_work_on_the_loop_is_caught_and_off_the_loop_is_not() -> None:
    with pytest.raises(AssertionError, match="hashing on the event loop"):
        assert_off_loop("hashing")
    await run_off_loop(assert_off_loop, "hashing")


def test_without_a_loop_nothing_is_wrong() -> None:
    assert_off_loop("hashing")


async def test_off_loop_work_sees_the_callers_context_and_keyword_arguments() -> None:
    variable = contextvars.ContextVar("variable", default="outside")
    variable.set("caller's")

    def work(first: int, *, second: int) -> tuple[str, int, str]:
        return variable.get(), first + second, threading.current_thread().name

    value, total, thread = await run_off_loop(work, 1, second=2)
    assert (value, total) == ("caller's", 3) and thread.startswith("off-loop")


async def test_errors_of_off_loop_work_are_raised_to_the_caller() -> None:
    def fail() -> None:
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        await run_off_loop(fail)


def test_outside_a_request_there_is_no_deadline() -> None:
    assert remaining_s() == math.inf
    assert remaining_s(5.0) == 5.0


def test_a_deadline_counts_down_and_is_never_negative() -> None:
    with deadline_scope(100):
        assert 90 < remaining_s() <= 100
        assert remaining_s(5.0) == 5.0
    with deadline_scope(-1):
        assert remaining_s() == 0.0


def test_an_inner_scope_cannot_extend_the_outer_one() -> None:
    with deadline_scope(10):
        with deadline_scope(1_000):
            assert remaining_s() <= 10
        with deadline_scope(1):
            assert remaining_s() <= 1
        assert remaining_s() > 5


async def test_tasks_inherit_the_deadline_of_their_starter() -> None:
    async def read() -> float:
        return remaining_s()

    with deadline_scope(10):
        task = asyncio.create_task(read())
    assert await task <= 10
    assert remaining_s() == math.inf
