"""What every `python -m services.<role>` does before and after serving."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

from kvrelay.errors import KvRelayError
from services.runtime.processes.lifecycle import exit_with_parent
from services.runtime.processes.settings import Version, load_settings
from services.runtime.processes.version import version_text
from services.runtime.telemetry.logs import setup_logging


class ProcessSettings(Protocol):
    """What this module itself looks at."""

    @property
    def exit_with_parent(self) -> bool: ...
    @property
    def log_level(self) -> str: ...
    @property
    def debug(self) -> bool: ...


Settings = TypeVar("Settings", bound=ProcessSettings)


def run_service(
    role: str,
    settings_type: type[Settings],
    serve: Callable[[Settings], Coroutine[Any, Any, None]],
    version: Version = version_text,
) -> None:
    """Reads flags and environment, serves until a signal; exits 0 after a drain, 1 with one line for an error with a name."""
    prog = f"python -m services.{role}"
    settings = load_settings(settings_type, sys.argv[1:], _with_otel_endpoint(os.environ), prog, version)
    if settings.exit_with_parent:
        exit_with_parent()
    setup_logging(settings.log_level)
    try:
        asyncio.run(serve(settings), debug=settings.debug)
    except* KvRelayError as group:
        for error in _leaves(group):
            sys.stderr.write(f"{prog}: {error}\n")
        raise SystemExit(1) from None


def _with_otel_endpoint(environ: Mapping[str, str]) -> dict[str, str]:
    """OpenTelemetry's own variable stands in where kvrelay's is not set."""
    return {"KVRELAY_OTLP_ENDPOINT": environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""), **environ}


class _Over(Exception):
    """Ends a task group whose tasks run until cancelled."""


@asynccontextmanager
async def background() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose tasks are cancelled when the body is done; one that fails ends the body."""
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
            raise _Over
    except* _Over:
        pass


def _leaves(group: BaseExceptionGroup[KvRelayError]) -> Iterator[KvRelayError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
