"""The deadline of the request being served, carried in a context variable and so into every task it starts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_deadline_s: ContextVar[float] = ContextVar("deadline_s", default=math.inf)
"""On `time.monotonic()`."""


def remaining_s(at_most_s: float = math.inf) -> float:
    """Seconds left for the current request, never negative and never over `at_most_s`; infinite outside of any request.

    Pass `at_most_s` where the value goes on to grpc, which has no infinite timeout.
    """
    return min(at_most_s, max(0.0, _deadline_s.get() - time.monotonic()))


@contextmanager
def deadline_scope(seconds: float) -> Iterator[None]:
    """Within it `remaining_s` counts down from `seconds`, or from the enclosing deadline if that is nearer.

    Only tells; whoever must be stopped uses `asyncio.timeout(remaining_s())`.
    """
    before = _deadline_s.get()
    _deadline_s.set(min(before, time.monotonic() + seconds))
    try:
        yield
    finally:
        _deadline_s.set(before)
