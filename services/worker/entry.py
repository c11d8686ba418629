"""What `python -m services.prefill` and `services.decode` do before and after serving."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator

from kvrelay.errors import KvRelayError
from services.runtime.config import load_settings
from services.runtime.logging_setup import setup_logging
from services.runtime.process import exit_with_parent
from services.worker.settings import WorkerSettings


def run_worker(role: str, serve: Callable[[WorkerSettings], Awaitable[None]]) -> None:
    """Reads flags and environment, serves until a signal, exits: 0 after a drain, 1 with one line for an error with a name."""
    prog = f"python -m services.{role}"
    settings = load_settings(WorkerSettings, sys.argv[1:], os.environ, prog)
    if settings.exit_with_parent:
        exit_with_parent()
    setup_logging(settings.log_level)
    try:
        asyncio.run(_awaited(serve(settings)))
    except* KvRelayError as group:
        for error in _leaves(group):
            sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(1) from None


async def _awaited(serving: Awaitable[None]) -> None:
    await serving


def _leaves(group: BaseExceptionGroup[KvRelayError]) -> Iterator[KvRelayError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
