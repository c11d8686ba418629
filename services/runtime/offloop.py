"""Keeps heavy work (torch, hashing, tokenising, file reading) off the event loop, and proves it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

MAX_THREADS = 4
"""Threads of the pool; work beyond that waits in line."""


def assert_off_loop(what: str) -> None:
    """Raises AssertionError when this thread runs an event loop: `what` would stop every request of the process."""
    assert asyncio._get_running_loop() is None, f"{what} on the event loop"


async def run_off_loop(fn: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Awaits `fn` in a kept pool of threads, with the caller's context (current span, deadline).

    Cancelling the wait does not stop the thread: `fn` must be safe to finish later on its own.
    """
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_pool(), functools.partial(context.run, fn, *args, **kwargs))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=MAX_THREADS, thread_name_prefix="off-loop")
