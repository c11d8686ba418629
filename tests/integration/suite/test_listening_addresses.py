"""Workers that listen on every address, and a suite on IPv6 from Redis to client."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from services.runtime.registry.embedded_redis import EmbeddedRedis
from tests.integration.suite.fault_kit import answers_rightly, prompt_of
from tests.suite import Suite


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


async def registered(suite: Suite, worker_id: str) -> str:
    """The address of a worker, as the router was told once it was."""
    async with asyncio.timeout(60):
        while True:
            for worker in (await suite.client.fleet()).workers:
                if worker.worker_id == worker_id:
                    return worker.address
            await asyncio.sleep(0.05)


async def start_listening_on(suite: Suite, role: str, host: str) -> str:
    spec = suite.spec(f"{role}-0")
    flags = tuple(f"--host={host}" if flag.startswith("--host=") else flag for flag in spec.flags if not flag.startswith("--worker-id="))
    (ready,) = await suite.supervisor.start([replace(spec, name=f"{role}-everywhere", flags=(*flags, f"--worker-id={role}-everywhere"))])
    return ready.address


async def test_a_wildcard_is_never_registered(tiny_model: Path) -> None:
    async with Suite(tiny_model, mode="split") as suite:
        for role in ("prefill", "decode"):
            address = await start_listening_on(suite, role, "0.0.0.0")
            assert address.startswith("127.0.0.1:")
            assert await registered(suite, f"{role}-everywhere") == address
            await suite.stop(f"{role}-0")
        await answers_rightly(suite, tiny_model, prompt_of(100, 1))


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_a_suite_on_ipv6_answers(tiny_model: Path) -> None:
    with EmbeddedRedis(host="::1") as redis:
        async with Suite(tiny_model, mode="split", host="::", redis_url=redis.url, traces=True) as suite:
            assert suite.address.startswith("[::1]:")
            for role, host in (("prefill", "::"), ("decode", "::1")):
                address = await start_listening_on(suite, role, host)
                assert address.startswith("[::1]:")
                assert await registered(suite, f"{role}-everywhere") == address
                await suite.stop(f"{role}-0")
            await answers_rightly(suite, tiny_model, prompt_of(100, 1))
