"""`grpc.health.v1` for one process.

Its own servicer, because grpcio-health-checking's writes to watchers under the lock that setting a status needs: one client that
does not read would hang the drain. A watcher here is woken and reads the present status.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"
OVERALL = ""
"""The name of the process as a whole."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Statuses by name; names never set are unknown. Starts with the whole process NOT_SERVING."""

    def __init__(self) -> None:
        self._serving: dict[str, bool] = {OVERALL: False}
        self._watchers: set[asyncio.Event] = set()
        self._shutting_down = False

    def set(self, name: str, serving: bool) -> None:
        """Takes effect at once; ignored after `shut_down`."""
        if not self._shutting_down:
            self._serving[name] = serving
            self._wake()

    def shut_down(self) -> None:
        """Every name NOT_SERVING, for good."""
        self._shutting_down = True
        self._serving = dict.fromkeys(self._serving, False)
        self._wake()

    async def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self._serving:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            last = None
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                await changed.wait()
        finally:
            self._watchers.discard(changed)

    def _status(self, name: str) -> Any:
        statuses = health_pb2.HealthCheckResponse
        if name not in self._serving:
            return statuses.SERVICE_UNKNOWN
        return statuses.SERVING if self._serving[name] else statuses.NOT_SERVING

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
