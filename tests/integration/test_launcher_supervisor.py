"""The supervisor with small stand-ins for services: real processes, real signals, nothing heavy."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.launcher.child import Child
from services.launcher.errors import StartError
from services.launcher.plan import ProcessSpec
from services.launcher.supervisor import RestartPolicy, Supervisor, supervising

STAND_IN = """
import json, os, signal, socket, sys, time
flags = dict(flag.lstrip("-").split("=", 1) for flag in sys.argv[2:] if "=" in flag)
role = sys.argv[1]
def note(what):
    with open(flags["journal"], "a") as journal:
        journal.write(f"{what} {flags['name']}\\n")
def on_term(number, frame):
    note("term")
    if "stubborn" not in flags:
        sys.exit(0)
signal.signal(signal.SIGTERM, on_term)
note("start")
if "fails" in flags:
    sys.exit(f"no such thing: {flags['fails']}")
server = socket.create_server(("127.0.0.1", int(flags["port"])))
if "silent" not in flags:
    print("not json"); print(json.dumps({"event": "ready", "role": role, "worker_id": flags["name"],
        "address": "127.0.0.1:%d" % server.getsockname()[1]}), flush=True)
while True:
    time.sleep(60)
"""


class Bench:
    """Makes specs of stand-ins and reads what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "stand_in.py"
        self.script.write_text(STAND_IN)
        self.journal = folder / "journal"
        self.reports: list[str] = []

    def command(self, role: str, flags: Sequence[str]) -> list[str]:
        return [sys.executable, "-S", "-E", str(self.script), role, *flags]

    def spec(self, role: str, *extra: str, keeps_port: bool = False) -> ProcessSpec:
        return ProcessSpec(f"{role}-0", role, (f"--name={role}-0", "--port=0", f"--journal={self.journal}", *extra), keeps_port)

    def noted(self, what: str) -> list[str]:
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        return [line.split()[1] for line in lines if line.startswith(what)]

    @asynccontextmanager
    async def supervising(
        self, *, max_restarts: int = 0, grace_s: float = 10.0, start_timeout_s: float = 20.0
    ) -> AsyncIterator[Supervisor]:
        policy = RestartPolicy(max_restarts=max_restarts, first_delay_s=0.01, max_delay_s=0.02)
        async with supervising(
            os.environ,
            self.folder / "logs",
            policy=policy,
            start_timeout_s=start_timeout_s,
            grace_s=grace_s,
            threads=1,
            report=self.reports.append,
            command=self.command,
        ) as supervisor:
            yield supervisor


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_leaving_drains_role_after_role_and_leaves_nothing(bench: Bench) -> None:
    async with bench.supervising() as supervisor:
        ready = await supervisor.start([bench.spec(role) for role in ("kvstore", "prefill", "decode", "router")])
        pids = [supervisor.child(name).pid for name in supervisor.names]
        assert [r.role for r in ready] == ["kvstore", "prefill", "decode", "router"]
    assert bench.noted("term") == ["router-0", "decode-0", "prefill-0", "kvstore-0"]
    assert not any(alive(pid) for pid in pids)


async def test_a_service_that_cannot_start_is_named_with_its_log_and_the_others_end(bench: Bench) -> None:
    pids = []
    with pytest.raises(StartError, match="prefill-0 exited with code 1 before it was ready") as failure:
        async with bench.supervising() as supervisor:
            await supervisor.start([bench.spec("kvstore")])
            pids.append(supervisor.child("kvstore-0").pid)
            await supervisor.start([bench.spec("prefill", "--fails=weights"), bench.spec("decode")])
    assert "no such thing: weights" in failure.value.log_tail
    assert not any(alive(pid) for pid in pids)


async def test_a_service_that_never_gets_ready_is_given_up(bench: Bench) -> None:
    with pytest.raises(StartError, match=r"decode-0 was not ready within 0\.3 s"):
        async with bench.supervising(start_timeout_s=0.3) as supervisor:
            await supervisor.start([bench.spec("decode", "--silent=1")])


async def test_a_service_that_dies_is_reported_and_started_again_on_its_port(bench: Bench) -> None:
    async with bench.supervising(max_restarts=3) as supervisor:
        (first,) = await supervisor.start([bench.spec("router", keeps_port=True)])
        os.kill(supervisor.child("router-0").pid, signal.SIGKILL)
        await until(lambda: any("is back at" in report for report in bench.reports))
        assert supervisor.ready("router-0").address == first.address
    assert any("router-0 was killed by SIGKILL" in report for report in bench.reports)


async def test_a_service_that_keeps_dying_is_given_up(bench: Bench) -> None:
    async with bench.supervising(max_restarts=2) as supervisor:
        await supervisor.start([bench.spec("decode")])
        for life in range(3):
            await until(lambda life=life: len(bench.noted("start")) == life + 1 and supervisor.child("decode-0").returncode is None)
            child = supervisor.child("decode-0")
            os.kill(child.pid, signal.SIGKILL)
            await until(lambda child=child: child.returncode is not None)
        error = await supervisor.failure
    assert "decode-0 was killed by SIGKILL; giving up" in error.message
    assert len(bench.noted("start")) == 3


async def test_who_does_not_drain_in_time_is_killed(bench: Bench) -> None:
    async with bench.supervising(grace_s=0.3) as supervisor:
        await supervisor.start([bench.spec("router", "--stubborn=1"), bench.spec("decode")])
        pids = [supervisor.child(name).pid for name in supervisor.names]
    assert not any(alive(pid) for pid in pids)
    assert any("router-0 did not stop" in report for report in bench.reports)


async def test_an_exception_inside_arrives_as_itself_and_kills_at_once(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        async with bench.supervising(grace_s=60) as supervisor:
            await supervisor.start([bench.spec("router", "--stubborn=1")])
            pid = supervisor.child("router-0").pid
            raise ZeroDivisionError
    assert not alive(pid)


async def test_one_process_can_be_stopped_and_started_again(bench: Bench) -> None:
    async with bench.supervising() as supervisor:
        await supervisor.start([bench.spec("kvstore", keeps_port=True), bench.spec("decode")])
        address = supervisor.ready("kvstore-0").address
        await supervisor.stop_one("kvstore-0", 10.0)
        assert supervisor.child("kvstore-0").returncode == 0
        await supervisor.start([supervisor.spec("kvstore-0")])
        assert supervisor.ready("kvstore-0").address == address
    assert bench.reports == []


async def test_ending_a_process_that_has_just_ended_leaves_its_exit_code_to_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    collect, may_collect = os.waitpid, threading.Event()

    def collected_late(pid: int, options: int) -> tuple[int, int]:
        may_collect.wait(20)
        return collect(pid, options)

    monkeypatch.setattr(os, "waitpid", collected_late)  # asyncio's look at its children
    child = await Child.spawn("short", [sys.executable, "-S", "-E", "-c", "raise SystemExit(3)"], os.environ, tmp_path / "short.log")
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 - the loop must not see it first
    assert child.returncode is None
    child.terminate()
    child.kill()
    may_collect.set()
    assert await child.wait() == 3
    assert not caplog.records
