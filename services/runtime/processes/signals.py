"""SIGTERM as an exception, for work that has something to put away before its process ends."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType


@contextlib.contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Inside, the first SIGTERM raises `SystemExit` as Ctrl-C raises `KeyboardInterrupt`; later ones do not disturb the cleaning up.

    Only a main thread can arrange this: in others nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def unwind(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
