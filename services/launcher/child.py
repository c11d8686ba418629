"""One service as a child process: start, ready line, log, end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from services.launcher.errors import StartError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout or image folder that holds `services/` and `kvrelay/`."""
TAIL_LINES = 25


@dataclass(frozen=True, slots=True)
class Ready:
    """What a service says on stdout once it serves."""

    role: str
    address: str
    worker_id: str


class Child:
    """One life of one process. It is in a session of its own, so that a terminal's Ctrl-C reaches the launcher alone."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log_path: Path, log_start: int) -> None:
        self.name = name
        self.log_path = log_path
        self._log_start = log_start
        """Where this life's part of the log begins, in bytes."""
        self._process = process
        self._reading = asyncio.Lock()

    @classmethod
    async def spawn(cls, name: str, argv: Sequence[str], environ: Mapping[str, str], log_path: Path) -> Child:
        """Starts `argv` with stderr appended to `log_path`: a file, so that a service never waits for a reader of its log."""
        with _append(log_path) as log:
            log_start = log.seek(0, os.SEEK_END)
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=log, env=environ, start_new_session=True
            )
        return cls(name, process, log_path, log_start)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def ready(self, timeout_s: float) -> Ready:
        """Waits for the ready line; raises `StartError` when the process ends first, or does not get there in time."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                async for line in self._process.stdout:
                    found = parse_ready(line)
                    if found is not None:
                        return found
                code = await self._process.wait()
        except TimeoutError:
            raise StartError(f"{self.name} was not ready within {timeout_s:g} s", self.tail()) from None
        raise StartError(f"{self.name} {describe_exit(code)} before it was ready", self.tail())

    async def wait(self) -> int:
        """Reads stdout to its end, so that the pipe can never fill, and returns the exit code. Several may wait."""
        assert self._process.stdout is not None
        async with self._reading:
            while await self._process.stdout.read(65536):
                pass
        return await self._process.wait()

    def terminate(self) -> None:
        """Asks it to drain. Nothing happens if it is gone."""
        terminate(self._process)

    def kill(self) -> None:
        """Ends it at once, with everything in its session."""
        kill(self._process)

    def tail(self, lines: int = TAIL_LINES) -> str:
        """The end of what it has logged in this life."""
        with contextlib.suppress(OSError), self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return b"".join(deque(log, lines)).decode(errors="replace")
        return ""


def terminate(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, unless it is gone.

    Not `process.terminate()`: that first looks whether the process still lives, and so takes the exit code of one that has just ended
    away from the event loop, which then knows of an "Unknown child process" only.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)


def kill(process: asyncio.subprocess.Process) -> None:
    """SIGKILL to a process with a session of its own and to everything in that, unless it is gone."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    """Lets a process with a session of its own put things away, or kills it after `grace_s`; returns once it has ended.

    When the wait is cancelled it is killed at once.
    """
    terminate(process)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                await process.wait()
    finally:
        kill(process)
        await process.wait()


def parse_ready(line: bytes) -> Ready | None:
    """The ready line, or None for any other."""
    try:
        event = json.loads(line)
        if event["event"] == "ready":
            return Ready(str(event["role"]), str(event["address"]), str(event.get("worker_id", "")))
    except (ValueError, KeyError, TypeError):
        pass
    return None


def describe_exit(code: int) -> str:
    """'exited with code 2' or 'was killed by SIGKILL'."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def service_argv(role: str, flags: Sequence[str]) -> list[str]:
    """The command line of a service whose life ends with this process."""
    return [sys.executable, "-m", f"services.{role}", *flags, "--exit-with-parent"]


def child_environ(environ: Mapping[str, str], threads: int = 1) -> dict[str, str]:
    """The environment of a service: the launcher's, importable from anywhere, with no hidden thread pools."""
    paths = [str(ROOT), *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }


def _append(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")
