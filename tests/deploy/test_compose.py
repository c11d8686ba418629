"""The compose file: valid by Compose's own parser, the same settings as the local launcher, and commands that really serve."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

import kvrelay
from services.kvstore.__main__ import StoreSettings
from services.launcher.child import Child, child_environ
from services.launcher.plan import router_processes, store_processes, worker_processes
from services.launcher.settings import SuiteSettings
from services.launcher.suite import wait_until_answering
from services.router.settings import RouterSettings
from services.runtime.processes.settings import parse_settings
from services.runtime.registry.embedded_redis import EmbeddedRedis
from services.runtime.telemetry.otlp_receiver import OtlpReceiver
from services.worker.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
ROLES = ("kvstore", "prefill", "decode", "router")
PLACES = {"host", "port", "redis_url", "store_address", "otlp_endpoint", "worker_id", "advertise", "model_name", "cache_dir", "cpu"}
"""Settings that differ between a laptop and containers by their nature."""


def compose(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = Path(sys.executable).with_name("docker-compose")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVRELAY_")} | variables
    return subprocess.run(
        [str(command), "-f", str(COMPOSE), *args], env=environ, capture_output=True, text=True, check=False, timeout=60
    )  # fmt: skip


@functools.cache
def services(model: str = "smollm2", dtype: str = "bfloat16") -> dict[str, Any]:
    """The services as Compose itself understands them, variables filled in."""
    done = compose("config", "--format", "json", KVRELAY_MODEL=model, KVRELAY_DTYPE=dtype)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)["services"]
    return found


def settings_of(role: str) -> dict[str, str]:
    """A service's settings by name: 'KVRELAY_MAX_NUM_SEQS' is 'max_num_seqs'."""
    environ = services()[role]["environment"]
    return {name.removeprefix("KVRELAY_").lower(): str(value) for name, value in environ.items() if name.startswith("KVRELAY_")}


def planned(role: str) -> dict[str, str]:
    """What the local launcher tells a service, by setting name."""
    suite = SuiteSettings()
    specs = [*store_processes(suite, ""), *worker_processes(suite, "", "", ()), *router_processes(suite, "")]
    flags = next(spec.flags for spec in specs if spec.role == role)
    pairs = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name.replace("-", "_"): value for name, _, value in pairs}


def test_compose_itself_accepts_the_file() -> None:
    done = compose("config", "-q")
    assert done.returncode == 0, done.stderr
    assert set(services()) == {*ROLES, "valkey", "otel-collector", "jaeger"}


@pytest.mark.parametrize("role", ROLES)
def test_containers_and_launcher_have_the_same_settings(role: str) -> None:
    ours, theirs = planned(role), settings_of(role)
    compared = (ours.keys() | theirs.keys()) - PLACES
    as_numbers = {name: (_plain(ours.get(name)), _plain(theirs.get(name))) for name in compared}
    assert {name: pair for name, pair in as_numbers.items() if pair[0] != pair[1]} == {}


def _plain(value: str | None) -> str | None:
    try:
        return f"{float(value):g}" if value is not None else None
    except ValueError:
        return value


SETTINGS: Mapping[str, Any] = {"kvstore": StoreSettings, "prefill": WorkerSettings, "decode": WorkerSettings, "router": RouterSettings}


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_of_container_and_launcher_is_one_the_service_takes(role: str) -> None:
    known = {field.name for field in fields(SETTINGS[role])}
    assert settings_of(role).keys() <= known
    parse_settings(SETTINGS[role], [], services()[role]["environment"])
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in planned(role).items()]
    parse_settings(SETTINGS[role], flags, {})


@pytest.mark.parametrize("role", ROLES)
def test_each_service_is_checked_for_health_where_it_listens_and_stops_gently(role: str) -> None:
    service = services()[role]
    assert service["healthcheck"]["test"][-1] == f"127.0.0.1:{settings_of(role)['port']}"
    grace_s = float(settings_of(role)["drain_grace_s"])
    assert float(str(service["stop_grace_period"]).removesuffix("s")) > grace_s
    assert service["build"]["target"] == role


def test_the_collector_passes_spans_on_to_jaeger() -> None:
    config = yaml.safe_load((ROOT / "deploy" / "otel-collector.yaml").read_text(encoding="utf-8"))
    pipeline = config["service"]["pipelines"]["traces"]
    assert set(pipeline["receivers"]) <= set(config["receivers"])
    assert set(pipeline["exporters"]) <= set(config["exporters"])
    assert set(pipeline["processors"]) <= set(config["processors"])
    port = config["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert settings_of("router")["otlp_endpoint"] == f"http://otel-collector:{port}"
    assert config["exporters"]["otlp/jaeger"]["endpoint"].partition(":")[0] in services()


class Containers:
    """The file's commands as local processes: the same settings, host names and ports mapped to this machine."""

    def __init__(self, model: Path, redis_url: str, otlp_endpoint: str, logs: Path) -> None:
        self._services = services(str(model), "float32")
        self._logs = logs
        self._hosts = {"redis://valkey:6379/0": redis_url, "http://otel-collector:4317": otlp_endpoint}
        self.addresses: dict[str, str] = {}

    def environ(self, role: str) -> dict[str, str]:
        mapped = {name: self._hosts.get(str(value), str(value)) for name, value in self._services[role]["environment"].items()}
        here = {"KVRELAY_HOST": "127.0.0.1", "KVRELAY_PORT": "0", "KVRELAY_ADVERTISE": "", "KVRELAY_KV_CACHE_MIB": "8"}
        return child_environ({**os.environ, **mapped, **here})

    @asynccontextmanager
    async def running(self, role: str) -> AsyncIterator[Child]:
        argv = [sys.executable, *self._services[role]["command"][1:], "--exit-with-parent"]
        child = await Child.spawn(role, argv, self.environ(role), self._logs / f"{role}.log")
        try:
            ready = await child.ready(90)
            self.addresses[role] = ready.address
            self._hosts[f"{role}:{settings_of(role)['port']}"] = ready.address
            yield child
        finally:
            child.terminate()
            try:
                async with asyncio.timeout(30):
                    await child.wait()
            finally:
                child.kill()

    async def healthy(self, role: str) -> bool:
        """The container's own health check."""
        _, program, *arguments = self._services[role]["healthcheck"]["test"]
        assert program == "python"
        argv = [sys.executable, *arguments[:-1], self.addresses[role]]
        process = await asyncio.create_subprocess_exec(*argv, env=child_environ(os.environ))
        return await process.wait() == 0


async def test_the_commands_of_the_file_serve_a_model(tiny_model: Path, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        receiver = await stack.enter_async_context(OtlpReceiver())
        containers = Containers(tiny_model, redis.url, receiver.endpoint, tmp_path)
        children = [await stack.enter_async_context(containers.running(role)) for role in started_order()]
        address = containers.addresses["router"]
        assert await wait_until_answering(address, 60) == "smollm2-135m-instruct"
        assert await containers.healthy("router")
        assert await containers.healthy("decode")
        async with kvrelay.AsyncClient(address) as client:
            stream = client.generate(token_ids=[5 + i % 200 for i in range(300)], max_tokens=4, ignore_eos=True)
            tokens = [token async for token in stream]
        assert len(tokens) == 4
        completion = stream.completion
        assert completion is not None
        assert completion.path == "split"
        await receiver.wait_for_trace(completion.trace_id, lambda spans: any(span.name == "kv.transfer" for span in spans), 10)
        assert all(child.returncode is None for child in children)
    assert [child.returncode for child in children] == [0] * len(children)


def started_order() -> list[str]:
    """The roles, each after what it depends on."""
    needs: Mapping[str, set[str]] = {role: set(services()[role]["depends_on"]) & set(ROLES) for role in ROLES}
    order: list[str] = []
    while len(order) < len(ROLES):
        order.append(next(role for role in ROLES if role not in order and needs[role] <= set(order)))
    return order
