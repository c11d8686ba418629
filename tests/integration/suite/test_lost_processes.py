"""Processes that die, freeze or are told to stop while they serve: one typed error or the whole right answer, and nothing is kept."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

import kvrelay
from kvrelay.errors import DeadlineExceededError, DrainingError, KvRelayError, UnavailableError
from tests.integration.suite.fault_kit import (
    SLOW,
    Outcome,
    Wire,
    answers_rightly,
    ask,
    at_rest,
    errors_logged,
    eventually,
    in_the_middle,
    ledger,
    prompt_of,
    right_answer,
    running,
)
from tests.suite import Suite

pytestmark = pytest.mark.timeout(300)

LEASE_S = 3.0
LONG = 1200
"""Prompt tokens that take a slow worker a second or so."""


async def until_ready(suite: Suite, *names: str) -> None:
    """Waits until the router knows the present lives of these workers as ready."""

    async def known() -> bool:
        ready = {worker.worker_id: worker.address for worker in (await suite.client.fleet()).workers if worker.state == "ready"}
        return all(ready.get(name) == suite.address_of(name) for name in names)

    await eventually(known, 15, f"{names} are ready")


async def answers_split(suite: Suite, model: Path, seed: int) -> None:
    """A request goes over both workers again."""
    outcome = await answers_rightly(suite, model, prompt_of(64, seed))
    assert outcome.path == "split", outcome.decision


async def ended(suite: Suite, name: str) -> int:
    """The exit code of a process that is ending."""

    async def over() -> bool:
        return suite.supervisor.child(name).returncode is not None

    await eventually(over, 40, f"{name} has ended")
    code = suite.supervisor.child(name).returncode
    assert code is not None
    return code


def assert_right_so_far(outcome: Outcome, model: Path, prompt: Sequence[int]) -> None:
    """No wrong token was ever sent."""
    assert outcome.token_ids == right_answer(model, prompt, max(1, len(outcome.token_ids)))[: len(outcome.token_ids)]


async def test_prefill_killed_during_prefill(tiny_model: Path) -> None:
    async with Suite(tiny_model, mode="split", lease_ttl_s=LEASE_S, **SLOW) as suite, Wire() as stubs:
        prompts = [prompt_of(LONG, seed) for seed in (1, 2)]
        async with running(asyncio.gather(*(ask(suite, prompt) for prompt in prompts))) as asking:
            await in_the_middle(stubs, suite.address_of("prefill-0"), 2 * LONG)
            suite.kill("prefill-0")
            outcomes = await asking
        for outcome, prompt in zip(outcomes, prompts, strict=True):
            assert (outcome.error, outcome.path) == (None, "fallback"), outcome.decision
            assert outcome.token_ids == right_answer(tiny_model, prompt, 8)
        await ended(suite, "prefill-0")
        await at_rest(suite, stubs, LEASE_S)
        outcome = await answers_rightly(suite, tiny_model, prompt_of(64, seed=3))
        assert outcome.path in ("local", "fallback")
        await at_rest(suite, stubs)

        await asyncio.gather(suite.restart("prefill-0"), suite.start_worker("prefill", 1))
        await until_ready(suite, "prefill-0", "prefill-1")
        await answers_split(suite, tiny_model, seed=4)

        # With another prefill worker, that one takes over: still a split.
        prompt = prompt_of(LONG, seed=5)
        async with running(ask(suite, prompt)) as asking:
            victim = await _busy(suite, stubs, ["prefill-0", "prefill-1"])
            suite.kill(victim)
            outcome = await asking
        assert (outcome.error, outcome.path) == (None, "split"), outcome.decision
        assert outcome.token_ids == right_answer(tiny_model, prompt, 8)
        await ended(suite, victim)
        await at_rest(suite, stubs, LEASE_S)
        await answers_rightly(suite, tiny_model, prompt_of(64, seed=6))
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def _busy(suite: Suite, stubs: Wire, names: Sequence[str]) -> str:
    """The worker that computes or generates something."""

    async def find() -> str:
        for name in names:
            load = (await ledger(stubs, suite.address_of(name))).worker.load
            if load.prefill_backlog_tokens or load.running:
                return name
        return ""

    found: str = await eventually(find, 20, f"one of {names} is busy")
    return found


async def test_decode_killed_or_frozen(tiny_model: Path) -> None:
    async with Suite(tiny_model, mode="split", store=False, lease_ttl_s=LEASE_S, **SLOW) as suite, Wire() as stubs:
        # During the hand-over, with nobody to take over: one typed error; prefill frees what it held.
        prompt = prompt_of(LONG, seed=1)
        async with running(ask(suite, prompt)) as asking:
            await in_the_middle(stubs, suite.address_of("prefill-0"), LONG)
            suite.kill("decode-0")
            outcome = await asking
        assert isinstance(outcome.error, UnavailableError), outcome
        await ended(suite, "decode-0")
        await at_rest(suite, stubs, LEASE_S + 1)
        assert isinstance((await ask(suite, prompt_of(64, seed=2))).error, UnavailableError)
        await at_rest(suite, stubs, LEASE_S + 1)

        await asyncio.gather(suite.restart("decode-0"), suite.start_worker("decode", 1))
        await until_ready(suite, "decode-0", "decode-1")
        await answers_split(suite, tiny_model, seed=3)

        # In the middle of the answer, with another: it goes on there, and no token comes twice or is lost. First frozen, then killed.
        for seed, fault in ((4, signal.SIGSTOP), (6, signal.SIGKILL)):
            prompt = prompt_of(100, seed)
            async with suite.client.generate(token_ids=prompt, max_tokens=150, ignore_eos=True) as stream:
                for _ in range(10):
                    await anext(stream)
                victim = await _busy(suite, stubs, ["decode-0", "decode-1"])
                suite.signal(victim, fault)
                answer = await asyncio.wait_for(stream.collect(), 40)
            assert answer.token_ids == right_answer(tiny_model, prompt, 150)
            assert answer.completion.path == "fallback", stream.decision
            assert answer.completion.usage.completion_tokens == 150
            if fault is signal.SIGSTOP:
                suite.signal(victim, signal.SIGCONT)
                await at_rest(suite, stubs, LEASE_S + 1)
                await until_ready(suite, "decode-0", "decode-1")
        await ended(suite, victim)
        await at_rest(suite, stubs, LEASE_S + 1)
        await answers_rightly(suite, tiny_model, prompt_of(64, seed=5))
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def test_prefill_frozen(tiny_model: Path) -> None:
    environ = {"KVRELAY_ACCEPT_TIMEOUT_S": "2"}
    async with Suite(tiny_model, mode="split", lease_ttl_s=LEASE_S, environ=environ, **SLOW) as suite, Wire() as stubs:
        # Frozen in the middle of a prompt: the hand-over falls silent, and the answer is computed where it is decoded.
        prompt = prompt_of(LONG, seed=1)
        async with running(ask(suite, prompt)) as asking:
            await in_the_middle(stubs, suite.address_of("prefill-0"), LONG)
            suite.signal("prefill-0", signal.SIGSTOP)
            # Frozen before it accepts: the next one does not wait for long either, and a deadline holds all the same.
            second, third = await asyncio.gather(
                ask(suite, prompt_of(64, seed=2)), ask(suite, prompt_of(64, seed=3), timeout=0.5), return_exceptions=True
            )
            assert not isinstance(second, BaseException) and not isinstance(third, BaseException)
            outcome = await asking
        assert (outcome.error, outcome.path) == (None, "fallback"), outcome.decision
        assert outcome.token_ids == right_answer(tiny_model, prompt, 8)
        assert (second.error, second.token_ids) == (None, right_answer(tiny_model, prompt_of(64, seed=2), 8))
        assert third.error is None or isinstance(third.error, DeadlineExceededError)
        await at_rest(suite, stubs, without=["prefill-0"])

        suite.signal("prefill-0", signal.SIGCONT)
        await at_rest(suite, stubs, LEASE_S)
        await until_ready(suite, "prefill-0")
        await answers_split(suite, tiny_model, seed=4)
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def test_a_worker_that_drains_finishes_what_it_has(tiny_model: Path) -> None:
    async with Suite(tiny_model, mode="split", drain_grace_s=30.0, **SLOW) as suite, Wire() as stubs:
        prompt = prompt_of(LONG, seed=1)
        async with running(ask(suite, prompt)) as asking:
            await in_the_middle(stubs, suite.address_of("prefill-0"), LONG)
            suite.signal("prefill-0", signal.SIGTERM)
            # Whether this one still meets the worker's open door does not matter.
            await answers_rightly(suite, tiny_model, prompt_of(64, seed=2))
            outcome = await asking
        assert (outcome.error, outcome.path) == (None, "split"), outcome.decision
        assert outcome.token_ids == right_answer(tiny_model, prompt, 8)
        assert await ended(suite, "prefill-0") == 0
        assert (await answers_rightly(suite, tiny_model, prompt_of(64, seed=6))).path == "local"
        await at_rest(suite, stubs)

        await suite.start_worker("decode", 1)
        await until_ready(suite, "decode-0", "decode-1")
        prompt = prompt_of(100, seed=3)
        async with suite.client.generate(token_ids=prompt, max_tokens=150, ignore_eos=True) as stream:
            for _ in range(10):
                await anext(stream)
            drained = await _busy(suite, stubs, ["decode-0", "decode-1"])
            suite.signal(drained, signal.SIGTERM)
            await answers_rightly(suite, tiny_model, prompt_of(64, seed=4))
            answer = await stream.collect()
        assert answer.token_ids == right_answer(tiny_model, prompt, 150)
        assert answer.completion.path == "local", stream.decision
        assert await ended(suite, drained) == 0
        await at_rest(suite, stubs)
        await answers_rightly(suite, tiny_model, prompt_of(64, seed=5))
        assert errors_logged(suite) == []


async def test_a_router_that_drains_or_dies(tiny_model: Path) -> None:
    async with Suite(tiny_model, mode="split", store=False, drain_grace_s=30.0, **SLOW) as suite, Wire() as stubs:
        prompts = [prompt_of(200, seed) for seed in range(3)]
        async with running(asyncio.gather(*(ask(suite, prompt, 30) for prompt in prompts))) as asking:
            await eventually(lambda: _in_flight(suite, 3), 20, "all are in flight")
            suite.signal("router-0", signal.SIGTERM)
            async with kvrelay.AsyncClient(suite.address, retry=None) as late:
                refused = await eventually(lambda: _refused(late), 5, "new requests are refused")
            outcomes = await asking
        assert isinstance(refused, DrainingError) or type(refused) is UnavailableError
        for outcome, prompt in zip(outcomes, prompts, strict=True):
            assert (outcome.error, outcome.token_ids) == (None, right_answer(tiny_model, prompt, 30))
        assert await ended(suite, "router-0") == 0
        await at_rest(suite, stubs)

        await suite.restart("router-0")
        await until_ready(suite, "prefill-0", "decode-0")
        await answers_split(suite, tiny_model, seed=10)

        # Killed: the client gets one typed error, and the workers notice that nobody listens any more.
        prompt = prompt_of(LONG, seed=11)
        async with running(ask(suite, prompt, 30)) as asking:
            await in_the_middle(stubs, suite.address_of("prefill-0"), LONG)
            suite.kill("router-0")
            outcome = await asking
        assert isinstance(outcome.error, UnavailableError)
        assert_right_so_far(outcome, tiny_model, prompt)
        await ended(suite, "router-0")
        await at_rest(suite, stubs)
        await suite.restart("router-0")
        await until_ready(suite, "prefill-0", "decode-0")
        await answers_split(suite, tiny_model, seed=12)
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def _in_flight(suite: Suite, count: int) -> bool:
    return (await suite.client.fleet()).in_flight == count


async def _refused(client: kvrelay.AsyncClient) -> KvRelayError | None:
    try:
        await client.generate("a", max_tokens=1, timeout=5).collect()
    except KvRelayError as error:
        return error
    return None
