"""Where a request's two phases run: a pure policy over what is known of the workers.

Costs are counted in tokens, so that a prefix hit, a queue and a shortage of pages can be weighed against each other: the
worker that has the least to do until this request's prompt is served gets it. Ties go to the lower worker id.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from kvrelay.errors import NoWorkerError
from services.runtime.ports import WorkerInfo, WorkerLoad

REQUEST_COST_TOKENS = 64
"""What each running or waiting request of a decode worker counts: it lengthens every step."""
PAGE_SHORTAGE_FACTOR = 4
"""How much dearer a token without a page is than one to compute: it waits for others to finish."""


class Mode(enum.Enum):
    """Where phases may run."""

    COLOCATED = "colocated"
    """Both on one decode worker, always."""
    SPLIT = "split"
    """Prefill on a prefill worker whenever one is ready."""
    HYBRID = "hybrid"
    """Split where it pays: long uncached prompts and a prefill side that is not swamped."""


class Reason(enum.Enum):
    """Why a plan is local or split, for programs."""

    MODE_COLOCATED = "mode_colocated"
    MODE_SPLIT = "mode_split"
    LONG_PROMPT = "long_prompt"
    SHORT_PROMPT = "short_prompt"
    PREFILL_BUSY = "prefill_busy"
    NO_PREFILL = "no_prefill"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class Policy:
    """What an operator decides."""

    mode: Mode = Mode.HYBRID
    split_threshold_tokens: int = 256
    """Fewer uncached prompt tokens than this are computed where they are decoded (hybrid)."""
    prefill_backlog_limit_tokens: int = 16384
    """With more tokens than this waiting on the best prefill worker, a split would only queue (hybrid)."""


@dataclass(frozen=True, slots=True)
class PromptShape:
    """What placement has to know of a request."""

    tokens: int
    max_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ready worker of the request's revision."""

    worker: WorkerInfo
    load: WorkerLoad
    """As reported, corrected by what this router has sent since."""
    cached_tokens: int = 0
    """Leading prompt tokens whose KV it has."""


@dataclass(frozen=True, slots=True)
class Split:
    """Prefill and decode on two workers."""

    prefill: WorkerInfo
    decode: WorkerInfo


@dataclass(frozen=True, slots=True)
class Local:
    """Both phases on one decode worker."""

    decode: WorkerInfo


@dataclass(frozen=True, slots=True)
class Plan:
    """A route and why it was chosen."""

    route: Split | Local
    reason: Reason
    decision: str
    """One sentence for people."""
    decode_cached_tokens: int = 0
    prefill_cached_tokens: int = 0
    """0 when local."""


@dataclass(frozen=True, slots=True)
class Restriction:
    """What earlier tries of the same request have taught."""

    avoid: Collection[str] = ()
    """Worker ids that are not used again."""
    shun: Collection[str] = ()
    """Worker ids that are used only where there is no other."""
    local_only: bool = False


UNRESTRICTED = Restriction()


def place(
    policy: Policy,
    prompt: PromptShape,
    prefills: Sequence[Candidate],
    decodes: Sequence[Candidate],
    restriction: Restriction = UNRESTRICTED,
) -> Plan:
    """Chooses among candidates of one revision. Raises `NoWorkerError` (role 'decode') when nothing can decode.

    Candidates whose context or pool is too small for this request are passed over.
    """
    decode = _best(_allowed(decodes, restriction, prompt, prompt.tokens + prompt.max_tokens - 1), lambda c: _decode_cost(c, prompt))
    if decode is None:
        raise NoWorkerError("no decode worker is ready for this request", role="decode")
    prefill = _best(_allowed(prefills, restriction, prompt, prompt.tokens), lambda c: _prefill_cost(c, prompt))
    uncached = prompt.tokens - decode.cached_tokens
    name = decode.worker.worker_id
    if policy.mode is Mode.COLOCATED:
        return _local(decode, Reason.MODE_COLOCATED, f"local on {name}: the mode is colocated")
    if restriction.local_only:
        return _local(decode, Reason.FALLBACK, f"local on {name}: an earlier try failed")
    if prefill is None:
        return _local(decode, Reason.NO_PREFILL, f"local on {name}: no prefill worker is ready")
    if policy.mode is Mode.SPLIT:
        return _split(prefill, decode, Reason.MODE_SPLIT, "the mode is split")
    threshold = policy.split_threshold_tokens
    share = f"{uncached} of {prompt.tokens} prompt tokens uncached"
    if uncached < threshold:
        return _local(decode, Reason.SHORT_PROMPT, f"local on {name}: {share}, under the threshold of {threshold}")
    backlog, limit = prefill.load.prefill_backlog_tokens, policy.prefill_backlog_limit_tokens
    if backlog > limit:
        busy = f"{backlog} tokens wait on {prefill.worker.worker_id}, over the limit of {limit}"
        return _local(decode, Reason.PREFILL_BUSY, f"local on {name}: {busy}")
    return _split(prefill, decode, Reason.LONG_PROMPT, f"{share}, not under the threshold of {threshold}")


def _allowed(candidates: Sequence[Candidate], restriction: Restriction, prompt: PromptShape, kv_tokens: int) -> list[Candidate]:
    able = [c for c in candidates if c.worker.worker_id not in restriction.avoid and _fits(c.worker, prompt, kv_tokens)]
    return [c for c in able if c.worker.worker_id not in restriction.shun] or able


def _fits(worker: WorkerInfo, prompt: PromptShape, kv_tokens: int) -> bool:
    pool_tokens = worker.load.total_pages * prompt.block_size
    return prompt.tokens + prompt.max_tokens <= worker.max_context_tokens and (pool_tokens == 0 or kv_tokens <= pool_tokens)


def _best(candidates: Sequence[Candidate], cost: Callable[[Candidate], int]) -> Candidate | None:
    return min(candidates, key=lambda c: (cost(c), c.worker.worker_id), default=None)


def _decode_cost(candidate: Candidate, prompt: PromptShape) -> int:
    load = candidate.load
    pages_short = 0
    if load.total_pages > 0:
        pages_short = max(0, _pages(prompt) - candidate.cached_tokens // prompt.block_size - load.available_pages)
    return (
        prompt.tokens
        - candidate.cached_tokens
        + load.prefill_backlog_tokens
        + REQUEST_COST_TOKENS * (load.running + load.waiting)
        + PAGE_SHORTAGE_FACTOR * prompt.block_size * pages_short
    )


def _prefill_cost(candidate: Candidate, prompt: PromptShape) -> int:
    return prompt.tokens - candidate.cached_tokens + candidate.load.prefill_backlog_tokens


def _pages(prompt: PromptShape) -> int:
    return -(-(prompt.tokens + prompt.max_tokens) // prompt.block_size)


def _local(decode: Candidate, reason: Reason, decision: str) -> Plan:
    return Plan(Local(decode.worker), reason, decision, decode_cached_tokens=decode.cached_tokens)


def _split(prefill: Candidate, decode: Candidate, reason: Reason, why: str) -> Plan:
    decision = f"split over {prefill.worker.worker_id} and {decode.worker.worker_id}: {why}"
    return Plan(Split(prefill.worker, decode.worker), reason, decision, decode.cached_tokens, prefill.cached_tokens)
