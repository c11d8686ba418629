"""What `python -m services` can be told."""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import ConfigError
from services.runtime.processes import checks
from services.runtime.processes.settings import setting

MAX_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class SuiteSettings:
    """One suite on one machine: how many processes, of which model, and what they share."""

    model: str = setting("smollm2", "model folder (Hugging Face style), hub name, or 'smollm2' for the demo model")
    model_name: str = setting("", "name that requests use; empty: the model's or its folder's")
    cache_dir: str = setting("~/.cache/kvrelay", "where converted models and compiled kernels are kept", env="KVRELAY_CACHE")
    mode: str = setting("hybrid", "where a request's two phases run", choices=("hybrid", "split", "colocated"))
    prefill: int = setting(1, "prefill workers; none are started in mode colocated", unit="processes", minimum=0)
    decode: int = setting(1, "decode workers", unit="processes", minimum=1)
    store: bool = setting(True, "start a KV block store that the workers share")
    store_mib: int = setting(512, "what the KV block store may hold", unit="MiB", minimum=1)
    host: str = setting("127.0.0.1", "address that the router listens on; everything else stays on 127.0.0.1", check=checks.host)
    port: int = setting(50051, "port of the router; 0: any free one", unit="port", minimum=0, maximum=65535)
    redis_url: str = setting(
        "", "registry, such as redis://host:6379/0; empty: an embedded server that ends with the suite", check=checks.redis_url
    )
    namespace: str = setting("kvrelay", "prefix of every key in Redis; suites that share a Redis differ in it", check=checks.namespace)
    otlp_endpoint: str = setting(
        "", "where spans go (OTLP over gRPC); empty: where $OTEL_EXPORTER_OTLP_ENDPOINT says, or nowhere", check=checks.otlp_endpoint
    )
    dtype: str = setting("bfloat16", "dtype of the weights", choices=("bfloat16", "float32"))
    kv_dtype: str = setting("bfloat16", "dtype of the KV cache", choices=("bfloat16", "float32"))
    quantization: str = setting("none", "int8: 8-bit weights and activations in the linears", choices=("none", "int8"))
    kernels: str = setting("auto", "what computes on CPUs; auto: native where a compiler is at hand", choices=("auto", "native", "torch"))
    device: str = setting("cpu", "torch device of the workers")
    threads: int = setting(
        0, "computing threads a worker, no more than there are cores; 0: the cores divided among the workers", unit="threads", minimum=0
    )
    pin: bool = setting(True, "pin workers to cores of their own, if there are enough")
    kv_cache_mib: int = setting(256, "KV cache of each worker", unit="MiB", minimum=1)
    block_size: int = setting(16, "tokens a KV block; a power of two", unit="tokens", minimum=1, maximum=MAX_BLOCK_SIZE)
    max_num_batched_tokens: int = setting(
        256, "tokens a step computes at most: the chunk budget of prefill", unit="tokens", minimum=1, maximum=1 << 20
    )
    max_num_seqs: int = setting(32, "sequences a step runs at most", unit="sequences", minimum=1)
    max_waiting: int = setting(128, "requests that may wait in one worker; more are refused", unit="requests", minimum=1)
    policy: str = setting("chunked", "how decode workers fill a step", choices=("whole", "chunked", "dynamic", "decode-only"))
    prefill_policy: str = setting("chunked", "how prefill workers fill a step", choices=("whole", "chunked", "dynamic", "prefill-only"))
    tbt_objective_ms: float = setting(
        0.0, "longest step that policy dynamic, and no other, aims at", unit="ms", minimum=0, maximum=3_600_000
    )
    prefill_order: str = setting(
        "fcfs", "whose prompt is computed first: first come, or shortest rest with ageing", choices=("fcfs", "shortest")
    )
    explain_schedule: str = setting("", "folder to which workers explain each step, for `kvrelay schedule`; empty: none")
    profile: str = setting("", "file of `kvrelay profile`: what workers' steps cost here; empty: learnt from the first ones")
    exactness_check: str = setting(
        "warn",
        "what workers do at the start where answers would depend on batch, chunks and cache",
        choices=("warn", "refuse", "off"),
    )
    split_threshold_tokens: int = setting(
        256, "uncached prompt tokens from which a request is split (mode hybrid)", unit="tokens", minimum=0
    )
    lease_ttl_s: float = setting(10.0, "life of a KV lease that nobody renews", unit="s", minimum=0.1)
    start_timeout_s: float = setting(180.0, "how long a service may take until it is ready", unit="s", minimum=0.1)
    drain_grace_s: float = setting(20.0, "how long running requests may go on when the suite stops", unit="s", minimum=0)
    max_restarts: int = setting(5, "restarts of one process within a minute before the suite gives up; 0: never restart", minimum=0)
    log_dir: str = setting("", "folder of the services' logs; empty: a temporary one, removed after a clean stop")
    debug: bool = setting(False, "services check their own invariants and log more")

    def __post_init__(self) -> None:
        """Raises `ConfigError` for what no suite can be built of."""
        for flag, value in (("model", self.model), ("cache-dir", self.cache_dir)):
            if not value:
                raise ConfigError(f"--{flag} must not be empty")
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"--block-size (tokens) must be a power of two, got {self.block_size}")
        if self.redis_url:
            # Imported only for a Redis that is not ours: redis-py takes longer to import than all else here.
            from services.runtime.registry.workers import redis_client

            redis_client(self.redis_url)
        if self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"--max-num-seqs ({self.max_num_seqs}) must not exceed --max-num-batched-tokens ({self.max_num_batched_tokens})"
            )
        if self.mode == "split" and self.prefill < 1:
            raise ConfigError("--mode split needs --prefill 1 or more")
        if self.device != "cpu" and (self.mode != "colocated" or self.store):
            raise ConfigError(f"--device {self.device} needs --mode colocated --no-store: KV there can be neither sent nor received")
        dynamic = "dynamic" in (self.policy, self.prefill_policy)
        if dynamic != (self.tbt_objective_ms > 0):
            raise ConfigError(f"--tbt-objective-ms (ms) must be over 0 with policy dynamic and else 0, got {self.tbt_objective_ms:g}")
