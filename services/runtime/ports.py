"""Protocols and values between domain code and the world; adapters put them on gRPC and Redis, tests on fakes."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.handle import KvHandle, KvLayout, ModelIdentity
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Token, TransferStats, Usage, WorkerMarks


@dataclass(frozen=True, slots=True)
class Topology:
    """Where a worker runs; empty strings are unknown."""

    host: str = ""
    rack: str = ""
    zone: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """What a worker has to do and to give."""

    running: int = 0
    waiting: int = 0
    prefill_backlog_tokens: int = 0
    decode_backlog_tokens: int = 0
    total_pages: int = 0
    available_pages: int = 0
    """Free and evictable, less what admitted requests may still need for their answers."""
    held_handles: int = 0


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One registered worker or store. `identity` and `layout` are None for a store."""

    worker_id: str
    role: str
    """'prefill', 'decode' or 'kvstore'."""
    address: str
    incarnation: int
    """Drawn at start from the wall clock in nanoseconds: a later life is greater."""
    state: str = "ready"
    """'ready' or 'draining'."""
    identity: ModelIdentity | None = None
    layout: KvLayout | None = None
    max_context_tokens: int = 0
    vocab_size: int = 0
    topology: Topology = field(default_factory=Topology)
    load: WorkerLoad = field(default_factory=WorkerLoad)


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is asked to do."""

    request_id: str
    fingerprint: bytes
    token_ids: Sequence[int]
    sampling: SamplingParams
    stop: StopConditions
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class PrefillQueued:
    """In line for pages."""


@dataclass(frozen=True, slots=True)
class PrefillAccepted:
    """The prompt has its pages. Only from here on can a decode worker be asked for some."""

    handle: KvHandle


@dataclass(frozen=True, slots=True)
class FirstToken:
    token: Token


@dataclass(frozen=True, slots=True)
class PrefillDone:
    finish_reason: FinishReason | None
    """Set when the first token already ends the answer."""
    usage: Usage
    marks: WorkerMarks


PrefillEvent = PrefillQueued | PrefillAccepted | FirstToken | PrefillDone


@dataclass(frozen=True, slots=True)
class DecodeAccepted:
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class KvReady:
    stats: TransferStats


@dataclass(frozen=True, slots=True)
class DecodeToken:
    token: Token


@dataclass(frozen=True, slots=True)
class DecodeDone:
    finish_reason: FinishReason
    usage: Usage
    marks: WorkerMarks
    transfer: TransferStats | None = None


DecodeEvent = DecodeAccepted | KvReady | DecodeToken | DecodeDone


class WorkersPort(Protocol):
    """The router's way to workers. Errors arrive as `kvrelay.errors`; a dead or unreachable worker as `WorkerLostError`.

    Closing a generator early cancels the call on the worker. `timeout_s` is what remains of the request's deadline.
    """

    def prefill(self, worker: WorkerInfo, job: Job, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]: ...

    def decode(self, worker: WorkerInfo, job: Job, handle: KvHandle | None, *, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]: ...

    async def tokenizer_files(self, worker: WorkerInfo, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content, for every tokenizer file the worker has."""
        ...


@dataclass(frozen=True, slots=True)
class FleetSnapshot:
    """Everything the registry knows, at connection and after every gap: replaces what was known before."""

    workers: Sequence[WorkerInfo]
    holders: Mapping[str, Sequence[bytes]]
    """worker_id to the block hashes its present life has published."""


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker registered or renewed (new load, new state)."""

    worker: WorkerInfo


@dataclass(frozen=True, slots=True)
class WorkerGone:
    """A worker deregistered or let its entry expire."""

    worker_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class BlocksChanged:
    """A worker's prefix cache changed."""

    worker_id: str
    incarnation: int
    stored: Sequence[bytes]
    removed: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RegistryLost:
    """Redis does not answer: the view ages from now on. A `FleetSnapshot` follows when it is back."""


FleetEvent = FleetSnapshot | WorkerSeen | WorkerGone | BlocksChanged | RegistryLost


class FleetFeedPort(Protocol):
    """The router's side of the registry: never ends by itself, never raises for a lost Redis (it reports `RegistryLost` and goes on)."""

    def events(self) -> AsyncIterator[FleetEvent]: ...
