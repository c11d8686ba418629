"""An event loop whose time jumps to the next timer as soon as nothing else can happen: hours of waiting in no time, always the same."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _JumpingSelector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[Any]:
        loop = self.loop
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if loop.threads_at_work:
            # A thread's result is due: time stands still until it is there.
            return super().select(5)
        if timeout is None:
            raise AssertionError("deadlock: nothing is scheduled and nothing can happen any more")
        loop.now += max(0.0, timeout)
        return []

    loop: VirtualTimeLoop


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`now` is the loop's time, in seconds from 0."""

    def __init__(self) -> None:
        self.now = 0.0
        self.threads_at_work = 0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        self.threads_at_work += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_done)
        return future

    def _thread_done(self, _: object) -> None:
        self.threads_at_work -= 1


class LoopClock:
    """`services.runtime.clock.Clock` on the running loop's time."""

    EPOCH_NS = 1_700_000_000_000_000_000

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def time_ns(self) -> int:
        return self.EPOCH_NS + round(self.monotonic() * 1e9)


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `main()` to its end on a fresh loop; fails on tasks it leaves behind and on errors only the loop saw."""
    problems: list[dict[str, Any]] = []

    async def guarded() -> T:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
        result = await main()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks left running: {left}"
        return result

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        result = runner.run(guarded())
    assert not problems, problems
    return result


async def finished(awaitable: Awaitable[T]) -> T | BaseException:
    """The result, or the error instead of raising it."""
    try:
        return await awaitable
    except asyncio.CancelledError as cancelled:
        return cancelled
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error
