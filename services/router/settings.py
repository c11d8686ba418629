"""What a router can be told."""

from __future__ import annotations

from dataclasses import dataclass

from services.runtime.processes import checks
from services.runtime.processes.settings import setting


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """The public door of a suite: admits, tokenises, places and follows requests. Holds no model."""

    host: str = setting("127.0.0.1", "address to listen on", check=checks.host)
    port: int = setting(50051, "port to listen on; 0: any free one", minimum=0, maximum=65535)
    advertise: str = setting("", "host named in the ready line; empty: the listening address", check=checks.host)
    redis_url: str = setting("redis://127.0.0.1:6379/0", "registry", check=checks.redis_url)
    namespace: str = setting("kvrelay", "prefix of every key in Redis", check=checks.namespace)
    worker_id: str = setting("", "name of this router in traces; empty: a random one")
    mode: str = setting("hybrid", "where a request's two phases run", choices=("hybrid", "split", "colocated"))
    split_threshold_tokens: int = setting(256, "uncached prompt tokens from which on a request is split (hybrid)", unit="tokens", minimum=0)
    prefill_backlog_limit_tokens: int = setting(
        16384, "with more tokens than this waiting for prefill, requests stay local (hybrid)", unit="tokens", minimum=0
    )
    max_in_flight: int = setting(256, "requests served at once", unit="requests", minimum=1)
    max_waiting: int = setting(512, "requests that may wait for a place; more are refused with a retry hint", unit="requests", minimum=0)
    max_wait_s: float = setting(10.0, "how long a request may wait for a place", unit="s", minimum=0.0)
    max_tries: int = setting(3, "plans a request gets until its last error is reported", minimum=1, maximum=10)
    accept_timeout_s: float = setting(15.0, "what a prefill worker gets to accept a request", unit="s", minimum=0.1)
    worker_down_s: float = setting(3.0, "how long a worker that failed a call is avoided", unit="s", minimum=0.0)
    tokenizer_timeout_s: float = setting(30.0, "what a worker gets to send its tokenizer", unit="s", minimum=0.1)
    default_timeout_s: float = setting(600.0, "deadline of requests that bring none", unit="s", minimum=0.1)
    max_message_bytes: int = setting(4 << 20, "largest request accepted", unit="bytes", minimum=1024)
    drain_grace_s: float = setting(20.0, "how long running requests may go on at SIGTERM", unit="s", minimum=0.0)
    otlp_endpoint: str = setting("", "where spans go (OTLP over gRPC); empty: nowhere", check=checks.otlp_endpoint)
    log_level: str = setting("INFO", "least severe level that is logged", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    exit_with_parent: bool = setting(False, "die when the process that started this one does")
    debug: bool = setting(False, "report callbacks that block the event loop")
