"""A subject in its own process, pinned, and asked for one run at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.machine import Disturbance, Quiet, environment
from bench.subject import NotMeasured, Setup

PATIENCE_S = 600.0
"""For an engine to load, and for each run of a cell; one that takes longer is killed."""
ROOT = Path(__file__).resolve().parents[1]


class SubjectFailed(Exception):
    """The process could not load its engine, died, or did not answer in time; the text says why, in one line."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a cell."""

    seconds: float
    disturbance: Disturbance


class SubjectProcess:
    """Started by the constructor, which waits until the engine is loaded; `close` it, or use it as a context.

    A process that failed is ended, with all that it started; the next request starts another one.
    """

    def __init__(self, python: str, module: str, setup: Setup, cpus: Sequence[int]) -> None:
        """`module` is run by the interpreter `python`, on these cores. `SubjectFailed` if it does not come up."""
        self._cpus = cpus
        self._name = module.rpartition(".")[2]
        options = [f"--{name}={value}" for name, value in asdict(setup).items()]
        self._command = [python, "-m", module, *options, f"--cpus={','.join(map(str, cpus))}"]
        self._environment = environment(os.environ, setup.threads)
        self._process: subprocess.Popen[str] | None = None
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SubjectProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, cell: Cell) -> Run:
        """`NotMeasured` for a cell this subject does not have, `SubjectFailed` if it breaks or takes too long."""
        process = self._process or self._start()
        watch = Quiet(self._cpus)
        answer = self._ask(process, {"cell": asdict(cell)})
        return Run(answer["seconds"], watch.end(answer["cpu_seconds"]))

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """See `Subject.greedy`; raises as `run` does."""
        process = self._process or self._start()
        tokens: list[int] = self._ask(process, {"greedy": list(token_ids), "count": count})["token_ids"]
        return tokens

    def close(self) -> None:
        """Ends the process, if there is one: its stdin is closed, and after ten seconds it is killed."""
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            _kill(process)
        process.stdout.close()
        self._errors.close()

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8")  # noqa: SIM115 - as long as the process
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT,
            env=self._environment, start_new_session=True,
        )  # fmt: skip
        self.versions: dict[str, str] = self._receive(self._process)["versions"]
        return self._process

    def _ask(self, process: subprocess.Popen[str], request: dict[str, Any]) -> dict[str, Any]:
        # If it died meanwhile, reading says so.
        with suppress(BrokenPipeError):
            print(json.dumps(request), file=process.stdin, flush=True)
        return self._receive(process)

    def _receive(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        late = threading.Event()

        def give_up() -> None:
            late.set()
            _kill(process)

        watchdog = threading.Timer(PATIENCE_S, give_up)
        watchdog.start()
        try:
            line = process.stdout.readline()
        finally:
            watchdog.cancel()
        if line and not late.is_set():
            answer: dict[str, Any] = json.loads(line)
            if "not_measured" in answer:
                raise NotMeasured(answer["not_measured"])
            if "error" not in answer:
                return answer
            reason = answer["error"]
        else:
            reason = f"no answer within {PATIENCE_S:g} s" if late.is_set() else self._last_words(process)
        self.close()
        raise SubjectFailed(f"{self._name}: {' '.join(reason.split())}")

    def _last_words(self, process: subprocess.Popen[str]) -> str:
        try:
            code = process.wait(10)
        except subprocess.TimeoutExpired:
            return "closed its output and did not end"
        ending = f"ended with {code}" if code >= 0 else f"ended by {signal.Signals(-code).name}"
        if code == -signal.SIGILL:
            ending += ", an instruction that this CPU does not have"
        self._errors.seek(0)
        return ": ".join([ending, *self._errors.read().strip().splitlines()[-1:]])


def _kill(process: subprocess.Popen[str]) -> None:
    """The process and all that it started: it leads a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
