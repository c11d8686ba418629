"""What the engine is asked and what it answers: values only, no torch, so that every room may import it.

The engine is a pure synchronous `EngineCore` (scheduler, block manager, model) owned by one thread, and an `Engine`
facade on the event loop. A request's life:

    submit ── Admitted ──(hold)── resume ── PrefillProgress* ── TokenDrawn* ── Finished ── release
                  │
                  └─ without hold it runs on at once

Pages of a held request, and of one with `prefill_only`, stay reserved from `Admitted` until `resume` and `release`: no reader or
writer of them can ever meet another request's bytes. The pages of one that generates belong to the engine once it runs: they grow
with the answer, and when they run out the newest request loses its own and computes them again. Nobody hears of that: its events
pause. Finished full blocks are published to the prefix cache after the step that computed them (or at `resume` for imported
ones), never before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from kvrelay.errors import KvRelayError
from kvrelay.handle import KvLayout, ModelIdentity
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Token, Usage, WorkerMarks


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt to compute and, unless `prefill_only`, an answer to generate."""

    request_id: str
    """Unique among live requests."""
    token_ids: Sequence[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StopConditions = field(default_factory=StopConditions)
    cache_salt: str = ""
    prefill_only: bool = False
    """Compute the prompt, draw token 0, finish. Its pages may be read until the release."""
    hold: bool = False
    """After `Admitted`, wait for `resume`: somebody imports KV into the reserved pages first."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prompt's pages are reserved, for the first time."""

    pages: Sequence[int]
    """Physical pages of the prompt's blocks, in order, shared cached ones first. Those of blocks before
    `cached_tokens // block_size` are read-only; the rest may be written until `resume`."""
    cached_tokens: int
    """Leading prompt tokens found in this worker's prefix cache: whole blocks, never the whole prompt."""


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """A step computed a chunk of the prompt, for the first time; KV of tokens [0, computed_tokens) is in the pages."""

    computed_tokens: int
    started_ns: int
    """When the step began."""
    ended_ns: int
    batch_tokens: int
    """Tokens of the whole step, other requests' included."""


@dataclass(frozen=True, slots=True)
class TokenDrawn:
    """A token was drawn; `finish` is set on the last."""

    token: Token
    at_ns: int
    finish: FinishReason | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request that ended well."""

    finish_reason: FinishReason | None
    """None for a `prefill_only` request whose first token does not end the answer."""
    usage: Usage
    marks: WorkerMarks


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that did not."""

    error: KvRelayError


EngineEvent = Admitted | PrefillProgress | TokenDrawn | Finished | Failed


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """A snapshot for the registry and for tests. `free + cached + held == total`."""

    running: int = 0
    waiting: int = 0
    prefill_backlog_tokens: int = 0
    decode_backlog_tokens: int = 0
    total_pages: int = 0
    free_pages: int = 0
    cached_pages: int = 0
    """Pages that only the prefix cache holds: evictable."""
    held_pages: int = 0
    claimed_pages: int = 0
    """Pages that admitted requests do not have yet and may need for their answers: with more claims than pages, some will wait."""


@dataclass(frozen=True, slots=True)
class BlockChanges:
    """Blocks that entered and left the prefix cache since the last call, for the prefix registry."""

    stored: Sequence[bytes] = ()
    removed: Sequence[bytes] = ()


class PageBytes(Protocol):
    """The pool's bytes, lent to the relay. One page holds one block of all layers, contiguous."""

    @property
    def page_bytes(self) -> int: ...

    def page_view(self, page: int) -> memoryview:
        """A writable view of one page, format 'B', without a copy. Only a page's holder may touch it."""
        ...


class EngineStream(Protocol):
    """One open request: iterate it for events; leaving its context releases the pages."""

    def __aiter__(self) -> AsyncIterator[EngineEvent]: ...

    async def __anext__(self) -> EngineEvent:
        """The next event; stops after `Finished`; `Failed` is raised as its error."""
        ...

    def resume(self, imported_tokens: int, first_token: int | None = None) -> None:
        """Ends a hold: KV of tokens [0, imported_tokens) is in the pages (0: nothing beyond the cached ones).

        With `first_token`, `imported_tokens` must be the whole prompt; generation goes on from index 1 with that token as
        index 0 (its `TokenDrawn` is not repeated). Without it, prefill computes the rest.
        """
        ...


class EnginePort(Protocol):
    """The engine as the domain code of prefill and decode sees it. All methods are called on the event loop; none blocks."""

    @property
    def identity(self) -> ModelIdentity: ...
    @property
    def layout(self) -> KvLayout: ...
    @property
    def pages(self) -> PageBytes: ...
    @property
    def max_context_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def open(self, request: EngineRequest) -> AbstractAsyncContextManager[EngineStream]:
        """Submits on entry, releases on exit.

        Raises on entry `OverloadedError` when the waiting queue is full, `PromptTooLongError` or `InvalidMaxTokensError` when it
        could never fit the context or the pool, and the other `InvalidRequestError`s for ids out of the vocabulary and the like.
        """
        ...

    def load(self) -> EngineLoad: ...
    def take_block_changes(self) -> BlockChanges: ...
    def check_integrity(self) -> None:
        """Raises AssertionError unless free + cached + held pages are the pool and every reference count is explained."""
        ...
