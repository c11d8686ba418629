"""Compiles the native kernels for this machine once and keeps the library.

`g++ -march=native` takes a few seconds; the result is kept under a name made of the sources, the compiler and the CPU, so another
machine, compiler or version never loads it. Nothing but a C++ compiler is needed: no torch headers, no build system.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

log = logging.getLogger(__name__)

SOURCES = ("vector.h", "team.h", "linear.h", "attention.h", "forward.cpp")
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-pthread")
THIS_CPU = ("-march=native",)
"""Uses every instruction this machine has; the bits are the same with fewer ("-mavx2", "-mfma")."""
COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 300.0
_SEAL_BYTES = 32
_FOLDER = Path(__file__).parent


class NativeKernelsUnavailable(Exception):
    """The native kernels cannot be built or used here. Torch's operators serve instead, or the settings are refused."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        """Why."""


def library_path(cache_dir: Path, target_flags: tuple[str, ...] = THIS_CPU) -> Path:
    """The library for this machine under `cache_dir`, compiled if it is not there yet. Blocks for some seconds then.

    Two processes may compile at once: each writes a file of its own, and the last rename wins with equal content.
    Raises `NativeKernelsUnavailable` without a compiler, or when it fails.
    """
    compiler = _compiler()
    flags = (*FLAGS, *target_flags)
    target = cache_dir / f"kernels-{_digest(compiler, flags)}.so"
    if not _is_whole(target):
        _compile(compiler, flags, target)
    return target


def built_library(cache_dir: Path) -> Path | None:
    """The library for this machine if it is compiled already; raises `NativeKernelsUnavailable` without a compiler."""
    target = cache_dir / f"kernels-{_digest(_compiler(), (*FLAGS, *THIS_CPU))}.so"
    return target if _is_whole(target) else None


def _compiler() -> str:
    for name in COMPILERS:
        if found := shutil.which(name):
            return found
    raise NativeKernelsUnavailable(f"no C++ compiler ({', '.join(COMPILERS)}) was found")


def _compile(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    log.info("compiling the native kernels with %s: some seconds, once for this machine", compiler)
    handle, made = -1, ""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, made = tempfile.mkstemp(prefix=".kernels-", suffix=".so", dir=target.parent)
        os.close(handle)
        command = [compiler, *flags, "-o", made, str(_FOLDER / "forward.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        if done.returncode:
            raise NativeKernelsUnavailable(f"{compiler} could not compile the native kernels: {done.stderr.strip()[-2000:]}")
        _seal(Path(made))
        os.rename(made, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeKernelsUnavailable(f"the native kernels could not be compiled: {error}") from error
    finally:
        if made:
            Path(made).unlink(missing_ok=True)


def _seal(library: Path) -> None:
    """Appends the content's SHA-256, which a loader of libraries does not look at, and has it all on the disk before it gets its name."""
    content = library.read_bytes()
    with library.open("ab") as file:
        file.write(hashlib.sha256(content).digest())
        file.flush()
        os.fsync(file.fileno())
    library.chmod(0o755)


def _is_whole(library: Path) -> bool:
    """Whether a library is there and as it was sealed: loading one that was cut off would kill the process."""
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-_SEAL_BYTES:] == hashlib.sha256(content[:-_SEAL_BYTES]).digest()


def _digest(compiler: str, flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update(name.encode() + b"\0" + (_FOLDER / name).read_bytes())
    digest.update("\0".join((*flags, _compiler_version(compiler), platform.machine(), _cpu_features())).encode())
    return digest.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeKernelsUnavailable(f"{compiler} does not run: {error}") from error
    return done.stdout


def _cpu_features() -> str:
    """What `-march=native` depends on: the first CPU's model and instruction sets."""
    wanted = ("vendor_id", "cpu family", "model", "flags", "Features")
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.split("\t")[0].strip() in wanted)
