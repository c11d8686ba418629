"""What the router says of its fleet and its models: frozen values, as `AsyncClient.fleet` and `list_models` return them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvrelay.handle import KvLayout, ModelIdentity


@dataclass(frozen=True, slots=True)
class LoadView:
    """What a worker has to do and to give, as it said at its last heartbeat."""

    running: int = 0
    """Sequences."""
    waiting: int = 0
    """Requests waiting for pages."""
    prefill_backlog_tokens: int = 0
    decode_backlog_tokens: int = 0
    total_pages: int = 0
    available_pages: int = 0
    """Free and evictable."""
    held_handles: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker or a store."""

    worker_id: str
    role: str
    """'prefill', 'decode' or 'kvstore'."""
    address: str
    state: str
    """'ready', 'draining' or 'lost'."""
    incarnation: int
    identity: ModelIdentity | None
    """None for a store."""
    layout: KvLayout | None
    load: LoadView


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field of ModelIdentity or KvLayout with both values."""

    field: str
    prefill_value: str
    decode_value: str


@dataclass(frozen=True, slots=True)
class Incompatibility:
    """Two workers that are never paired."""

    prefill_worker: str
    decode_worker: str
    differences: Sequence[FieldDifference]


@dataclass(frozen=True, slots=True)
class FleetView:
    """Every worker the router knows."""

    workers: Sequence[WorkerView]
    incompatibilities: Sequence[Incompatibility]
    mode: str
    """'hybrid', 'split' or 'colocated'."""
    registry_connected: bool
    view_age_s: float
    """Since the last word from the registry."""
    in_flight: int
    """Requests."""


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model the router can be asked for."""

    name: str
    identity: ModelIdentity
    max_context_tokens: int
    """Prompt and answer together."""
    ready: bool
    missing_role: str
    """Which role lacks a worker when not ready."""
    prefill_workers: int
    decode_workers: int
