"""Logs as JSON lines on stderr, each with the trace it belongs to. stdout is left to the ready line."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

from services.runtime.telemetry.tracing import current_span_id, current_trace_id

_STANDARD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, `fixed` members, trace and span id where a span is current, what was given
    as `extra`, and the traceback as one string."""

    def __init__(self, fixed: dict[str, str] | None = None) -> None:
        super().__init__()
        self._fixed = fixed or {}

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fixed,
        }
        trace_id = current_trace_id()
        if trace_id:
            line |= {"trace_id": trace_id, "span_id": current_span_id()}
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def setup_logging(level: str = "info", *, service: str = "", worker_id: str = "", stream: TextIO | None = None) -> None:
    """Sends every logger's records of `level` and above to stderr (or `stream`); replaces what was set up before."""
    fixed = {name: value for name, value in (("service", service), ("worker_id", worker_id)) if value}
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(fixed))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # A collector that is down is worth a line now and then, not one for every batch of spans.
    exporter = logging.getLogger("opentelemetry.exporter.otlp.proto.grpc.exporter")
    exporter.filters[:] = [_OncePer(30.0)]


class _OncePer(logging.Filter):
    """Lets one record through per interval."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._next_s:
            return False
        self._next_s = record.created + self._seconds
        return True
