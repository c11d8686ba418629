"""A subject in its own process, pinned, and asked for one run at a time."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.cells import Cell
from bench.machine import Disturbance, Quiet, environment
from bench.subject import NotMeasured, Setup

PATIENCE_S = 900.0
"""No engine takes longer to load, or for one run; one that does is killed."""
ROOT = Path(__file__).resolve().parents[1]


class SubjectFailed(Exception):
    """The process could not load its engine, or died; the text says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed run of a cell."""

    seconds: float
    disturbance: Disturbance


class SubjectProcess:
    """Started by the constructor, which waits until the engine is loaded; `close` it, or use it as a context."""

    def __init__(self, python: str, module: str, setup: Setup, cpus: Sequence[int]) -> None:
        """`module` is run by the interpreter `python`, on these cores. `SubjectFailed` if it does not come up."""
        self._cpus = cpus
        self._errors = tempfile.TemporaryFile(mode="w+", encoding="utf-8")  # noqa: SIM115 - as long as the process
        options = [f"--{name}={value}" for name, value in asdict(setup).items()]
        self._process = subprocess.Popen(
            [python, "-m", module, *options, f"--cpus={','.join(map(str, cpus))}"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT,
            env=environment(os.environ, setup.threads),
        )  # fmt: skip
        try:
            self.versions: dict[str, str] = self._receive()["versions"]
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SubjectProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, cell: Cell) -> Run:
        """`NotMeasured` for a cell this subject does not have."""
        watch = Quiet(self._cpus)
        answer = self._ask({"cell": asdict(cell)})
        return Run(answer["seconds"], watch.end(answer["cpu_seconds"]))

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """See `Subject.greedy`."""
        tokens: list[int] = self._ask({"greedy": list(token_ids), "count": count})["token_ids"]
        return tokens

    def close(self) -> None:
        """Ends the process: its stdin is closed, and after ten seconds it is killed."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except OSError as error:
            raise SubjectFailed(self._last_words()) from error
        return self._receive()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(PATIENCE_S, self._process.kill)
        watchdog.start()
        try:
            line = self._process.stdout.readline()
        finally:
            watchdog.cancel()
        if not line:
            raise SubjectFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "not_measured" in answer:
            raise NotMeasured(answer["not_measured"])
        if "error" in answer:
            raise SubjectFailed(answer["error"])
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return ": ".join([f"ended with {self._process.wait(10)}", *lines[-1:]])
