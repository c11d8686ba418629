"""What can go wrong while a suite starts or stays up. Never on any wire, hence not in `kvrelay.errors`."""

from __future__ import annotations


class StartError(Exception):
    """A service did not come up, or kept dying; `log_tail` is the end of its log."""

    def __init__(self, message: str, log_tail: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.log_tail = log_tail
