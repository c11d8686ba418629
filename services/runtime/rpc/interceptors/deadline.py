"""Gives every call a deadline and tells the handler how much of it is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from kvrelay.errors import DeadlineExceededError
from services.runtime.rpc.deadline import deadline_scope
from services.runtime.rpc.interceptors.handlers import INFRASTRUCTURE, AroundInterceptor, Context


class DeadlineInterceptor(AroundInterceptor):
    """The client's deadline, or the service's maximum where it set none; past it the handler is cancelled and
    `DeadlineExceededError` raised."""

    def __init__(self, default_timeout_s: float) -> None:
        self._default_timeout_s = default_timeout_s

    @asynccontextmanager
    async def around(self, details: grpc.HandlerCallDetails, context: Context) -> AsyncIterator[None]:
        if details.method.startswith(INFRASTRUCTURE):
            yield
            return
        left_s = context.time_remaining()
        timeout_s = self._default_timeout_s if left_s is None else max(0.0, left_s)
        try:
            async with asyncio.timeout(timeout_s) as timeout:
                with deadline_scope(timeout_s):
                    yield
        except TimeoutError as error:
            # A timeout of the handler's own is its own affair.
            if not timeout.expired():
                raise
            raise DeadlineExceededError(f"{details.method} took longer than {timeout_s:.3f} s", timeout_s=f"{timeout_s:.3f}") from error
