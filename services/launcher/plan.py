"""Which processes make a suite, with which flags: pure, so that deployments can be checked against it.

Addresses that are known only once something runs (Redis, store) are arguments. A worker's port is always free to choose: it
registers its address. Router and store keep theirs over a restart, because others were told it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.errors import ConfigError
from services.launcher.settings import SuiteSettings
from services.runtime.addresses import LOOPBACK


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One service process."""

    name: str
    """Unique in the suite: 'prefill-0'. Also its worker id and the name of its log."""
    role: str
    """'router', 'prefill', 'decode' or 'kvstore'; its module is `services.<role>`."""
    flags: tuple[str, ...]
    """'--port=0', ..."""
    keeps_port: bool = False
    """Whether a restart must listen where the first start did."""

    def flags_for(self, port: int | None) -> tuple[str, ...]:
        """The flags of a restart: as at the first start, but for the port where it was kept."""
        if port is None or not self.keeps_port:
            return self.flags
        return tuple(f"--port={port}" if flag.startswith("--port=") else flag for flag in self.flags)


def store_processes(settings: SuiteSettings, redis_url: str) -> list[ProcessSpec]:
    """The block store, or nothing."""
    if not settings.store:
        return []
    flags = _flags(
        **_shared(settings, redis_url),
        host=LOOPBACK,
        port=0,
        worker_id="kvstore-0",
        limit_mib=settings.store_mib,
        lease_ttl_s=settings.lease_ttl_s,
    )
    return [ProcessSpec("kvstore-0", "kvstore", flags, keeps_port=True)]


def worker_processes(settings: SuiteSettings, redis_url: str, store_address: str, cores: Sequence[int]) -> list[ProcessSpec]:
    """Prefill workers (none in mode colocated), then decode workers. `cores`: what this process may run on; empty: cannot pin."""
    prefill = 0 if settings.mode == "colocated" else settings.prefill
    names = [("prefill", i) for i in range(prefill)] + [("decode", i) for i in range(settings.decode)]
    threads = threads_each(settings, len(names), len(cores))
    pins = assign_cores(len(names), threads, cores if settings.pin else ())
    return [
        ProcessSpec(
            f"{role}-{i}",
            role,
            _flags(
                **_shared(settings, redis_url),
                host=LOOPBACK,
                port=0,
                worker_id=f"{role}-{i}",
                **worker_settings(settings),
                **scheduling(settings, role),
                explain_schedule=f"{settings.explain_schedule}/{role}-{i}.jsonl" if settings.explain_schedule else "",
                threads=threads,
                cpus=",".join(map(str, cpus)),
                store_address=store_address,
            ),
        )
        for (role, i), cpus in zip(names, pins, strict=True)
    ]


def router_processes(settings: SuiteSettings, redis_url: str) -> list[ProcessSpec]:
    """The router: the only one that others reach."""
    flags = _flags(
        **_shared(settings, redis_url),
        host=settings.host,
        port=settings.port,
        worker_id="router-0",
        mode=settings.mode,
        split_threshold_tokens=settings.split_threshold_tokens,
    )
    return [ProcessSpec("router-0", "router", flags, keeps_port=True)]


def worker_settings(settings: SuiteSettings) -> dict[str, object]:
    """Settings that every worker of a suite must have alike, by flag name with underscores."""
    return {
        "model": settings.model,
        "model_name": settings.model_name,
        "cache_dir": settings.cache_dir,
        "dtype": settings.dtype,
        "kv_dtype": settings.kv_dtype,
        "quantization": settings.quantization,
        "kernels": settings.kernels,
        "device": settings.device,
        "kv_cache_mib": settings.kv_cache_mib,
        "block_size": settings.block_size,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "max_waiting": settings.max_waiting,
        "profile": settings.profile,
        "exactness_check": settings.exactness_check,
        "lease_ttl_s": settings.lease_ttl_s,
    }


def scheduling(settings: SuiteSettings, role: str) -> dict[str, object]:
    """How a worker of that role fills its steps."""
    policy = settings.prefill_policy if role == "prefill" else settings.policy
    return {
        "policy": policy,
        "tbt_objective_ms": settings.tbt_objective_ms if policy == "dynamic" else 0,
        "prefill_order": settings.prefill_order,
    }


def threads_each(settings: SuiteSettings, workers: int, cores: int) -> int:
    """Computing threads of each worker: as told, or the cores divided among them. Torch's operators keep their bits with one only.

    `ConfigError` for more than there are cores; 0 cores: unknown.
    """
    if 0 < cores < settings.threads:
        raise ConfigError(f"--threads (threads) must be at most the {cores} cores of this machine, got {settings.threads}")
    if settings.threads:
        return settings.threads
    return max(1, cores // workers) if settings.device == "cpu" and settings.kernels != "torch" else 1


def assign_cores(workers: int, threads: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Cores of its own for each worker's threads, or none for all: with too few cores the scheduler shares better than a fixed map."""
    if workers * threads > len(cores):
        return [()] * workers
    return [tuple(cores[i * threads : (i + 1) * threads]) for i in range(workers)]


def _shared(settings: SuiteSettings, redis_url: str) -> dict[str, object]:
    return {
        "redis_url": redis_url,
        "namespace": settings.namespace,
        "otlp_endpoint": settings.otlp_endpoint,
        "drain_grace_s": settings.drain_grace_s,
        "debug": settings.debug,
    }


def _flags(**values: object) -> tuple[str, ...]:
    flags: list[str] = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is not False and value != "":
            flags.append(f"{flag}={value}")
    return tuple(flags)
