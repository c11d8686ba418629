"""The orchestrator over scripted workers in virtual time: whatever fails, each request ends in one whole answer or one typed error."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing

import pytest

from kvrelay.errors import DeadlineExceededError, InternalError, KvRelayError, OverloadedError, WorkerLostError
from kvrelay.values import Token
from services.router.admission import AdmissionLimits
from services.router.live_request import Patience
from services.router.orchestrator import Completed, GenerateEvent, Started
from services.router.placement import Mode
from services.router.validation import GenerateCommand
from tests.simulation.router_world import (
    Call,
    Fault,
    World,
    check_tokens,
    check_whole,
    command,
    expected,
    some_error,
    worker,
)
from tests.simulation.virtual_time import finished, run_virtual

FLEET = [worker("prefill", 0), worker("prefill", 1), worker("decode", 0), worker("decode", 1)]
EVENTS_OF_A_SPLIT = {"prefill": 3, "decode": 10}
"""Of the command these tests send: 8 tokens, one of them prefill's."""


def first_call_fails(role: str, at: int, error: Exception | None) -> Callable[[Call], Fault | None]:
    """The first call of a role fails; every other one works."""
    seen: set[str] = set()

    def fault(call: Call) -> Fault | None:
        if call.role == role and role not in seen:
            seen.add(role)
            return Fault(at, error)
        return None

    return fault


@pytest.mark.parametrize(("mode", "path"), [(Mode.SPLIT, "split"), (Mode.COLOCATED, "local"), (Mode.HYBRID, "local")])
def test_a_request_is_answered_whole(mode: Mode, path: str) -> None:
    async def main() -> None:
        world = World(FLEET, mode=mode)
        end = check_whole(await world.run(command()), command())
        assert end.completion.path == path
        assert (end.completion.transfer is not None) == (path == "split")
        world.assert_idle()

    run_virtual(main)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("error", [WorkerLostError("killed"), OverloadedError("full"), None], ids=["lost", "overloaded", "silent"])
def test_any_one_failure_at_any_moment_is_survived(role: str, error: KvRelayError | None) -> None:
    """Silence is only noticed where prefill does not accept; elsewhere the deadline ends it (keepalive does on a real channel)."""

    async def main() -> None:
        for at in range(EVENTS_OF_A_SPLIT[role] if error is not None else 1 if role == "prefill" else 0):
            world = World(FLEET, fault=first_call_fails(role, at, error))
            end = check_whole(await world.run(command()), command())
            assert end.completion.path in ("split", "fallback"), at
            assert len({call.job.request_id for call in world.workers.calls}) >= 2 or at == 2, "tries never share a request id"
            world.assert_idle()

    run_virtual(main)


def test_a_single_pair_survives_the_loss_of_its_prefill_worker() -> None:
    async def main() -> None:
        for at in range(3):
            world = World(
                [worker("prefill"), worker("decode")],
                fault=first_call_fails("prefill", at, WorkerLostError("killed")),
                pause=lambda call: 0.01 if call.role == "prefill" else 0.001,
            )
            end = check_whole(await world.run(command()), command())
            # A prefill lost after its token and its KV were taken is not missed.
            assert end.completion.path == ("fallback" if at < 2 else "split")
            world.assert_idle()

    run_virtual(main)


def test_a_decode_worker_lost_in_mid_stream_is_replaced_and_nothing_is_sent_twice() -> None:
    async def main() -> None:
        world = World(FLEET, fault=first_call_fails("decode", 6, WorkerLostError("killed")))
        end = check_whole(await world.run(command()), command())
        assert end.completion.path == "fallback"
        lost, resumed = (call for call in world.workers.calls if call.role == "decode")
        assert resumed.handle is None and resumed.worker_id != lost.worker_id
        assert resumed.job.sampling == lost.job.sampling
        world.assert_idle()

    run_virtual(main)


def test_a_worker_that_was_lost_is_avoided_for_a_while() -> None:
    async def main() -> None:
        world = World(FLEET, fault=lambda call: Fault(0, WorkerLostError("killed")) if call.worker_id == "prefill-0" else None)
        for _ in range(5):
            check_whole(await world.run(command()), command())
        assert sum(call.worker_id == "prefill-0" for call in world.workers.calls) == 1
        await asyncio.sleep(60)
        await world.run(command())
        assert sum(call.worker_id == "prefill-0" for call in world.workers.calls) == 2, "and tried again later"
        world.assert_idle()

    run_virtual(main)


def test_the_last_error_is_reported_when_every_try_fails() -> None:
    async def main() -> None:
        world = World(FLEET, fault=lambda call: Fault(0, OverloadedError("full", retry_after_s=3.0)) if call.role == "decode" else None)
        result = await finished(world.run(command()))
        assert isinstance(result, OverloadedError) and result.retry_after_s == 3.0
        world.assert_idle()

    run_virtual(main)


def test_nothing_is_told_to_a_client_whom_every_worker_refuses() -> None:
    """So that it may ask again."""

    async def main() -> None:
        world = World(FLEET, fault=lambda call: Fault(0, OverloadedError("full", retry_after_s=3.0)))
        async with aclosing(world.router.generate(command(), timeout_s=60)) as stream:
            with pytest.raises(OverloadedError):
                await anext(stream)
        world.assert_idle()

    run_virtual(main)


def test_the_first_token_is_sent_before_the_hand_over_is_complete() -> None:
    async def main() -> None:
        world = World(FLEET, pause=lambda call: 0.01 if call.role == "prefill" else 5.0)
        stream = world.router.generate(command(), timeout_s=600)
        async with aclosing(stream):
            assert isinstance(await anext(stream), Started)
            token = await anext(stream)
            assert isinstance(token, Token) and token.index == 0
            assert asyncio.get_running_loop().time() < 1.0
        world.assert_idle()

    run_virtual(main)


def test_a_decode_token_that_overtakes_the_first_one_waits_for_it() -> None:
    async def main() -> None:
        # Decode has its KV at the same moment in which prefill sends its token; prefill's end comes seconds later.
        world = World(FLEET, pause=lambda call: 1.0 if call.role == "prefill" else 0.0, patience=Patience(settle_timeout_s=5.0))
        end = check_whole(await world.run(command()), command())
        assert end.completion.timings.prefill_s > 0, "prefill's last word was waited for"
        world.assert_idle()

    run_virtual(main)


def test_prefills_last_word_is_not_waited_for_long() -> None:
    async def main() -> None:
        world = World(FLEET, fault=lambda call: Fault(2, None) if call.role == "prefill" else None)
        end = check_whole(await world.run(command()), command())
        assert end.completion.path == "split"
        assert asyncio.get_running_loop().time() < 2.0
        world.assert_idle()

    run_virtual(main)


def test_an_answer_of_one_token_ends_with_prefill() -> None:
    async def main() -> None:
        world = World(FLEET, pause=lambda call: 0.01 if call.role == "prefill" else 100.0)
        end = check_whole(await world.run(command(max_tokens=1)), command(max_tokens=1))
        assert end.completion.timings.exposed_transfer_s == 0 and end.completion.timings.decode_queue_s == 0
        assert asyncio.get_running_loop().time() < 1.0
        world.assert_idle()

    run_virtual(main)


@pytest.mark.parametrize("at", range(10))
def test_closing_the_stream_ends_every_leg(at: int) -> None:
    async def main() -> None:
        world = World(FLEET)
        async with aclosing(world.router.generate(command(), timeout_s=600)) as stream:
            for _ in range(at):
                await anext(stream)
        world.assert_idle()
        check_whole(await world.run(command()), command())

    run_virtual(main)


def test_cancelling_at_any_moment_ends_every_leg() -> None:
    async def main() -> None:
        for tick in range(0, 160, 3):
            world = World(FLEET)
            task = asyncio.create_task(world.run(command()))
            await asyncio.sleep(tick / 1000)
            task.cancel()
            await finished(task)
            world.assert_idle()

    run_virtual(main)


def test_the_deadline_is_one_typed_error_and_reaches_the_workers() -> None:
    async def main() -> None:
        for timeout_ms in range(1, 120, 7):
            world = World(FLEET)
            result = await finished(world.run(command(), timeout_s=timeout_ms / 1000))
            assert isinstance(result, DeadlineExceededError | list)
            assert all(call.timeout_s <= timeout_ms / 1000 + 1e-9 for call in world.workers.calls)
            world.assert_idle()

    run_virtual(main)


def test_a_slow_client_holds_its_workers_back() -> None:
    async def main() -> None:
        world = World(FLEET, pause=lambda call: 0.001)
        request = command(max_tokens=400)
        events: list[GenerateEvent] = []
        async with aclosing(world.router.generate(request, timeout_s=6000)) as stream:
            async for event in stream:
                events.append(event)
                await asyncio.sleep(1.0)
        check_whole(events, request)
        world.assert_idle()

    run_virtual(main)


def test_a_slow_client_is_not_taken_for_a_worker_that_does_not_accept() -> None:
    async def main() -> None:
        world = World(FLEET, pause=lambda call: 0.0, patience=Patience(accept_timeout_s=1.0))
        events: list[GenerateEvent] = []
        async with aclosing(world.router.generate(command(), timeout_s=6000)) as stream:
            async for event in stream:
                events.append(event)
                await asyncio.sleep(100.0)
        assert check_whole(events, command()).completion.path == "split"
        assert len(world.workers.calls) == 2

    run_virtual(main)


def test_a_bug_while_reading_a_worker_costs_a_try_and_tells_the_client_nothing() -> None:
    async def main() -> None:
        secret = RuntimeError("internal detail")
        world = World(FLEET, fault=first_call_fails("prefill", 0, secret))
        check_whole(await world.run(command()), command())
        hopeless = World(FLEET, fault=lambda call: Fault(0, secret))
        result = await finished(hopeless.run(command()))
        assert isinstance(result, InternalError) and "detail" not in result.message
        hopeless.assert_idle()

    run_virtual(main)


def test_phases_of_a_split_are_those_of_its_workers() -> None:
    async def main() -> None:
        world = World(FLEET, pause=lambda call: 1.0 if call.role == "prefill" else 0.25)
        found = check_whole(await world.run(command()), command()).completion.timings
        assert (found.prefill_queue_s, found.prefill_s) == pytest.approx((1.0, 1.0), abs=1e-3)
        assert (found.exposed_transfer_s, found.decode_queue_s) == pytest.approx((0.25, 0.25), abs=1e-3)
        assert found.ttft_s == pytest.approx(2.0, abs=1e-3)

    run_virtual(main)


def test_phases_of_a_fallback_count_the_failed_try_as_waiting() -> None:
    async def main() -> None:
        world = World(
            [worker("prefill"), worker("decode")], fault=first_call_fails("prefill", 1, WorkerLostError("killed")), pause=lambda call: 1.0
        )
        found = check_whole(await world.run(command()), command()).completion.timings
        assert found.prefill_queue_s == pytest.approx(3.0, abs=1e-3), "two for the failed try, one for the worker that took over"
        assert found.exposed_transfer_s == 0.0

    run_virtual(main)


def test_a_burst_is_spread_over_the_workers() -> None:
    async def main() -> None:
        world = World(FLEET)
        requests = [command(range(3 + n, 200 + n), seed=n) for n in range(8)]
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(world.run(request))
        for role in ("prefill", "decode"):
            for number in (0, 1):
                assert sum(call.worker_id == f"{role}-{number}" for call in world.workers.calls) == 4
        world.assert_idle()

    run_virtual(main)


async def _client(world: World, request: GenerateCommand, draw: random.Random) -> str:
    """One client with a temper; returns how its request ended."""
    events: list[GenerateEvent] = []
    leave_after = draw.choice([None, None, None, 0, 1, 2, 5])
    timeout_s = draw.choice([600.0, 600.0, 600.0, 0.005, 0.05, 1.0])
    slow_s = draw.choice([0.0, 0.0, 0.3])
    await asyncio.sleep(draw.random() * 0.05)
    try:
        async with aclosing(world.router.generate(request, timeout_s=timeout_s)) as stream:
            async for event in stream:
                events.append(event)
                if leave_after is not None and len(events) > leave_after:
                    break
                await asyncio.sleep(slow_s)
    except KvRelayError as error:
        check_tokens(events[1:], request)
        return error.reason
    if events and isinstance(events[-1], Completed):
        check_whole(events, request)
        return "whole"
    check_tokens(events[1:], request)
    return "left"


@pytest.mark.parametrize("seed", range(150))
def test_every_request_ends_whole_or_with_one_typed_error(seed: int) -> None:
    """Everything random: fleet, mode, failures, slowness, tempers of clients. The seed is the test's name."""
    draw = random.Random(seed)

    def fault(call: Call) -> Fault | None:
        return Fault(draw.randrange(12), some_error(draw)) if draw.random() < failing else None

    failing = draw.choice([0.0, 0.1, 0.3, 0.7])

    async def main() -> None:
        fleet = [worker("prefill", n) for n in range(draw.randrange(3))] + [worker("decode", n) for n in range(draw.randint(1, 3))]
        world = World(
            fleet,
            mode=draw.choice([Mode.SPLIT, Mode.SPLIT, Mode.HYBRID, Mode.COLOCATED]),
            fault=fault,
            pause=lambda call: draw.choice([0.0, 0.001, 0.02, 0.5]),
            limits=AdmissionLimits(max_in_flight=draw.choice([1, 3, 100]), max_waiting=draw.choice([0, 2, 100]), max_wait_s=5.0),
        )
        requests = [
            command(
                range(3, 3 + draw.choice([1, 16, 17, 250, 290])), max_tokens=draw.choice([1, 2, 9]), seed=n, ignore_eos=draw.random() < 0.5
            )
            for n in range(draw.randint(1, 8))
        ]
        tasks = [asyncio.create_task(_client(world, request, draw)) for request in requests]
        if draw.random() < 0.3:
            await asyncio.sleep(draw.random() * 0.2)
            draw.choice(tasks).cancel()
        ends = [await finished(task) for task in tasks]
        for end in ends:
            assert isinstance(end, str | asyncio.CancelledError), repr(end)
        if failing == 0.0:
            allowed = {"whole", "left", "DEADLINE_EXCEEDED", "OVERLOADED"}
            assert {end for end in ends if isinstance(end, str)} <= allowed
        world.assert_idle()

    run_virtual(main)


def test_the_model_of_these_tests_ends_early_at_times() -> None:
    """Or the simulation would never meet an end token."""
    lengths = {len(expected(command(max_tokens=9, seed=seed, ignore_eos=False))) for seed in range(60)}
    assert 1 in lengths and 9 in lengths
