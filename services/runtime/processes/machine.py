"""What machine this is, as far as it decides how fast something runs here."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

from kvrelay.errors import ConfigError

INSTRUCTION_SETS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip
"""Those that kernels are written for, by the kernel's names of them."""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, seen from one process."""

    cpu: str
    """The CPU's name for itself, '' where the system does not tell."""
    instruction_sets: tuple[str, ...]
    """Of `INSTRUCTION_SETS`, those that are there."""
    cores: int
    """Cores this process may run on."""
    memory_bytes: int
    """All of the machine's, or what a container is limited to; 0 where the system does not tell."""


def this_machine() -> Machine:
    """Reads /proc and /sys; never raises."""
    info = _cpu_info()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    cpu = info.get("model name") or platform.processor()
    return Machine(cpu, tuple(name for name in INSTRUCTION_SETS if name in flags), len(os.sched_getaffinity(0)), _memory_bytes())


def check_memory(wanted_bytes: int, what: str) -> None:
    """`ConfigError` if that is more than this machine, or container, has; `what` names it with the settings that decide it."""
    there = _memory_bytes()
    if there and wanted_bytes > there:
        raise ConfigError(f"{what} would take {wanted_bytes / (1 << 30):.1f} GiB, and there are {there / (1 << 30):.1f} GiB of memory")


def cpu_design() -> str:
    """The CPU's maker and design, 'GenuineIntel-6-143', or its architecture where the system does not tell more. Never raises."""
    info = _cpu_info()
    known = [info[name] for name in ("vendor_id", "cpu family", "model", "CPU implementer", "CPU part") if info.get(name)]
    return "-".join(known) or platform.machine()


def _cpu_info() -> dict[str, str]:
    """The first CPU's entries."""
    entries: dict[str, str] = {}
    for line in _text("/proc/cpuinfo").split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        entries[name.strip()] = value.strip()
    return entries


def _memory_bytes() -> int:
    total = 0
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            total = int(line.split()[1]) * 1024
    limit = _text("/sys/fs/cgroup/memory.max").strip()
    return min(total, int(limit)) if limit.isdigit() and total else total


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
