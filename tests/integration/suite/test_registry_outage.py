"""Redis away for 15 s under load, then back and empty; then silent for a while: no request notices, and everybody is back in time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvrelay
from kvrelay.errors import KvRelayError, UnavailableError
from services.launcher.plan import ProcessSpec, router_processes
from tests.integration.suite.fault_kit import Wire, answers_rightly, at_rest, errors_logged, eventually, prompt_of, right_answer, running
from tests.suite import Suite

pytestmark = pytest.mark.timeout(300)

OUTAGE_S = 15.0
BACK_WITHIN_S = 10.0
SILENCE_S = 8.0
"""Longer than a registry entry lives."""
DISTINCT = 12
"""Prompts of the load: some split, some local, some cached."""


class Load:
    """Requests without a pause, each held against the right answer, until told to stop."""

    def __init__(self, suite: Suite, model: Path, workers: int = 2) -> None:
        self._suite, self._model, self._workers = suite, model, workers
        self._stopping = False
        self.answered = 0
        self.paths: set[str] = set()

    async def run(self) -> None:
        """Raises for the first request that fails."""
        async with asyncio.TaskGroup() as group:
            for worker in range(self._workers):
                group.create_task(self._ask(worker))

    async def _ask(self, number: int) -> None:
        while not self._stopping:
            number += self._workers
            seed = number % DISTINCT
            # A new salt now and then: nothing is cached for it.
            outcome = await answers_rightly(
                self._suite, self._model, prompt_of(20 + 20 * seed, seed), 6, within_s=20, cache_salt=str(number // 40)
            )
            self.answered += 1
            self.paths.add(outcome.path)

    async def goes_on(self, requests: int = 10) -> None:
        """Returns once that many more have been answered."""
        target = self.answered + requests

        async def reached() -> bool:
            return self.answered >= target

        await eventually(reached, 20, "the load goes on")

    def stop(self) -> None:
        self._stopping = True


def second_router(suite: Suite) -> ProcessSpec:
    (first,) = router_processes(suite.settings, suite.running.redis_url)
    flags = tuple("--worker-id=router-1" if flag.startswith("--worker-id=") else flag for flag in first.flags)
    return ProcessSpec("router-1", "router", flags)


async def serving(address: str) -> bool:
    """What a router's health says of it as a whole."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="kvrelay.inference.v1.RouterService")
        answer = await stub.Check(request, timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def knows(client: kvrelay.AsyncClient, *names: str) -> Callable[[], Awaitable[bool]]:
    async def check() -> bool:
        fleet = await client.fleet(timeout=5)
        ready = {worker.worker_id for worker in fleet.workers if worker.state == "ready"}
        return fleet.registry_connected and ready == set(names)

    return check


async def test_requests_go_on_while_redis_is_away_and_workers_come_back_with_it(tiny_model: Path) -> None:
    async with Suite(tiny_model, split_threshold_tokens=64) as suite, Wire() as stubs:
        load = Load(suite, tiny_model)
        async with running(load.run()) as loading:
            await load.goes_on()
            await asyncio.to_thread(suite.redis.stop)
            loop = asyncio.get_running_loop()
            gone_at = loop.time()

            # Who starts meanwhile comes up, and waits.
            await asyncio.gather(suite.start_worker("decode", 1), suite.supervisor.start([second_router(suite)]))
            async with kvrelay.AsyncClient(suite.address_of("router-1"), retry=None) as newcomer:
                assert not await serving(newcomer.target)
                assert isinstance(await _error_of(newcomer), UnavailableError)
                fleet = await newcomer.fleet()
                assert (fleet.registry_connected, fleet.workers) == (False, ())
                fleet = await suite.client.fleet()
                assert not fleet.registry_connected
                assert {worker.worker_id for worker in fleet.workers} == {"kvstore-0", "prefill-0", "decode-0"}
                await asyncio.sleep(max(0.0, gone_at + OUTAGE_S - loop.time()))
                assert suite.supervisor.child("router-1").returncode is None
                await load.goes_on()

                # Back, and empty: it knows nobody.
                await asyncio.to_thread(suite.redis.start)
                everybody = ("kvstore-0", "prefill-0", "decode-0", "decode-1")
                back_at = loop.time()
                for client in (newcomer, suite.client):
                    await eventually(knows(client, *everybody), back_at + BACK_WITHIN_S - loop.time(), "all are registered again")
                assert await serving(newcomer.target)
                await load.goes_on()

                # The prefix registry is back too: the newcomer knows what it was not there to see.
                prompt = prompt_of(20 + 20 * (DISTINCT - 1), DISTINCT - 1)
                await answers_rightly(suite, tiny_model, prompt)

                async def known_as_cached() -> bool:
                    stream = newcomer.generate(token_ids=prompt, max_tokens=6, ignore_eos=True)
                    answer = await stream.collect()
                    assert answer.token_ids == right_answer(tiny_model, prompt, 6)
                    return answer.completion.path == "local" and "uncached, under the threshold" in stream.decision

                await eventually(known_as_cached, BACK_WITHIN_S, "holders of prefixes are known again")

                # Silent: connections stay open, nothing answers, entries expire.
                suite.redis.pause()
                await asyncio.sleep(SILENCE_S)
                await load.goes_on()
                suite.redis.resume()
                back_at = loop.time()
                for client in (newcomer, suite.client):
                    await eventually(knows(client, *everybody), back_at + BACK_WITHIN_S - loop.time(), "all are registered again")

                # The worker that came during the outage carries the load alone.
                await suite.stop("decode-0", grace_s=20.0)
                await load.goes_on()
            load.stop()
            await loading
            loading.result()
        assert load.paths >= {"local", "split"}
        await suite.stop("router-1")
        await at_rest(suite, stubs)
        assert errors_logged(suite) == []


async def _error_of(client: kvrelay.AsyncClient) -> KvRelayError | None:
    try:
        await client.generate("a", max_tokens=1, timeout=10).collect()
    except KvRelayError as error:
        return error
    return None
