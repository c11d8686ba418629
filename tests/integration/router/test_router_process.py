"""`python -m services.router` as a process: its fleet comes from a real Redis, and neither is needed for it to start."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvrelay
from kvrelay.errors import KvRelayError, NoWorkerError
from kvrelay.values import SamplingParams, StopConditions
from services.runtime.ports import WorkerLoad
from services.runtime.registry.workers import RedisRegistry
from tests.integration.router.router_kit import scene
from tests.simulation.router_world import answer_of, worker

ROOT = Path(__file__).resolve().parents[3]
NOWHERE = "redis://127.0.0.1:1/0"
PROMPT = tuple(range(3, 40))


@dataclass
class RouterProcess:
    process: asyncio.subprocess.Process
    ready: dict[str, Any]

    @property
    def address(self) -> str:
        return str(self.ready["address"])

    async def serving(self, name: str) -> bool:
        async with grpc.aio.insecure_channel(self.address) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            except grpc.aio.AioRpcError:
                return False
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def until_serving(self, name: str, serving: bool = True) -> None:
        async with asyncio.timeout(30):
            while await self.serving(name) is not serving:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)

    async def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            return await self.process.wait()


@asynccontextmanager
async def router_process(redis_url: str, *flags: str) -> AsyncIterator[RouterProcess]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", "--port=0", f"--redis-url={redis_url}", "--drain-grace-s=5", "--debug", *flags,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            line = await process.stdout.readline()
        yield RouterProcess(process, json.loads(line))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_router_without_redis_starts_is_not_ready_says_why_and_stops() -> None:
    async with router_process(NOWHERE) as router, kvrelay.AsyncClient(router.address, retry=None) as client:
        assert router.ready["role"] == "router"
        assert not await router.serving("") and not await router.serving("kvrelay.inference.v1.RouterService")
        with pytest.raises(NoWorkerError):
            await client.generate([3, 4, 5], max_tokens=2, timeout=10).collect()
        fleet = await client.fleet(timeout=10)
        assert not fleet.registry_connected and fleet.workers == ()
        assert await router.stop() == 0


async def test_a_wrong_setting_ends_the_process_with_one_line() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.router", "--mode=both", cwd=ROOT, stderr=asyncio.subprocess.PIPE, env={"PATH": os.environ["PATH"]}
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert stderr.decode().count("\n") == 1 and "--mode" in stderr.decode()


async def test_workers_come_through_redis_and_requests_go_on_when_it_is_gone(redis_server: Any) -> None:
    prefix = [worker("prefill"), worker("decode")]
    async with scene(prefix, announce=False) as workers, router_process(redis_server.url, "--mode=split") as router:
        await router.until_serving("")
        assert not await router.serving("model:tiny")
        registry = RedisRegistry(redis_server.url, ttl_s=600.0)
        try:
            for info in workers.infos:
                await registry.register(info)
        finally:
            await registry.close()
        await router.until_serving("model:tiny")
        right = answer_of(PROMPT, SamplingParams(seed=7), StopConditions(6, ignore_eos=True))
        async with kvrelay.AsyncClient(router.address) as client:

            async def ask() -> kvrelay.Completion:
                found = await client.generate(list(PROMPT), max_tokens=6, seed=7, ignore_eos=True, timeout=20).collect()
                assert list(found.token_ids) == right
                return found.completion

            assert (await ask()).path == "split"
            redis_server.kill()
            async with asyncio.timeout(30):
                while (await client.fleet()).registry_connected:  # noqa: ASYNC110 - another process
                    await asyncio.sleep(0.1)
            assert (await ask()).path == "split"
            workers_seen = (await client.fleet()).workers
            assert [found.worker_id for found in workers_seen] == ["decode-0", "prefill-0"]
        assert await router.stop() == 0


async def test_sigterm_lets_a_running_request_end(redis_server: Any) -> None:
    async with scene([worker("decode")], announce=False, pause=lambda call: 0.1) as workers, router_process(redis_server.url) as router:
        registry = RedisRegistry(redis_server.url, ttl_s=600.0)
        try:
            await registry.register(replace(workers.infos[0], load=WorkerLoad(total_pages=64, available_pages=64)))
        finally:
            await registry.close()
        await router.until_serving("model:tiny")
        async with kvrelay.AsyncClient(router.address, retry=None) as client:
            stream = client.generate(list(PROMPT), max_tokens=12, seed=7, ignore_eos=True, timeout=30)
            await anext(stream)
            stopping = asyncio.create_task(router.stop())
            rest = [token.token_id async for token in stream]
            assert len(rest) == 11
            assert await stopping == 0
            with pytest.raises(KvRelayError):
                await client.generate(list(PROMPT), max_tokens=1, timeout=2).collect()
