"""The synchronous client: the asynchronous one on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, TypeVar, Unpack

from kvrelay.client import AsyncClient
from kvrelay.errors import CancelledByClientError
from kvrelay.fleet import FleetView, ModelView
from kvrelay.request import GenerateOptions, Prompt
from kvrelay.stream import Answer, GenerationStarted, GenerationStream
from kvrelay.values import Completion, Token

T = TypeVar("T")
_CLOSE_TIMEOUT_S = 5.0


class Client:
    """`AsyncClient` for code without an event loop; safe to use from several threads. Takes the same arguments.

    with kvrelay.Client() as client:
        for token in client.generate("Once upon a time", max_tokens=64):
            print(token.text, end="")
    """

    def __init__(self, target: str | None = None, **options: Any) -> None:
        self._client = AsyncClient(target, **options)
        self._loop = _LoopThread()
        self._finalizer = weakref.finalize(self, self._loop.stop, self._client.aclose)

    @property
    def target(self) -> str:
        return self._client.target

    def __enter__(self) -> Client:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends running streams, closes the connection and the thread. Idempotent; blocks for a few seconds at most."""
        self._finalizer()

    def generate(self, prompt: Prompt | None = None, **options: Unpack[GenerateOptions]) -> SyncGenerationStream:
        """As `AsyncClient.generate`; iterate it with a plain `for`, leave it early by `break`."""
        return SyncGenerationStream(self._client.generate(prompt, **options), self)

    def list_models(self, *, timeout: float | None = None) -> Sequence[ModelView]:
        return self._loop.run(self._client.list_models(timeout=timeout))

    def fleet(self, *, timeout: float | None = None) -> FleetView:
        return self._loop.run(self._client.fleet(timeout=timeout))


class SyncGenerationStream:
    """`GenerationStream` with blocking steps. An interrupted step (Ctrl-C) cancels the generation."""

    def __init__(self, stream: GenerationStream, client: Client) -> None:
        # The client lives as long as its streams, or `for token in Client().generate(...)` would end at once.
        self._stream, self._client, self._loop = stream, client, client._loop

    def __iter__(self) -> SyncGenerationStream:
        return self

    def __next__(self) -> Token:
        token = self._run(_step(self._stream))
        if token is None:
            raise StopIteration
        return token

    def __enter__(self) -> SyncGenerationStream:
        self._run(self._stream.__aenter__())
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Ends the generation if it runs. Does not block."""
        self._loop.call_soon(self._stream.cancel)

    def completion_or_raise(self) -> Completion:
        """Reads to the end. Raises `CancelledByClientError` for a stream that was left before its end."""
        return self._run(self._stream.completion_or_raise())

    def collect(self) -> Answer:
        """Reads to the end and returns all of it, tokens already iterated included."""
        return self._run(self._stream.collect())

    @property
    def started(self) -> GenerationStarted | None:
        return self._stream.started

    @property
    def completion(self) -> Completion | None:
        return self._stream.completion

    @property
    def text(self) -> str:
        return self._stream.text

    @property
    def token_ids(self) -> Sequence[int]:
        return self._stream.token_ids

    @property
    def ttft_s(self) -> float | None:
        return self._stream.ttft_s

    @property
    def itl_s(self) -> Sequence[float]:
        return self._stream.itl_s

    @property
    def decision(self) -> str:
        return self._stream.decision

    def _run(self, step: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(step)
        except BaseException:
            self.cancel()
            raise


async def _step(stream: GenerationStream) -> Token | None:
    async for token in stream:
        return token
    return None


class _LoopThread:
    """An event loop on a daemon thread. Whatever is run on it ends, at the latest when it is stopped."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._lock = threading.RLock()
        self._stopping = False
        self._thread = threading.Thread(target=self._main, name="kvrelay-client", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Blocks for the result; an interrupt cancels the coroutine."""
        # Under the lock a coroutine either reaches the loop before its end, which then cancels it, or is refused.
        with self._lock:
            if self._stopping:
                coroutine.close()
                raise CancelledByClientError("the client is closed")
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise CancelledByClientError("the client was closed") from None
        finally:
            future.cancel()

    def call_soon(self, callback: Callable[[], None]) -> None:
        """Nothing once the loop stops: whatever ran on it has ended."""
        with self._lock:
            if not self._stopping:
                self._loop.call_soon_threadsafe(callback)

    def stop(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs `last`, cancels what still runs and ends the thread; waits for that, if only for a few seconds."""
        with self._lock:
            if not self._stopping:
                self._stopping = True
                asyncio.run_coroutine_threadsafe(self._end(last), self._loop)
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _main(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    async def _end(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            async with asyncio.timeout(_CLOSE_TIMEOUT_S / 2):
                await last()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=_CLOSE_TIMEOUT_S / 2)
        finally:
            self._loop.call_soon(self._loop.stop)
