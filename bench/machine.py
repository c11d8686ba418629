"""The machine a figure comes from, and whether it was quiet while the figure was taken. Linux only."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

INSTRUCTION_SETS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
"""Those that matter for arithmetic, in the words of /proc/cpuinfo."""
_TICKS = os.sysconf("SC_CLK_TCK")


def describe() -> dict[str, str]:
    """CPU, memory, system and the commit of the checkout, as lines for a report."""
    info = cpu_info()
    flags = set(info.get("flags", "").split())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = info.get("model name", platform.machine())
    return {
        "cpu": f"{name}, family {info.get('cpu family', '?')} model {info.get('model', '?')}",
        "instruction sets": " ".join(flag for flag in INSTRUCTION_SETS if flag in flags) or "none of those looked for",
        "cores": str(os.cpu_count()),
        "memory": f"{memory:.0f} GiB",
        "hypervisor": "yes" if "hypervisor" in flags else "no",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "commit": _commit(),
    }


def cpu_info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {key.strip(): value.strip() for key, _, value in pairs}


def slug() -> str:
    """The CPU's name as part of a file's name: 'intel-xeon-6-207'."""
    info = cpu_info()
    words = "".join(letter if letter.isalnum() else " " for letter in info.get("model name", platform.machine()).lower()).split()
    kept = [word for word in words if word not in ("r", "tm", "cpu", "processor", "core") and not word.endswith("ghz")]
    return "-".join([*kept, info.get("cpu family", "0"), info.get("model", "0")])


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=Path(__file__).parent).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + (" with changes" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@dataclass(frozen=True, slots=True)
class Disturbance:
    """What took the cores from a measurement, as shares of their time."""

    others: float
    """Other processes of this machine."""
    steal: float
    """Other guests of the host."""

    @property
    def total(self) -> float:
        return self.others + self.steal


class Quiet:
    """Watches the given cores from its making to `end`. The kernel counts in hundredths of a second: good for a second or more."""

    def __init__(self, cpus: Sequence[int]) -> None:
        self._cpus = cpus
        self._started = time.monotonic()
        self._busy, self._steal = _busy_and_steal(cpus)

    def end(self, own_cpu_seconds: float) -> Disturbance:
        """`own_cpu_seconds`: CPU time that the measured process itself used meanwhile."""
        room = (time.monotonic() - self._started) * len(self._cpus)
        busy, steal = _busy_and_steal(self._cpus)
        others = max(0.0, busy - self._busy - own_cpu_seconds)
        return Disturbance(others / room, (steal - self._steal) / room)


def _busy_and_steal(cpus: Sequence[int]) -> tuple[float, float]:
    wanted = {f"cpu{cpu}" for cpu in cpus}
    busy = steal = 0
    for line in Path("/proc/stat").read_text(encoding="utf-8").splitlines():
        name, *fields = line.split()
        if name in wanted:
            user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, fields[:8])
            busy += user + nice + system + interrupts + soft_interrupts
            steal += stolen
    return busy / _TICKS, steal / _TICKS


def environment(base: Mapping[str, str], threads: int) -> dict[str, str]:
    """The environment of a measured process: thread pools of every library are as wide as `threads`."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {**base, **dict.fromkeys(names, str(threads)), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
