"""The router's view of its workers: built from fleet events alone, never waiting for anybody.

A *revision* is a model version that can be told apart: name, fingerprint and layout. Only workers of one revision are ever
paired, and a request stays on its revision for its whole life.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvrelay.errors import NoWorkerError, UnknownModelError
from kvrelay.handle import KvLayout, ModelIdentity, differences
from services.router.load import Dispatch, LoadCorrections
from services.router.placement import Candidate, Mode
from services.runtime.ports import BlocksChanged, FleetEvent, FleetSnapshot, RegistryLost, WorkerGone, WorkerInfo, WorkerLoad, WorkerSeen

ROLES = ("prefill", "decode")
"""Roles that serve a model."""


@dataclass(frozen=True, slots=True)
class Revision:
    """One version of one model, arranged in one way."""

    model: str
    fingerprint: bytes
    layout: KvLayout
    tokenizer_digest: str
    """Part of what the fingerprint covers."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the ready workers of a revision can take."""

    max_context_tokens: int
    """Prompt and answer together, on the roomiest decode worker."""
    vocab_size: int


@dataclass(frozen=True, slots=True)
class ModelState:
    """How a model stands, by the revision that new requests get."""

    identity: ModelIdentity
    max_context_tokens: int
    missing_role: str
    """The role that lacks a ready worker; '' when complete for the mode. Without 'prefill' requests are served locally."""
    prefill_workers: int
    decode_workers: int


@dataclass(frozen=True, slots=True)
class IncompatiblePair:
    """Two workers of the same model name that are never paired."""

    prefill_worker: str
    decode_worker: str
    differences: Sequence[tuple[str, str, str]]
    """(field, prefill's value, decode's value)"""


@dataclass(frozen=True, slots=True)
class FleetTimes:
    """How long the view trusts what. Seconds."""

    down_s: float = 3.0
    """How long a worker that failed a call is avoided."""
    prefix_trust_s: float = 30.0
    """How long prefix holders count once the registry is lost; afterwards only load does."""


@dataclass(slots=True)
class _Entry:
    worker: WorkerInfo
    revision: Revision | None
    blocks: set[bytes] = field(default_factory=set)
    corrections: LoadCorrections = field(default_factory=LoadCorrections)
    down_until: float = float("-inf")


class Fleet:
    """Mutable and synchronous; `now` is a monotonic clock's seconds."""

    def __init__(self, times: FleetTimes = FleetTimes()) -> None:
        self._times = times
        self._entries: dict[str, _Entry] = {}
        self._has_snapshot = False
        self._lost_at: float | None = None
        self._last_word: float | None = None

    # --- events ----------------------------------------------------------------------------------------------------------------

    def apply(self, event: FleetEvent, now: float) -> None:
        """Takes one event; those of an earlier incarnation than the one known change nothing."""
        match event:
            case RegistryLost():
                self._lost_at = now if self._lost_at is None else self._lost_at
                return
            case FleetSnapshot():
                self._replace(event, now)
            case WorkerSeen(worker):
                self._see(worker, now)
            case WorkerGone(worker_id, incarnation):
                entry = self._entries.get(worker_id)
                if entry is not None and entry.worker.incarnation <= incarnation:
                    del self._entries[worker_id]
            case BlocksChanged(worker_id, incarnation, stored, removed):
                entry = self._entries.get(worker_id)
                if entry is not None and entry.worker.incarnation == incarnation:
                    entry.blocks.update(stored)
                    entry.blocks.difference_update(removed)
        self._last_word = now

    def _replace(self, snapshot: FleetSnapshot, now: float) -> None:
        self._has_snapshot, self._lost_at = True, None
        listed = {worker.worker_id for worker in snapshot.workers}
        self._entries = {worker_id: entry for worker_id, entry in self._entries.items() if worker_id in listed}
        for worker in snapshot.workers:
            self._see(worker, now)
            entry = self._entries[worker.worker_id]
            if entry.worker.incarnation == worker.incarnation:
                entry.blocks = set(snapshot.holders.get(worker.worker_id, ()))

    def _see(self, worker: WorkerInfo, now: float) -> None:
        entry = self._entries.get(worker.worker_id)
        if entry is not None and worker.incarnation < entry.worker.incarnation:
            return
        if entry is None or worker.incarnation > entry.worker.incarnation:
            entry = self._entries[worker.worker_id] = _Entry(worker, _revision(worker))
        elif entry.worker.identity != worker.identity or entry.worker.layout != worker.layout:
            entry.revision = _revision(worker)
        entry.worker = worker
        entry.corrections.reported(now)

    # --- what the registry does not know ---------------------------------------------------------------------------------------

    def mark_down(self, worker: WorkerInfo, now: float) -> None:
        """A call to it failed: avoid this life of it for a while, without waiting for its entry to expire."""
        entry = self._entries.get(worker.worker_id)
        if entry is not None and entry.worker.incarnation == worker.incarnation:
            entry.down_until = now + self._times.down_s

    def dispatch(self, worker: WorkerInfo, now: float, *, prefill_tokens: int, pages: int) -> Dispatch:
        """Counts a request just sent to a worker into its load until it reports it itself. Close what is returned."""
        entry = self._entries.get(worker.worker_id)
        if entry is None or entry.worker.incarnation != worker.incarnation:
            return Dispatch(LoadCorrections(), now, prefill_tokens=prefill_tokens, pages=pages)
        return Dispatch(entry.corrections, now, prefill_tokens=prefill_tokens, pages=pages)

    # --- questions -------------------------------------------------------------------------------------------------------------

    @property
    def has_snapshot(self) -> bool:
        return self._has_snapshot

    @property
    def connected(self) -> bool:
        return self._has_snapshot and self._lost_at is None

    def view_age_s(self, now: float) -> float:
        """Since the last word from the registry; 0 before the first."""
        return 0.0 if self._last_word is None else max(0.0, now - self._last_word)

    def workers(self, now: float) -> list[WorkerInfo]:
        """Everybody known, stores too; those on the down list in state 'lost'."""
        found = (replace(e.worker, state="lost") if now < e.down_until else e.worker for e in self._entries.values())
        return sorted(found, key=lambda worker: (worker.role, worker.worker_id))

    def models(self) -> list[str]:
        return sorted({e.revision.model for e in self._entries.values() if e.revision is not None})

    def resolve_model(self, name: str) -> str:
        """The model `name` asks for; an empty name asks for the only one. Raises `UnknownModelError` or `NoWorkerError`."""
        known = self.models()
        if name in known:
            return name
        if not known:
            raise NoWorkerError("no worker has registered yet", role="decode")
        if not name and len(known) == 1:
            return known[0]
        text = f"no model {name!r}" if name else "several models are served: name one"
        raise UnknownModelError(f"{text}; known: {', '.join(known)}", model=name, known=",".join(known), field="model")

    def choose_revision(self, model: str, mode: Mode, now: float) -> Revision:
        """The version new requests for `model` get: one with every role the mode needs, then most ready workers, then newest.

        Workers on the down list do not count while any version can do without them. Raises `NoWorkerError`.
        """
        entries = self._ready_of(model)
        up = [e for e in entries if now >= e.down_until]
        revision = _best_revision(up, mode) or _best_revision(entries, mode)
        if revision is None:
            raise NoWorkerError(f"no decode worker is ready for model {model!r}", role="decode", model=model)
        return revision

    def model_state(self, model: str, mode: Mode) -> ModelState:
        """Of one of `models()`; where nothing can decode it, of the version of its last comer."""
        revision = _best_revision(self._ready_of(model), mode)
        entries = [e for e in self._entries.values() if e.revision is not None and e.revision.model == model]
        if revision is not None:
            entries = [e for e in entries if e.revision == revision]
        newest = max((e.worker for e in entries), key=lambda worker: worker.incarnation)
        assert newest.identity is not None
        roles = [e.worker.role for e in entries if e.worker.state == "ready"]
        missing = [role for role in ("decode", "prefill") if role in _needed(mode) and role not in roles]
        return ModelState(
            identity=newest.identity,
            max_context_tokens=max(_context_tokens(e.worker) for e in entries),
            missing_role=missing[0] if missing else "",
            prefill_workers=roles.count("prefill"),
            decode_workers=roles.count("decode"),
        )

    def ready(self, revision: Revision, role: str) -> list[WorkerInfo]:
        """Workers that take new requests, those on the down list included."""
        return [e.worker for e in self._ready_entries(revision, role)]

    def limits(self, revision: Revision) -> Limits:
        """Raises `NoWorkerError` when no decode worker is ready."""
        workers = self.ready(revision, "decode")
        if not workers:
            raise NoWorkerError(f"no decode worker is ready for model {revision.model!r}", role="decode", model=revision.model)
        return Limits(max(map(_context_tokens, workers)), min(worker.vocab_size for worker in workers))

    def tokenizers(self) -> dict[str, list[WorkerInfo]]:
        """Every tokenizer's digest, with the ready workers that have it."""
        found: dict[str, list[WorkerInfo]] = {}
        for entry in self._entries.values():
            if entry.revision is not None and entry.worker.state == "ready":
                found.setdefault(entry.revision.tokenizer_digest, []).append(entry.worker)
        return found

    def candidates(self, revision: Revision, role: str, hashes: Sequence[bytes], prompt_tokens: int, now: float) -> list[Candidate]:
        """Ready workers with corrected load and prefix hit. Down ones only for 'decode' and only when all are: nothing can
        stand in for a decode worker, so a try is better than none."""
        entries = self._ready_entries(revision, role)
        up = [e for e in entries if now >= e.down_until]
        if not up and role == "decode":
            up = entries
        size = revision.layout.block_size
        # An engine always computes at least one token.
        most = max(0, prompt_tokens - 1) // size * size
        return [Candidate(e.worker, e.corrections.apply(e.worker.load), min(most, self._cached_blocks(e, hashes, now) * size)) for e in up]

    def corrected_load(self, worker_id: str) -> WorkerLoad | None:
        """A worker's load with what this router has sent since; None for an unknown worker."""
        entry = self._entries.get(worker_id)
        return None if entry is None else entry.corrections.apply(entry.worker.load)

    def cached_blocks(self, worker_id: str, hashes: Sequence[bytes], now: float) -> int:
        """How many leading blocks of a chain the present life of a worker has."""
        entry = self._entries.get(worker_id)
        return 0 if entry is None else self._cached_blocks(entry, hashes, now)

    def incompatibilities(self) -> list[IncompatiblePair]:
        """Every prefill and decode worker of one model name that differ, with what differs."""
        live = sorted((e.worker for e in self._entries.values() if e.revision is not None), key=lambda worker: worker.worker_id)
        pairs = []
        for prefill in (worker for worker in live if worker.role == "prefill"):
            for decode in (worker for worker in live if worker.role == "decode"):
                # A field that identity and layout both have is named once.
                found = list(dict.fromkeys(_differences(prefill, decode)))
                if found:
                    pairs.append(IncompatiblePair(prefill.worker_id, decode.worker_id, found))
        return pairs

    # --- inside ----------------------------------------------------------------------------------------------------------------

    def _ready_of(self, model: str) -> list[_Entry]:
        ready = (e for e in self._entries.values() if e.worker.state == "ready")
        return [e for e in ready if e.revision is not None and e.revision.model == model]

    def _ready_entries(self, revision: Revision, role: str) -> list[_Entry]:
        return [e for e in self._entries.values() if e.revision == revision and e.worker.role == role and e.worker.state == "ready"]

    def _cached_blocks(self, entry: _Entry, hashes: Sequence[bytes], now: float) -> int:
        if self._lost_at is not None and now - self._lost_at > self._times.prefix_trust_s:
            return 0
        for count, block in enumerate(hashes):
            if block not in entry.blocks:
                return count
        return len(hashes)


def _revision(worker: WorkerInfo) -> Revision | None:
    if worker.role not in ROLES or worker.identity is None or worker.layout is None:
        return None
    return Revision(worker.identity.model, worker.identity.fingerprint, worker.layout, worker.identity.tokenizer_digest)


def _best_revision(entries: Iterable[_Entry], mode: Mode) -> Revision | None:
    """Among ready workers; None when none of them decodes."""
    workers: dict[Revision, list[WorkerInfo]] = {}
    for entry in entries:
        if entry.revision is not None:
            workers.setdefault(entry.revision, []).append(entry.worker)

    def rank(revision: Revision) -> tuple[bool, int, int, bytes]:
        found = workers[revision]
        complete = _needed(mode) <= {worker.role for worker in found}
        # The oldest life tells when a version came: a restart does not make it new.
        return complete, len(found), min(worker.incarnation for worker in found), revision.fingerprint

    able = [revision for revision, found in workers.items() if any(worker.role == "decode" for worker in found)]
    return max(able, key=rank, default=None)


def _needed(mode: Mode) -> set[str]:
    return {"decode"} if mode is Mode.COLOCATED else {"prefill", "decode"}


def _context_tokens(worker: WorkerInfo) -> int:
    """A request never fits more than the pool, whatever the model could do; the last token needs no KV."""
    if worker.load.total_pages > 0 and worker.layout is not None:
        return min(worker.max_context_tokens, worker.load.total_pages * worker.layout.block_size + 1)
    return worker.max_context_tokens


def _differences(prefill: WorkerInfo, decode: WorkerInfo) -> Iterable[tuple[str, str, str]]:
    if prefill.identity is None or decode.identity is None or prefill.layout is None or decode.layout is None:
        return
    if prefill.identity.model == decode.identity.model:
        yield from differences(prefill.identity, decode.identity)
        yield from differences(prefill.layout, decode.layout)
