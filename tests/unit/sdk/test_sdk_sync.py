"""The synchronous client: same behaviour, no event loop in sight of its user."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import kvrelay
from kvrelay import errors
from tests.unit.sdk.scripted_router import ScriptedRouter, failing, one_token_then_silence, serving, started


class RouterThread:
    """A scripted router on another thread's loop."""

    def __init__(self) -> None:
        self.router: ScriptedRouter
        self._ready, self._loop = threading.Event(), asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        async with serving(ScriptedRouter()) as self.router:
            self._ready.set()
            await self._stop.wait()

    def __enter__(self) -> RouterThread:
        self._thread.start()
        assert self._ready.wait(20)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        self._loop.close()

    def run(self, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(make(), 10), self._loop).result(20)


@pytest.fixture
def remote() -> Iterator[RouterThread]:
    with RouterThread() as thread:
        yield thread


def client_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "kvrelay-client"]


def test_tokens_completion_and_times_come_without_a_loop(remote: RouterThread) -> None:
    with kvrelay.Client(remote.router.target) as client:
        stream = client.generate("hello", max_tokens=3)
        assert [t.text for t in stream] == ["w0 ", "w1 ", "w2 "]
        assert stream.completion is not None and stream.completion.usage.completion_tokens == 3
        assert stream.text == "w0 w1 w2 " and stream.ttft_s is not None and len(stream.itl_s) == 2
        with client.generate("again") as second:
            assert second.started is not None and second.collect().token_ids == (100, 101, 102)
        assert client.list_models() == [] and client.fleet().workers == ()
    assert client_threads() == []


def test_break_cancels_on_the_server(remote: RouterThread) -> None:
    remote.router.script = one_token_then_silence
    with kvrelay.Client(remote.router.target) as client:
        for _ in client.generate("x"):
            break
        gc.collect()
        remote.run(remote.router.cancelled.wait)


def test_closing_the_client_cancels_on_the_server_and_ends_the_thread(remote: RouterThread) -> None:
    remote.router.script = one_token_then_silence
    client = kvrelay.Client(remote.router.target)
    stream = client.generate("x")
    next(stream)
    client.close()
    client.close()
    remote.run(remote.router.cancelled.wait)
    assert client_threads() == []
    with pytest.raises(errors.CancelledByClientError):
        next(client.generate("x"))


def test_closing_from_another_thread_ends_a_blocked_reader_with_a_typed_error(remote: RouterThread) -> None:
    remote.router.script = one_token_then_silence
    with ThreadPoolExecutor(1) as pool:
        for _ in range(20):  # the reader comes before, during or after the close
            client = kvrelay.Client(remote.router.target)
            stream = client.generate("x")
            next(stream)
            reading = pool.submit(next, stream)
            client.close()
            with pytest.raises(errors.CancelledByClientError):
                reading.result(20)


def test_errors_are_the_same(remote: RouterThread) -> None:
    remote.router.script = failing(errors.PromptTooLongError("too long", limit_tokens=8), started())
    with kvrelay.Client(remote.router.target) as client:
        with pytest.raises(errors.PromptTooLongError) as caught:
            client.generate("x").collect()
        assert caught.value.fields == {"limit_tokens": "8"}
        with pytest.raises(errors.InvalidSamplingError):
            client.generate("x", temperature=float("nan"))
        remote.router.script = one_token_then_silence
        with pytest.raises(errors.DeadlineExceededError):
            client.generate("x", timeout=0.2).collect()


def test_several_threads_share_one_client(remote: RouterThread) -> None:
    with kvrelay.Client(remote.router.target) as client, ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: client.generate("x").collect().text, range(12)))
    assert texts == ["w0 w1 w2 "] * 12


def test_a_stream_keeps_its_client_alive(remote: RouterThread) -> None:
    assert [t.index for t in kvrelay.Client(remote.router.target).generate("x")] == [0, 1, 2]


def test_a_forgotten_client_ends_its_thread(remote: RouterThread) -> None:
    client = kvrelay.Client(remote.router.target)
    client.generate("x").collect()
    del client
    gc.collect()
    for thread in client_threads():
        thread.join(10)
    assert client_threads() == []
