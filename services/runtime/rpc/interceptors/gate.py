"""Counts what runs and closes the door while the service drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import grpc

from kvrelay.errors import DrainingError
from services.runtime.rpc.interceptors.handlers import INFRASTRUCTURE, AroundInterceptor, Context


class GateInterceptor(AroundInterceptor):
    """Refuses new calls with `DrainingError` once closed, except those of services that must end what was begun elsewhere."""

    def __init__(self, open_while_draining: Collection[str] = ()) -> None:
        """`open_while_draining`: full service names. A holder's pull service is one: its takers finish through it."""
        self._exempt = tuple(f"/{name}/" for name in open_while_draining)
        self._closed = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def running(self) -> int:
        """Calls inside, probes not counted."""
        return self._running

    def close(self) -> None:
        """From now on new calls are refused; those inside go on."""
        self._closed = True

    async def wait_idle(self) -> None:
        """Returns when nothing runs; bound it with a timeout."""
        await self._idle.wait()

    @asynccontextmanager
    async def around(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        if details.method.startswith(INFRASTRUCTURE):
            yield
            return
        if self._closed and not details.method.startswith(self._exempt):
            raise DrainingError("the service is shutting down")
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0:
                self._idle.set()
