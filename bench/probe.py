"""What the machine itself can do, in the same sitting: bytes read and operations done a second, by the kernels that come with torch."""

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

SMALLEST_SIDE = 128
PATIENCE_S = 1.0
"""A product that would take longer is not tried: some types are emulated on some CPUs, hundreds of times slower than float32."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """Measured on the cores that the engines are pinned to."""

    read_bytes_per_s: dict[int, float]
    """By size of what is read over and over: a smaller working set may partly stay in a cache."""
    operations_per_s: dict[str, float]
    """Of a large matrix product, by type of its operands; a multiply-add is two. 'int8' is the best of what multiplies such."""

    def read_rate(self, size: int) -> float:
        """Bytes a second for a working set of about this size."""
        return self.read_bytes_per_s[min(self.read_bytes_per_s, key=lambda known: abs(known - size))]


def measure(threads: int, cpus: Sequence[int], sizes: Sequence[int], side: int = 2048) -> Peaks:
    """In a process of its own, pinned like the engines. `sizes` in bytes; `side` of the square matrices, smaller for slow types."""
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

    def float_product(name: str, side: int) -> Callable[[], object]:
        square = torch.ones(side, side, dtype=getattr(torch, name))
        return partial(torch.mm, square, square)

    def int_product(side: int) -> Callable[[], object]:
        square = torch.ones(side, side, dtype=torch.int8)
        return partial(torch._int_mm, square, square)

    def quantized_product(side: int) -> Callable[[], object]:
        """FBGEMM's on x86, which is many times faster than `_int_mm` on CPUs without VNNI."""
        square = torch.ones(side, side)
        weight = torch.ops.quantized.linear_prepack(torch.quantize_per_tensor(square, 1.0, 0, torch.qint8), None)
        return partial(torch.ops.quantized.linear, torch.quantize_per_tensor(square, 1.0, 0, torch.quint8), weight, 1.0, 0)

    operations = {name: peak(partial(float_product, name), side) for name in ("float32", "bfloat16")}
    quantized = [quantized_product] if torch.backends.quantized.engine != "none" else []
    operations["int8"] = max(peak(product, side) for product in (int_product, *quantized))
    print(json.dumps({"read": read, "operations": operations}))


def peak(product: Callable[[int], Callable[[], object]], largest: int, patience_s: float = PATIENCE_S) -> float:
    """Operations a second of `product(side)()`, which multiplies square matrices of that side.

    The side is `largest`, or what it doubles to from a small one before a product would take longer than `patience_s`.
    """
    side = min(SMALLEST_SIDE, largest)
    while side < largest and 8 * _best_s(product(side), 0.0) < patience_s:
        side = min(2 * side, largest)
    return 2 * side**3 / _best_s(product(side))


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
