"""An engine under measurement that computes nothing: `setup.model` says how it behaves."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, serve


class FakeSubject:
    def __init__(self, setup: Setup) -> None:
        if setup.model == "unloadable":
            raise ValueError("no such model")
        self._model = setup.model
        self._folder = setup.binaries

    def versions(self) -> Mapping[str, str]:
        print("chatter that is no answer")
        return {"cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))), "omp": os.environ["OMP_NUM_THREADS"]}

    def run(self, cell: Cell) -> float:
        print("more chatter")
        if cell.phase == "mixed":
            raise NotMeasured("it has none")
        if cell.phase == "prefill":
            self._misbehave()
        return cell.tokens / 100

    def _misbehave(self) -> None:
        if self._model == "dies":
            os._exit(3)
        if self._model == "too modern":
            os.kill(os.getpid(), signal.SIGILL)
        if self._model == "fails":
            raise RuntimeError("out of pages\nfor so many tokens")
        if self._model == "hangs":
            with open(os.path.join(self._folder, "pipe"), "w") as pipe:
                subprocess.run(["sh", "-c", "echo started; exec sleep 600"], stdout=pipe, check=True)

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        return [token_ids[-1]] * count


if __name__ == "__main__":
    serve(FakeSubject)
