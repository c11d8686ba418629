"""Keeps a suite up until it is told to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from kvrelay.errors import ConfigError, KvRelayError
from services.launcher.errors import StartError
from services.launcher.settings import SuiteSettings
from services.launcher.suite import RunningSuite, running_suite

EXIT_OK, EXIT_FAILED, EXIT_MISCONFIGURED, EXIT_INTERRUPTED = 0, 1, 2, 130


class StopSignals:
    """What SIGINT and SIGTERM mean. While the suite starts: give up. The first while it serves: drain. Another: end at once."""

    def __init__(self, starting: asyncio.Task[int]) -> None:
        self._starting = starting
        self._suite: RunningSuite | None = None
        self.hard = False
        """Whether processes were killed rather than drained."""
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once the suite should drain."""

    def serving(self, suite: RunningSuite) -> None:
        self._suite = suite

    def on_signal(self) -> None:
        if self._suite is not None and not self.asked.done():
            self.asked.set_result(None)
        elif not self.hard:
            self.hard = True
            if self._suite is None:
                self._starting.cancel()
            else:
                self._suite.supervisor.kill()


async def serve(settings: SuiteSettings, environ: Mapping[str, str], out: TextIO, err: TextIO) -> int:
    """Runs a suite until SIGINT or SIGTERM, then drains it. Returns the exit code; whatever happens, no process is left."""

    def say(text: str) -> None:
        out.write(text + "\n")
        out.flush()

    task = asyncio.current_task()
    assert task is not None
    signals, loop = StopSignals(task), asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, signals.on_signal)
    try:
        await _serve(settings, environ, say, signals)
    except (KvRelayError, StartError) as error:
        err.write(f"{getattr(error, 'log_tail', '')}kvrelay: {error.message}\n")
        return EXIT_MISCONFIGURED if isinstance(error, ConfigError) else EXIT_FAILED
    except asyncio.CancelledError:
        if not signals.hard:
            raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
    if signals.hard:
        err.write("kvrelay: stopped at once\n")
        return EXIT_INTERRUPTED
    say("stopped")
    return EXIT_OK


async def _serve(settings: SuiteSettings, environ: Mapping[str, str], say: Callable[[str], None], signals: StopSignals) -> None:
    async with running_suite(settings, environ, say) as suite:
        signals.serving(suite)
        say(f"kvrelay serves {suite.model_name} at {suite.address} (mode {settings.mode}, Redis {suite.redis_url})")
        say(f"logs: {suite.supervisor.log_dir}; try: kvrelay generate --target {suite.address} --chat 'Why does the sea have tides?'")
        endings: list[asyncio.Future[Any]] = [signals.asked, suite.supervisor.failure]
        await asyncio.wait(endings, return_when=asyncio.FIRST_COMPLETED)
        if suite.supervisor.failure.done():
            raise suite.supervisor.failure.result()
        say(f"stopping: running requests may finish within {settings.drain_grace_s:g} s; Ctrl-C again stops at once")
