"""A service as a process: ready line, signals, following its parent."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]

SERVICE = """
import asyncio, sys
from services.runtime.processes.lifecycle import announce_ready, exit_with_parent, run_until_stopped
from services.runtime.rpc.server import ServiceServer
from services.runtime.telemetry.tracing import Telemetry

async def main():
    server = ServiceServer("test", Telemetry.disabled(), drain_grace_s=1.0)
    port = await server.start()

    async def leave():
        print("leaving", flush=True)

    async def settled():
        if "stuck" in sys.argv:
            await asyncio.Event().wait()

    announce_ready("test", f"127.0.0.1:{port}", "w0")
    print("stopped by", await run_until_stopped(server, before_drain=leave, settled=settled), flush=True)

if "follow" in sys.argv:
    exit_with_parent()
asyncio.run(main())
"""

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], "follow"])
time.sleep(100)
"""


def start(*argv: str, code: str = SERVICE) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code, *argv], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def read_line(process: subprocess.Popen[str], timeout_s: float = 20.0) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert readable, "no line in time"
    return process.stdout.readline()


@pytest.fixture
def processes() -> Any:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_the_registry_drains_and_ends_well(processes: Any, number: signal.Signals) -> None:
    process = start()
    processes.append(process)
    ready = json.loads(read_line(process))
    assert (ready["event"], ready["role"], ready["worker_id"], ready["pid"]) == ("ready", "test", "w0", process.pid)
    assert ready["address"].startswith("127.0.0.1:")
    process.send_signal(number)
    assert [read_line(process), read_line(process)] == ["leaving\n", f"stopped by {number.name}\n"]
    assert process.wait(10) == 0


def test_a_drain_that_does_not_settle_still_ends(processes: Any) -> None:
    process = start("stuck")
    processes.append(process)
    read_line(process)
    process.terminate()
    assert process.wait(15) == 0


def test_a_second_signal_ends_the_process_at_once(processes: Any) -> None:
    process = start("stuck")
    processes.append(process)
    read_line(process)
    process.send_signal(signal.SIGTERM)
    assert read_line(process) == "leaving\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 128 + signal.SIGINT


def test_a_service_whose_parent_is_killed_drains_and_ends(processes: Any) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT, SERVICE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    processes.append(parent)
    child = json.loads(read_line(parent))["pid"]
    parent.kill()
    parent.wait()
    assert read_line(parent) == "leaving\n"
    deadline = time.monotonic() + 15
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1][:3]:
        assert time.monotonic() < deadline, f"process {child} goes on without its parent"
        time.sleep(0.05)
    assert child != os.getpid()
