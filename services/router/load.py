"""What this router has sent to a worker since the worker last said how busy it is.

Workers report every few seconds. Between two reports a burst would pile up on whoever looked idle, so each request sent
counts at once, and each one that ended counts back, until the next report replaces both.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from services.runtime.ports import WorkerLoad

REPORT_LAG_S = 0.25
"""A report may have been written this long before it arrives: what was sent meanwhile is not in it yet."""
MAX_CHANGES = 256
"""Changes kept one by one; older ones are merged (the registry may be silent for long)."""


@dataclass(frozen=True, slots=True)
class _Change:
    at: float
    requests: int
    prefill_tokens: int
    pages: int


class LoadCorrections:
    """Changes to one worker's reported load."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: deque[_Change] = deque()

    def add(self, now: float, *, requests: int = 0, prefill_tokens: int = 0, pages: int = 0) -> None:
        self._changes.append(_Change(now, requests, prefill_tokens, pages))
        if len(self._changes) > MAX_CHANGES:
            first, second = self._changes.popleft(), self._changes.popleft()
            merged = _Change(
                second.at,
                first.requests + second.requests,
                first.prefill_tokens + second.prefill_tokens,
                first.pages + second.pages,
            )
            self._changes.appendleft(merged)

    def reported(self, now: float) -> None:
        """A report has arrived: it holds everything but the most recent changes."""
        while self._changes and self._changes[0].at <= now - REPORT_LAG_S:
            self._changes.popleft()

    def apply(self, load: WorkerLoad) -> WorkerLoad:
        if not self._changes:
            return load
        pages = load.available_pages - sum(change.pages for change in self._changes)
        return replace(
            load,
            running=max(0, load.running + sum(change.requests for change in self._changes)),
            prefill_backlog_tokens=max(0, load.prefill_backlog_tokens + sum(change.prefill_tokens for change in self._changes)),
            available_pages=min(max(0, pages), max(load.total_pages, load.available_pages)),
        )


class Dispatch:
    """One request on its way to or on a worker."""

    __slots__ = ("_corrections", "_open", "_pages", "_prefill_tokens")

    def __init__(self, corrections: LoadCorrections, now: float, *, prefill_tokens: int, pages: int) -> None:
        self._corrections = corrections
        self._prefill_tokens = prefill_tokens
        self._pages = pages
        self._open = True
        corrections.add(now, requests=1, prefill_tokens=prefill_tokens, pages=pages)

    def prefilled(self, now: float) -> None:
        """Its prompt is computed. May be called more than once."""
        if self._open and self._prefill_tokens:
            self._corrections.add(now, prefill_tokens=-self._prefill_tokens)
            self._prefill_tokens = 0

    def close(self, now: float) -> None:
        """The worker has it no more. May be called more than once."""
        if self._open:
            self._open = False
            self._corrections.add(now, requests=-1, prefill_tokens=-self._prefill_tokens, pages=-self._pages)
