"""What every test gets: a tiny model, a real Redis, and the proof that nothing was left behind.

Leaks are checked without being asked for: tasks that an async test left running, exceptions that only the loop's handler saw,
threads and child processes that outlive a test's own fixtures, and calls in our code that block the event loop.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from blockbuster import blockbuster_ctx

from tests.tiny_models import write_tiny_model

SETTLE_S = 3.0
"""How long a leftover may take to end by itself: closing channels, exiting children."""
KEPT_THREADS = ("off-loop", "asyncio_", "grpc", "pymp")
"""Pools that live as long as the process."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in float32, complete with tokenizer and chat template. Read-only."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama", "llama")


@pytest.fixture
def redis_server() -> Iterator[Any]:
    """A real, empty Redis of this test's own (`EmbeddedRedis`)."""
    from services.runtime.registry.embedded_redis import EmbeddedRedis

    with EmbeddedRedis() as server:
        yield server


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "may_block: our code may block the event loop in this test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        function = getattr(item, "obj", None)
        if inspect.iscoroutinefunction(function) and not hasattr(function, "hypothesis") and isinstance(item, pytest.Function):
            item.obj = _guarded(function, blocking_is_error=_must_not_block(item))


def _must_not_block(item: pytest.Item) -> bool:
    """Integration tests run the launcher on their loop, which may block: nobody's request waits for it."""
    return item.get_closest_marker("may_block") is None and not {"integration", "deploy"} & set(item.path.parts)


def _guarded(test: Callable[..., Any], *, blocking_is_error: bool) -> Callable[..., Any]:
    """`test`, failing on what it leaves on its event loop."""

    @functools.wraps(test)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        loop = asyncio.get_running_loop()
        problems: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _, context: problems.append(context))
        before = asyncio.all_tasks()
        try:
            if blocking_is_error:
                with blockbuster_ctx(scanned_modules=["services", "kvrelay"]):
                    result = await test(*args, **kwargs)
            else:
                result = await test(*args, **kwargs)
        finally:
            loop.set_exception_handler(None)
        left = {task for task in asyncio.all_tasks() - before if not task.done() and not _accepts_calls(task)}
        if left:
            _, left = await asyncio.wait(left, timeout=SETTLE_S)
        assert not left, f"tasks left running: {[task.get_name() + ' ' + repr(task.get_coro()) for task in left]}"
        assert not problems, f"the event loop reported: {problems}"
        return result

    return guarded


def _accepts_calls(task: asyncio.Task[Any]) -> bool:
    """grpc.aio's server renews its accepting tasks with every call; a server that a fixture owns ends after the test."""
    return getattr(task.get_coro(), "__qualname__", "").startswith("AioServer.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """With torch's operators exactness holds for one thread; so workers run, and so does every test, its fixtures included."""
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = (set(threading.enumerate()), _child_processes())
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    result = yield
    if _BEFORE in item.stash:
        threads, children = item.stash[_BEFORE]
        _wait_until_none(lambda: _new_threads(threads), "threads left running")
        _wait_until_none(lambda: _child_processes() - children, "child processes left running")
    return result


_BEFORE: pytest.StashKey[tuple[set[threading.Thread], set[int]]] = pytest.StashKey()


def _new_threads(before: set[threading.Thread]) -> set[threading.Thread]:
    return {t for t in set(threading.enumerate()) - before if not t.daemon and not t.name.startswith(KEPT_THREADS)}


def _child_processes() -> set[int]:
    """Pids of this process's live children, zombies left out; empty where /proc does not tell."""
    found: set[int] = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        try:
            found.update(int(pid) for pid in listing.read_text().split() if not _is_zombie(int(pid)))
        except OSError:
            continue
    return found


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_until_none(leftovers: Callable[[], set[Any]], what: str) -> None:
    deadline = time.monotonic() + SETTLE_S
    while left := leftovers():
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: {left}")
        time.sleep(0.02)
