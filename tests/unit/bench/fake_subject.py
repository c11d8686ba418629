"""An engine under measurement that computes nothing: `setup.model` says how it behaves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from bench.cells import Cell
from bench.subject import NotMeasured, Setup, serve


class FakeSubject:
    def __init__(self, setup: Setup) -> None:
        if setup.model == "unloadable":
            raise ValueError("no such model")
        self._model = setup.model

    def versions(self) -> Mapping[str, str]:
        print("chatter that is no answer")
        return {"cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))), "omp": os.environ["OMP_NUM_THREADS"]}

    def run(self, cell: Cell) -> float:
        print("more chatter")
        if cell.phase == "mixed":
            raise NotMeasured("it has none")
        if self._model == "dies":
            os._exit(3)
        if self._model == "fails":
            raise RuntimeError("out of pages")
        return cell.tokens / 100

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        return [token_ids[-1]] * count


if __name__ == "__main__":
    serve(FakeSubject)
