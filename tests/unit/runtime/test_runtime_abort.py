"""An error that meets a call which is over already has nobody to be told to: it must not become a crash in the log."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from kvrelay.errors import DeadlineExceededError
from services.runtime.rpc.interceptors.errors import abort


class Context:
    """A call whose client has hung up, or not."""

    def __init__(self, raises: Exception) -> None:
        self._raises = raises
        self.told: list[Any] = []

    async def abort(self, *status: Any) -> None:
        self.told.append(status[0])
        raise self._raises


async def test_a_call_that_is_over_is_left_quietly() -> None:
    context = Context(grpc.aio.InternalError("too many operations"))
    with pytest.raises(asyncio.CancelledError):
        await abort(context, DeadlineExceededError("late"))  # type: ignore[arg-type]
    assert context.told == [grpc.StatusCode.DEADLINE_EXCEEDED]


async def test_a_call_that_can_be_told_is_aborted() -> None:
    with pytest.raises(grpc.aio.AbortError):
        await abort(Context(grpc.aio.AbortError("told")), DeadlineExceededError("late"))  # type: ignore[arg-type]
