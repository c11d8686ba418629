"""What a service's process does besides serving: announce itself, stop on a signal, follow its parent."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from typing import TextIO
from weakref import WeakKeyDictionary

from services.runtime.rpc.server import ServiceServer

PARENT_POLL_S = 0.5
ORPHAN_GRACE_S = 20.0
"""An orphan that has not drained by then is ended hard."""


# Signals belong to the process, so this does too: by loop, the future that the first signal resolves.
_stops: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Future[str]] = WeakKeyDictionary()


def announce_ready(role: str, address: str, worker_id: str = "", out: TextIO | None = None) -> None:
    """Prints the one line a service writes to stdout, once it serves; whoever started it reads it to know the address.

    From here on signals stop the service in order: whoever has read the line may send one at once. Call it on the loop.
    """
    _stop_signal(asyncio.get_running_loop())
    line = json.dumps({"event": "ready", "role": role, "address": address, "worker_id": worker_id, "pid": os.getpid()})
    print(line, file=out or sys.stdout, flush=True)


async def wait_for_stop() -> str:
    """Returns at SIGTERM or SIGINT with its name; a second signal ends the process at once."""
    return await asyncio.shield(_stop_signal(asyncio.get_running_loop()))


def _stop_signal(loop: asyncio.AbstractEventLoop) -> asyncio.Future[str]:
    if loop in _stops:
        return _stops[loop]
    stop = _stops[loop] = loop.create_future()

    def on_signal(number: signal.Signals) -> None:
        if stop.done():
            os._exit(128 + number)
        stop.set_result(number.name)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return stop


async def run_until_stopped(
    server: ServiceServer,
    *,
    settled: Callable[[], Awaitable[None]] | None = None,
    before_drain: Callable[[], Awaitable[None]] | None = None,
) -> str:
    """Serves until a signal, then `before_drain()` (leave the registry, so that nothing new is routed here), then drains; returns the
    signal's name. `before_drain` must bound itself.
    """
    name = await wait_for_stop()
    if before_drain is not None:
        await before_drain()
    await server.drain(settled)
    return name


def exit_with_parent() -> None:
    """Ends this process (SIGTERM, so that it drains) soon after its parent died. Call first thing in `__main__`.

    Polls the parent's id: Linux's parent-death signal fires at the end of the *thread* that spawned us, not of the process.
    """
    parent = os.getppid()

    def watch() -> None:
        pause = threading.Event()
        while os.getppid() == parent:
            pause.wait(PARENT_POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
        pause.wait(ORPHAN_GRACE_S)
        os._exit(1)

    threading.Thread(target=watch, name="exit-with-parent", daemon=True).start()
