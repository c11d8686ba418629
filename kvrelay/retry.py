"""When a request that got no answer yet may be sent again. Pure: the caller sleeps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvrelay.errors import KvRelayError, UnavailableError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Full-jitter exponential backoff with few tries. Only `UnavailableError`s count (overload, draining, unreachable)."""

    tries: int = 2
    """Attempts in all, the first included."""
    base_s: float = 0.1
    """Upper bound of the first delay; doubles with every attempt."""
    max_s: float = 2.0
    """No delay is longer; a server that asks for more is not retried."""
    draw: Callable[[], float] = random.random
    """Uniform in [0, 1)."""

    def delay_s(self, attempt: int, error: KvRelayError) -> float | None:
        """How long to wait after failed attempt `attempt` (from 1); None: give up. At least the server's own hint."""
        if attempt >= self.tries or not isinstance(error, UnavailableError):
            return None
        hint_s = error.retry_after_s or 0.0
        if hint_s > self.max_s:
            return None
        return min(self.max_s, hint_s + self.draw() * self.base_s * 2.0 ** (attempt - 1))
