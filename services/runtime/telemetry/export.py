"""Spans on their way out: what a collector took, whether it still answers, and what was lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

STUCK_S = 0.5
"""An export that takes longer has nobody at its other end."""


class WatchedExporter(SpanExporter):
    """An exporter that counts what it got rid of, and knows whether its collector answers. Used by one thread, looked at by others."""

    def __init__(self, inner: SpanExporter, clock: Callable[[], float] = time.monotonic) -> None:
        self._inner = inner
        self._clock = clock
        self._began: float | None = None
        self._failed = False
        self.exported = 0
        """Spans that the collector took."""

    @property
    def answers(self) -> bool:
        """False while an export hangs, and after one that failed; True before the first."""
        began = self._began
        return not self._failed and (began is None or self._clock() - began < STUCK_S)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self._began = self._clock()
        try:
            result = self._inner.export(spans)
        finally:
            self._began = None
        self._failed = result is not SpanExportResult.SUCCESS
        if not self._failed:
            self.exported += len(spans)
        return result

    def shutdown(self) -> None:
        """An export under way gives up at once."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


class SpanCount(SpanProcessor):
    """How many spans have ended that were meant for the collector."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.ended = 0

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            with self._lock:
                self.ended += 1

    def shutdown(self) -> None:
        pass

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True
