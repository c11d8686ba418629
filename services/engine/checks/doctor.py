"""`kvrelay doctor`: says what of this machine is fit to serve and what is not.

python -m services.engine.checks.doctor [--json]
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvrelay.errors import ConfigError, KvRelayError
from services.engine.checks.version import engine_version_text
from services.runtime.processes.machine import this_machine
from services.runtime.processes.settings import load_settings, setting
from services.runtime.registry.embedded_redis import EmbeddedRedis, server_binary

PINNED_TORCH = "2.13.0"
"""The version everything is tested with; pyproject.toml says the same."""
LEAST_PYTHON = (3, 11)
LEAST_MEMORY_BYTES = 2 << 30
"""What the demo's suite takes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check came to."""

    check: str
    status: str
    """'ok'; 'warn': works, but worse; 'fail': does not work."""
    detail: str


@dataclass(frozen=True, slots=True)
class DoctorSettings:
    """Checks whether this machine can serve, and what is missing."""

    cache_dir: str = setting("~/.cache/kvrelay", "where converted models and compiled kernels are kept", env="KVRELAY_CACHE")
    port: int = setting(50051, "port that the router is to have", unit="port", minimum=1, maximum=65535)
    json: bool = setting(False, "machine-readable output")


def check_python(settings: DoctorSettings) -> Iterator[Finding]:
    version, least = platform.python_version(), ".".join(map(str, LEAST_PYTHON))
    if sys.version_info < LEAST_PYTHON:
        yield Finding("python", "fail", f"{version}; {least} or newer is needed")
    else:
        yield Finding("python", "ok", version)


def check_torch(settings: DoctorSettings) -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "fail", f"cannot be imported: {error}; workers need torch {PINNED_TORCH}")
        return
    found = torch.__version__
    if found.partition("+")[0] == PINNED_TORCH:
        yield Finding("torch", "ok", found)
    else:
        yield Finding("torch", "warn", f"{found}; everything is tested with {PINNED_TORCH}")
    devices = torch.cuda.device_count()
    yield Finding(
        "gpu", "ok", f"{devices} for --device cuda: {torch.cuda.get_device_name()}" if devices else "none; workers compute on CPUs"
    )


def check_machine(settings: DoctorSettings) -> Iterator[Finding]:
    machine = this_machine()
    name = f"{machine.cpu or 'unknown'} ({platform.machine()}): {' '.join(machine.instruction_sets) or 'no instruction set of use'}"
    vectors = {"avx2", "asimd"} & set(machine.instruction_sets)
    yield Finding("cpu", "ok" if vectors else "warn", name if vectors else f"{name}; without AVX2 it is slow")
    enough = machine.cores >= 2
    yield Finding("cores", "ok" if enough else "warn", f"{machine.cores} usable" + ("" if enough else "; a split pair shares it"))
    memory = f"{machine.memory_bytes / (1 << 30):.1f} GiB" if machine.memory_bytes else "unknown"
    fits = machine.memory_bytes >= LEAST_MEMORY_BYTES
    yield Finding("memory", "ok" if fits else "warn", memory + ("" if fits else f"; the demo takes {LEAST_MEMORY_BYTES >> 30} GiB"))


def check_cache(settings: DoctorSettings) -> Iterator[Finding]:
    folder = Path(settings.cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Finding("cache", "fail", f"{folder} cannot be written: {error.strerror}; give another --cache-dir")
    else:
        yield Finding("cache", "ok", str(folder))


def check_kernels(settings: DoctorSettings) -> Iterator[Finding]:
    """What computes, and whether it keeps its promise of equal bits, for each kind of weights."""
    import torch

    from services.engine.checks.exactness import probe_model, violations
    from services.engine.model.llama import ModelOptions

    torch.set_num_threads(1)
    cache_dir = Path(settings.cache_dir).expanduser()
    decoders = ["torch"]
    try:
        native = probe_model(ModelOptions(kernels="native", cache_dir=cache_dir)).decoder.name
        decoders.insert(0, "native")
        yield Finding("native kernels", "ok", native)
    except ConfigError as error:
        yield Finding("native kernels", "warn", f"{error.message}; torch's operators serve instead, more slowly")
    chosen = probe_model(ModelOptions(cache_dir=cache_dir)).decoder.name
    yield Finding("kernels", "ok", f"--kernels auto takes {chosen}")
    kinds = {
        "float32": ModelOptions(torch.float32, torch.float32, cache_dir=cache_dir),
        "bfloat16": ModelOptions(cache_dir=cache_dir),
        "int8": ModelOptions(quantization="int8", cache_dir=cache_dir),
    }
    for kernels in decoders:
        for kind, options in kinds.items():
            begun = time.monotonic()
            found = violations(
                probe_model(ModelOptions(options.dtype, options.kv_dtype, options.quantization, kernels=kernels, cache_dir=cache_dir))
            )
            name = f"exact {kind} {kernels}"
            if found:
                yield Finding(name, "fail", f"{len(found)} of its cases differ, the first: {found[0]}")
            else:
                yield Finding(name, "ok", f"batch, chunks and pages do not change a bit ({time.monotonic() - begun:.1f} s)")


def check_redis(settings: DoctorSettings) -> Iterator[Finding]:
    try:
        server_binary()
    except ConfigError as error:
        yield Finding("redis", "warn", error.message)
        return
    with EmbeddedRedis():
        yield Finding("redis", "ok", "the embedded server starts")


def check_ports(settings: DoctorSettings) -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
        yield Finding("loopback", "ok", "a port on 127.0.0.1 can be had")
    except OSError as error:
        yield Finding("loopback", "fail", f"no port on 127.0.0.1 can be had: {error.strerror}")
        return
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", settings.port))
        yield Finding("port", "ok", f"{settings.port} is free for the router")
    except OSError as error:
        yield Finding("port", "warn", f"{settings.port} for the router: {error.strerror}; give another --port")


Check = Callable[[DoctorSettings], Iterator[Finding]]
CHECKS: Mapping[str, Check] = {
    "python": check_python,
    "torch": check_torch,
    "machine": check_machine,
    "cache": check_cache,
    "kernels": check_kernels,
    "redis": check_redis,
    "ports": check_ports,
}


def examine(settings: DoctorSettings, checks: Mapping[str, Check]) -> Iterator[Finding]:
    """Findings as they come; a check that breaks is a finding too. Blocks, for some seconds together."""
    for name, check in checks.items():
        try:
            yield from check(settings)
        except KvRelayError as error:
            yield Finding(name, "fail", error.message)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a machine must not hide the rest
            yield Finding(name, "fail", f"the check itself failed: {type(error).__name__}: {error}")


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit status 0, 1 if anything fails, 2 for a wrong option."""
    settings = load_settings(DoctorSettings, argv, environ, "kvrelay doctor", engine_version_text)
    findings = []
    try:
        for finding in examine(settings, CHECKS):
            findings.append(finding)
            if not settings.json:
                sys.stdout.write(
                    f"{finding.status.upper() if finding.status == 'fail' else finding.status:<5} {finding.check:<22} {finding.detail}\n"
                )
                sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    failed = [finding.check for finding in findings if finding.status == "fail"]
    if settings.json:
        sys.stdout.write(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=1) + "\n")
    else:
        sys.stdout.write(f"not fit to serve: {', '.join(failed)}\n" if failed else "fit to serve\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
