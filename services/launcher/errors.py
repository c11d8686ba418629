"""What can go wrong while a suite starts or stays up."""

from __future__ import annotations

from kvrelay.errors import KvRelayError


class StartError(KvRelayError):
    """A service did not come up, or kept dying; `log_tail` is the end of its log."""

    reason = "START_FAILED"
    code = "UNAVAILABLE"

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.log_tail = log_tail
