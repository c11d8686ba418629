"""A whole suite of real processes for a test.

    async with Suite(tiny_model, prefill=1, decode=1) as suite:
        async for token in suite.client.generate("text", max_tokens=4): ...
        suite.kill("prefill-0")

Processes are never restarted unless `max_restarts` says so: a test that kills one sees what the others do.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import kvrelay
from services.launcher.plan import ProcessSpec, worker_processes
from services.launcher.settings import SuiteSettings
from services.launcher.suite import RunningSuite, running_suite
from services.launcher.supervisor import Supervisor
from services.runtime.registry.embedded_redis import EmbeddedRedis
from services.runtime.telemetry.otlp_receiver import OtlpReceiver

TEST_DEFAULTS: Mapping[str, Any] = {
    "port": 0,
    "kv_cache_mib": 8,
    "store_mib": 16,
    "dtype": "float32",
    "pin": False,
    "max_restarts": 0,
    "lease_ttl_s": 3.0,
    "drain_grace_s": 5.0,
    "start_timeout_s": 90.0,
    "debug": True,
}


class Suite:
    """`async with Suite(model_folder, **settings)`: see `services.launcher.settings.SuiteSettings` for the settings.

    `traces=True` starts an OTLP receiver in this process (`suite.otlp`) and has every service send its spans there. `environ`
    is added to the services' environment. On leaving, every process has ended; when the body fails, the logs' ends are printed.
    """

    client: kvrelay.AsyncClient

    def __init__(self, model: Path | str, *, traces: bool = False, environ: Mapping[str, str] | None = None, **settings: Any) -> None:
        self.settings = SuiteSettings(**{**TEST_DEFAULTS, "model": str(model), **settings})
        self._environ = {**os.environ, **(environ or {})}
        self._traces = traces
        self._exit = contextlib.AsyncExitStack()
        self.otlp: OtlpReceiver | None = None
        self.reports: list[str] = []
        """What the launcher said."""

    async def __aenter__(self) -> Self:
        try:
            if self._traces:
                self.otlp = await self._exit.enter_async_context(OtlpReceiver())
                self.settings = replace(self.settings, otlp_endpoint=self.otlp.endpoint)
            self._running = await self._exit.enter_async_context(running_suite(self.settings, self._environ, self.reports.append))
            self.client = await self._exit.enter_async_context(kvrelay.AsyncClient(self.address))
        except BaseException as error:
            _print_log(getattr(error, "log_tail", ""))
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc: Any) -> None:
        if exc[0] is not None and issubclass(exc[0], Exception):
            for name in self.supervisor.names:
                print(f"--- {name}\n{self.supervisor.child(name).tail()}")
        await self._exit.__aexit__(*exc)

    @property
    def running(self) -> RunningSuite:
        return self._running

    @property
    def address(self) -> str:
        """host:port of the router."""
        return self._running.address

    @property
    def supervisor(self) -> Supervisor:
        return self._running.supervisor

    @property
    def redis(self) -> EmbeddedRedis:
        """The suite's own Redis; stop, pause or restart it at will."""
        assert self._running.redis is not None, "this suite uses somebody else's Redis"
        return self._running.redis

    @property
    def names(self) -> list[str]:
        """'kvstore-0', 'prefill-0', 'decode-0', 'router-0', ... as far as they were started."""
        return self.supervisor.names

    def address_of(self, name: str) -> str:
        """host:port of a process, such as 'decode-0'."""
        return self.supervisor.ready(name).address

    def pid(self, name: str) -> int:
        return self.supervisor.child(name).pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal: SIGSTOP freezes a process, SIGCONT goes on, SIGTERM drains it."""
        os.kill(self.pid(name), number)

    def kill(self, name: str) -> None:
        """SIGKILL: the process gets no chance to say anything."""
        self.signal(name, signal.SIGKILL)

    async def stop(self, name: str, grace_s: float = 5.0) -> None:
        """Drains one process and waits for its end."""
        await self.supervisor.stop_one(name, grace_s)

    async def start_worker(self, role: str, index: int, **settings: Any) -> str:
        """Starts one more worker (or one that ended), with other settings if given (`model=other_folder`); returns its name."""
        changed = replace(self.settings, **{**settings, "mode": "hybrid", role: index + 1})
        specs = worker_processes(changed, self._running.redis_url, self._running.store_address, ())
        spec = next(spec for spec in specs if spec.name == f"{role}-{index}")
        await self.supervisor.start([spec])
        return spec.name

    async def restart(self, name: str) -> None:
        """Starts a process again that ended: a new life under the old name and, for router and store, the old port."""
        await self.supervisor.start([self.spec(name)])

    def spec(self, name: str) -> ProcessSpec:
        return self.supervisor.spec(name)

    def log(self, name: str) -> str:
        """All a process has logged."""
        return (self.supervisor.log_dir / f"{name}.log").read_text(encoding="utf-8", errors="replace")


def _print_log(tail: str) -> None:
    if tail:
        print(f"--- log\n{tail}")
