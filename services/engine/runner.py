"""The thread that owns the device: the only one that touches the engine core, and the only one that runs torch.

It meets the event loop at two points. Messages come in through one queue, in order; each open request sends at most three
(add, resume, release), so the queue is bounded by the requests that are open or not yet freed, and those by the waiting
limit and the pool. Reports go out by one `call_soon_threadsafe` a step. While there is no work the thread sleeps on the queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from kvrelay.errors import ConfigError, KvRelayError
from services.engine.api import BlockChanges, EngineEvent, EngineLoad, EngineRequest, Failed
from services.engine.scheduling.core import EngineCore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Add:
    """A new request."""

    request: EngineRequest
    received_ns: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The end of a hold."""

    request_id: str
    imported_tokens: int
    first_token: int | None
    at_ns: int
    """When the KV was complete: waiting for the present step to end is waiting for decode, not for the hand-over."""


@dataclass(frozen=True, slots=True)
class Release:
    """The end of a request."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """The end of the thread."""


Message = Add | Resume | Release | Stop


@dataclass(frozen=True, slots=True)
class StepReport:
    """What happened in one turn of the thread."""

    events: list[tuple[str, EngineEvent]]
    released: tuple[str, ...]
    """Requests whose pages are free again."""
    load: EngineLoad
    changes: BlockChanges
    messages: int
    """Messages handled since the start: all of them, and no work left, means the thread sleeps and the core may be looked at."""
    idle: bool
    fatal: str = ""
    """Set once, when the thread ends by an error; nothing follows."""


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """How the thread runs."""

    name: str = "kvrelay-engine"
    cpus: tuple[int, ...] = ()
    """Cores to pin the thread to, and with it the threads it starts; empty leaves them free."""
    debug: bool = False
    """Check the pages' integrity whenever the work runs out; a violation is fatal."""


class Runner:
    """Starts with `start`, ends with `stop`. `build` makes the core, on the thread, and may take long and raise."""

    def __init__(self, build: Callable[[], EngineCore], deliver: Callable[[StepReport], None], options: RunnerOptions) -> None:
        self._build = build
        self._deliver = deliver
        self._options = options
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=options.name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[EngineCore] | None = None
        self._handled = 0

    async def start(self) -> EngineCore:
        """Starts the thread and returns when the core is built; raises what `build` raised."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        return await self._ready

    def post(self, message: Message) -> None:
        """Hands a message to the thread. Never blocks."""
        self._inbox.put(message)

    async def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end after its present step; False if it has not within `timeout_s`."""
        if self._thread.ident is None:
            return True
        self.post(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._pin()
            core = self._build()
        except Exception as error:  # noqa: BLE001 - raised again in `start`
            self._on_loop(self._failed_to_start, error)
            return
        self._on_loop(self._started, core)
        try:
            self._serve(core)
        except Exception:
            log.exception("the engine thread ended by an error")
            fatal = "the engine stopped by an error"
            self._on_loop(self._deliver, StepReport([], (), core.load(), BlockChanges(), self._handled, idle=False, fatal=fatal))
        finally:
            core.close()

    def _pin(self) -> None:
        if not self._options.cpus:
            return
        try:
            os.sched_setaffinity(threading.get_native_id(), self._options.cpus)
        except OSError as error:
            raise ConfigError(f"cpus must be cores this process may run on, got {', '.join(map(str, self._options.cpus))}") from error

    def _serve(self, core: EngineCore) -> None:
        while True:
            events: list[tuple[str, EngineEvent]] = []
            released: list[str] = []
            for message in self._receive(wait=not core.has_work):
                self._handled += 1
                match message:
                    case Add():
                        try:
                            core.add(message.request, message.received_ns)
                        except KvRelayError as error:
                            events.append((message.request.request_id, Failed(error)))
                    case Resume():
                        core.resume(message.request_id, message.imported_tokens, message.first_token, message.at_ns)
                    case Release():
                        core.release(message.request_id)
                        released.append(message.request_id)
                    case Stop():
                        return
            events += core.step(time.time_ns, partial(self._tell, core))
            idle = not core.has_work
            if idle and self._options.debug:
                core.check_integrity()
            report = StepReport(events, tuple(released), core.load(), core.take_block_changes(), self._handled, idle)
            self._on_loop(self._deliver, report)

    def _tell(self, core: EngineCore, events: list[tuple[str, EngineEvent]]) -> None:
        """In the middle of a step."""
        self._on_loop(self._deliver, StepReport(events, (), core.load(), BlockChanges(), self._handled, idle=False))

    def _receive(self, *, wait: bool) -> list[Message]:
        messages = [self._inbox.get()] if wait else []
        while True:
            try:
                messages.append(self._inbox.get_nowait())
            except queue.Empty:
                return messages

    def _started(self, core: EngineCore) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_result(core)

    def _failed_to_start(self, error: Exception) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    def _on_loop(self, callback: Callable[[Any], None], argument: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            # The loop is closed: the process is going down and nobody is left to tell.
            log.debug("the event loop is closed")
