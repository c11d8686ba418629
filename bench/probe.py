"""What the machine itself can do, in the same sitting: bytes read and operations done a second, by torch's own kernels."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from bench.machine import environment
from bench.process import ROOT


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured on the cores that the engines are pinned to."""

    read_bytes_per_s: dict[int, float]
    """By size of what is read over and over: a smaller working set may partly stay in a cache."""
    operations_per_s: dict[str, float]
    """Of a large matrix product, by type of its operands; a multiply-add is two."""

    def read_rate(self, size: int) -> float:
        """Bytes a second for a working set of about this size."""
        return self.read_bytes_per_s[min(self.read_bytes_per_s, key=lambda known: abs(known - size))]


def measure(threads: int, cpus: Sequence[int], sizes: Sequence[int], side: int = 2048) -> Peaks:
    """In a process of its own, pinned like the engines. `sizes` in bytes; `side` of the square matrices."""
    request = json.dumps({"threads": threads, "cpus": list(cpus), "sizes": list(sizes), "side": side})
    done = subprocess.run(
        [sys.executable, "-m", "bench.probe", request], capture_output=True, text=True, check=True, cwd=ROOT,
        env=environment(os.environ, threads),
    )  # fmt: skip
    answer = json.loads(done.stdout)
    return Peaks({int(size): rate for size, rate in answer["read"].items()}, answer["operations"])


def _main(threads: int, cpus: list[int], sizes: list[int], side: int) -> None:
    os.sched_setaffinity(0, cpus)
    import torch

    torch.set_num_threads(threads)
    read = {}
    for size in sizes:
        matrix = torch.ones(max(1, size // 8192), 2048)
        vector = torch.ones(2048)
        read[size] = matrix.nbytes / _best_s(partial(torch.mv, matrix, vector))
    operations = {}
    for name in ("float32", "bfloat16"):
        square = torch.ones(side, side, dtype=getattr(torch, name))
        operations[name] = 2 * side**3 / _best_s(partial(torch.mm, square, square))
    integers = torch.ones(side, side, dtype=torch.int8)
    operations["int8"] = 2 * side**3 / _best_s(partial(torch._int_mm, integers, integers))
    print(json.dumps({"read": read, "operations": operations}))


def _best_s(call: Callable[[], object], window_s: float = 1.0) -> float:
    """The shortest of the calls that fit the window, at least three: a limit is what the machine does at its best."""
    call()
    best, end, count = float("inf"), time.perf_counter() + window_s, 0
    while count < 3 or time.perf_counter() < end:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
        count += 1
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("request")
    _main(**json.loads(parser.parse_args().request))
