"""What a prefill or decode worker can be told; both roles have the same settings."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import ConfigError
from services.engine.scheduling.policies import ORDERS, POLICIES
from services.runtime.processes import checks
from services.runtime.processes.settings import setting


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """One worker process: one engine, one device thread."""

    model: str = setting("smollm2", "model folder (Hugging Face style), hub name, or 'smollm2' for the demo model")
    model_name: str = setting("", "name that requests use; empty: the model's or its folder's")
    cache_dir: str = setting("~/.cache/kvrelay", "where converted models and compiled kernels are kept", env="KVRELAY_CACHE")
    host: str = setting("127.0.0.1", "address to listen on", check=checks.host)
    port: int = setting(0, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    advertise: str = setting(
        "",
        "host that others reach this worker by; empty: the listening address, or for 0.0.0.0 and :: the one towards Redis",
        check=checks.host,
    )
    redis_url: str = setting("redis://127.0.0.1:6379/0", "registry", check=checks.redis_url)
    namespace: str = setting("kvrelay", "prefix of every key in Redis", check=checks.namespace)
    worker_id: str = setting("", "name in the registry, kept over restarts; empty: role and a random part")
    zone: str = setting("", "failure zone, for placement")
    rack: str = setting("", "rack, for placement")
    dtype: str = setting("bfloat16", "dtype of the weights", choices=("bfloat16", "float32"))
    kv_dtype: str = setting("bfloat16", "dtype of the KV cache", choices=("bfloat16", "float32"))
    quantization: str = setting("none", "int8: 8-bit weights and activations in the linears", choices=("none", "int8"))
    kernels: str = setting("auto", "what computes on CPUs; auto: native where a compiler is at hand", choices=("auto", "native", "torch"))
    device: str = setting("cpu", "torch device")
    kv_cache_mib: int = setting(256, "KV cache", unit="MiB", minimum=1)
    block_size: int = setting(16, "tokens a KV block; a power of two", unit="tokens")
    max_context_tokens: int = setting(0, "prompt and answer together; 0: what the model allows", unit="tokens", minimum=0)
    max_num_batched_tokens: int = setting(
        256, "tokens a step computes at most: the chunk budget of prefill", unit="tokens", minimum=1, maximum=1 << 20
    )
    max_num_seqs: int = setting(32, "sequences a step runs at most", unit="sequences")
    max_waiting: int = setting(128, "requests that may wait for pages; more are refused", unit="requests")
    policy: str = setting("chunked", "how a step is filled", choices=POLICIES)
    tbt_objective_ms: float = setting(
        0.0, "longest step that policy dynamic, and no other, aims at", unit="ms", minimum=0, maximum=3_600_000
    )
    prefill_order: str = setting("fcfs", "whose prompt is computed first: first come, or shortest rest with ageing", choices=ORDERS)
    explain_schedule: str = setting("", "file to which each step is explained, for `kvrelay schedule`; empty: none")
    profile: str = setting("", "file of `kvrelay profile`: what steps cost here; empty: learnt from the first ones")
    exactness_check: str = setting(
        "warn", "what to do at the start where answers would depend on batch, chunks and cache", choices=("warn", "refuse", "off")
    )
    threads: int = setting(1, "computing threads", unit="threads")
    cpus: str = setting("", "cores to pin the computing threads to, such as 0 or 0,1; empty: none")
    store_address: str = setting("", "host:port of the KV block store; empty: none", check=checks.address)
    lease_ttl_s: float = setting(10.0, "life of a KV lease that nobody renews", unit="s", minimum=0.1)
    max_handles: int = setting(256, "KV handles held for others at once; more are refused", unit="handles", minimum=1)
    max_message_bytes: int = setting(16 << 20, "largest message accepted", unit="bytes", minimum=2 << 20)
    default_timeout_s: float = setting(600.0, "deadline of requests that bring none", unit="s", minimum=0.1)
    heartbeat_s: float = setting(1.0, "time between registry renewals", unit="s", minimum=0.05)
    registry_ttl_s: float = setting(6.0, "life of a registry entry that is not renewed", unit="s", minimum=0.1)
    drain_grace_s: float = setting(20.0, "how long running requests may go on at SIGTERM", unit="s", minimum=0)
    otlp_endpoint: str = setting("", "where spans go (OTLP over gRPC); empty: nowhere", check=checks.otlp_endpoint)
    log_level: str = setting("INFO", "least severe level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    exit_with_parent: bool = setting(False, "die when the process that started this one does")
    debug: bool = setting(False, "check the engine's invariants whenever it is idle")

    def __post_init__(self) -> None:
        self.pinned_cpus()
        if self.registry_ttl_s < 2 * self.heartbeat_s:
            raise ConfigError(
                f"--registry-ttl-s ({self.registry_ttl_s:g}) must be at least twice --heartbeat-s ({self.heartbeat_s:g}): "
                "an entry must outlive a lost renewal"
            )

    def check_role(self, role: str) -> None:
        """Raises `ConfigError` for a policy that is the other side's, and for KV that would have to leave another device than the CPU."""
        foreign = {"prefill": "decode-only", "decode": "prefill-only"}.get(role)
        if self.policy == foreign:
            raise ConfigError(f"--policy {foreign} is not for a {role} worker")
        if self.device != "cpu" and (role == "prefill" or self.store_address):
            raise ConfigError(
                f"KV on {self.device} can be neither sent nor received: only a decode worker without a block store can have --device"
                f" {self.device}, and serve in mode colocated"
            )

    def pinned_cpus(self) -> tuple[int, ...]:
        """`cpus` as numbers; raises `ConfigError`."""
        names = [name.strip() for name in self.cpus.split(",")] if self.cpus else []
        if not all(name.isdecimal() for name in names):
            raise ConfigError(f"--cpus must be core numbers with commas between them, got {self.cpus!r}")
        return tuple(map(int, names))
