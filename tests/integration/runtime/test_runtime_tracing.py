"""Traces over real grpc.aio: each fault of the contrib instrumentation is a test here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from opentelemetry.trace import StatusCode

from kvrelay import errors
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import current_trace_id
from tests.integration.runtime.grpc_echo import SERVICE, Recorder, serve

KINDS = ["unary", "stream", "collect", "chat"]


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def requests() -> Any:
    yield b"1"
    yield b"2"


async def complete(call: Any) -> None:
    if hasattr(call, "__await__"):
        await call
    else:
        async for _ in call:
            pass


def start(served: Any, method: str, **options: Any) -> Any:
    return served.call(method)(requests() if method in ("collect", "chat") else b"q", **options)


@pytest.mark.parametrize("method", KINDS)
async def test_client_server_and_handler_spans_are_one_chain(method: str) -> None:
    recorder = Recorder()
    seen: list[str] = []

    async def single(request: Any, context: Any) -> bytes:
        with recorder.telemetry.span("work"):
            seen.append(current_trace_id())
        return b""

    async def many(request: Any, context: Any) -> Any:
        yield b"first"
        with recorder.telemetry.span("work"):
            seen.append(current_trace_id())
            yield b"second"

    async with serve(recorder, unary=single, stream=many, collect=single, chat=many) as served:
        with recorder.telemetry.span("root"):
            await complete(start(served, method, timeout=10))
    client, server = await recorder.ended(method, "CLIENT"), await recorder.ended(method, "SERVER")
    (root,), (work,) = recorder.named("root"), recorder.named("work")
    assert client.parent.span_id == root.context.span_id
    assert server.parent.span_id == client.context.span_id
    assert work.parent.span_id == server.context.span_id
    assert seen == [f"{root.context.trace_id:032x}"]
    assert client.attributes["rpc.status_code"] == server.attributes["rpc.status_code"] == "OK"
    assert client.attributes["server.port"] == served.server.port


@pytest.mark.parametrize("method", KINDS)
async def test_calls_made_inside_a_handler_join_its_trace(method: str) -> None:
    recorder = Recorder()

    async def leaf(request: Any, context: Any) -> bytes:
        return current_trace_id().encode()

    async with serve(recorder, unary=leaf) as behind:

        async def single(request: Any, context: Any) -> bytes:
            return await behind.call("unary")(b"", timeout=10)

        async def many(request: Any, context: Any) -> Any:
            yield b""
            async with asyncio.TaskGroup() as group:
                reached = group.create_task(single(request, context))
            yield reached.result()

        front_recorder = Recorder()
        async with serve(front_recorder, unary=single, stream=many, collect=single, chat=many) as front:
            await complete(start(front, method, timeout=10))
    front_server = await front_recorder.ended(method, "SERVER")
    leaf_server = await recorder.ended("unary", "SERVER")
    assert leaf_server.context.trace_id == front_server.context.trace_id


@pytest.mark.parametrize("method", KINDS)
async def test_a_cancelled_call_reaches_the_handler_and_both_spans_end_as_cancelled(method: str) -> None:
    running, cancelled = asyncio.Event(), asyncio.Event()

    async def single(request: Any, context: Any) -> bytes:
        running.set()
        try:
            await asyncio.sleep(100)
        finally:
            cancelled.set()
        return b""

    async def many(request: Any, context: Any) -> Any:
        yield await single(request, context)

    async with serve(unary=single, stream=many, collect=single, chat=many) as served:
        task = asyncio.create_task(complete(start(served, method)))
        await asyncio.wait_for(running.wait(), 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(cancelled.wait(), 5)
        server, client = await served.recorder.ended(method, "SERVER"), await served.recorder.ended(method, "CLIENT")
    assert server.attributes["rpc.status_code"] == client.attributes["rpc.status_code"] == "CANCELLED"
    assert client.status.status_code is StatusCode.ERROR
    assert server.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("method", ["stream", "chat"])
async def test_a_stream_left_early_and_cancelled_ends_both_spans_and_the_handlers_generator(method: str) -> None:
    closed: list[str] = []

    async def many(request: Any, context: Any) -> Any:
        try:
            while True:
                yield b"x" * 100_000
        finally:
            closed.append(asyncio.current_task().get_name() if asyncio.current_task() else "")

    async with serve(stream=many, chat=many) as served:
        call = start(served, method)
        async for _ in call:
            break
        call.cancel()
        await until(
            lambda: served.recorder.named(f"{SERVICE}/{method}", "CLIENT") and served.recorder.named(f"{SERVICE}/{method}", "SERVER")
        )
        assert len(closed) == 1
    # Closed by the call's own task, not by the garbage collector's.
    assert method in closed[0]


async def test_a_stream_whose_loop_was_left_without_a_cancel_is_cancelled_and_ends_its_span() -> None:
    stopped = asyncio.Event()

    async def many(request: Any, context: Any) -> Any:
        try:
            yield b"x"
            await asyncio.sleep(100)
        finally:
            stopped.set()

    async with serve(stream=many) as served:
        async for _ in served.call("stream")(b""):
            break
        await until(lambda: served.recorder.named(f"{SERVICE}/stream", "CLIENT"))
        await asyncio.wait_for(stopped.wait(), 5)
        assert (await served.recorder.ended("stream", "CLIENT")).attributes["rpc.status_code"] == "CANCELLED"


async def test_a_stream_can_be_read_on_in_a_second_loop() -> None:
    async def many(request: Any, context: Any) -> Any:
        for number in range(4):
            yield b"%d" % number

    async with serve(stream=many) as served:
        call = served.call("stream")(b"", timeout=10)
        first = []
        async for message in call:
            first.append(message)
            break
        assert [*first, *[message async for message in call]] == [b"0", b"1", b"2", b"3"]


async def test_a_stream_read_by_read_and_not_to_its_end_still_ends_its_span() -> None:
    async def many(request: Any, context: Any) -> Any:
        yield b"1"
        yield b"2"

    async with serve(stream=many) as served:
        call = served.call("stream")(b"")
        assert await call.read() == b"1"
        assert await call.read() == b"2"
        call.cancel()
        assert (await served.recorder.ended("stream", "CLIENT")).attributes["rpc.status_code"] in ("OK", "CANCELLED")


@pytest.mark.parametrize("method", ["collect", "chat"])
async def test_a_server_that_answers_before_it_took_all_requests_is_on_the_span_with_its_own_status(method: str) -> None:
    async def single(request: Any, context: Any) -> bytes:
        raise errors.OverloadedError("not now")

    async def many(request: Any, context: Any) -> Any:
        yield await single(request, context)

    async def endless() -> Any:
        while True:
            yield b"x" * 1_000

    async with serve(collect=single, chat=many) as served:
        for _ in range(10):
            with pytest.raises(grpc.aio.AioRpcError):
                await complete(served.call(method)(endless(), timeout=10))
        name = f"{SERVICE}/{method}"
        await until(lambda: len(served.recorder.named(name, "CLIENT")) == 10)
        assert {span.attributes["rpc.status_code"] for span in served.recorder.named(name, "CLIENT")} == {"RESOURCE_EXHAUSTED"}


async def test_an_unserialisable_request_fails_at_once_and_ends_its_span() -> None:
    async def handler(request: Any, context: Any) -> bytes:
        return b""

    def refuse(request: Any) -> bytes:
        raise ValueError("not this")

    async with serve(unary=handler) as served:
        with pytest.raises(ValueError, match="not this"):
            await served.channel.unary_unary(f"/{SERVICE}/unary", request_serializer=refuse)(object())
        span = await served.recorder.ended("unary", "CLIENT")
        assert span.status.status_code is StatusCode.ERROR and span.attributes["error.type"] == "ValueError"


@pytest.mark.parametrize("method", KINDS)
async def test_a_passed_deadline_is_on_both_spans(method: str) -> None:
    async def single(request: Any, context: Any) -> bytes:
        await asyncio.sleep(100)
        return b""

    async def many(request: Any, context: Any) -> Any:
        yield await single(request, context)

    async with serve(unary=single, stream=many, collect=single, chat=many) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await complete(start(served, method, timeout=0.2))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        client, server = await served.recorder.ended(method, "CLIENT"), await served.recorder.ended(method, "SERVER")
    assert client.attributes["rpc.status_code"] == "DEADLINE_EXCEEDED" and client.status.status_code is StatusCode.ERROR
    # On a loaded machine the client's word may come first.
    assert server.attributes["rpc.status_code"] in ("DEADLINE_EXCEEDED", "CANCELLED")


@pytest.mark.parametrize(
    ("error", "server_failed"), [(errors.PromptTooLongError("long"), False), (errors.NoWorkerError("none"), True), (KeyError("bug"), True)]
)
async def test_the_sent_status_is_on_both_spans(error: Exception, server_failed: bool) -> None:
    async def handler(request: Any, context: Any) -> bytes:
        raise error

    async with serve(unary=handler) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.call("unary")(b"", timeout=10)
        server, client = await served.recorder.ended("unary", "SERVER"), await served.recorder.ended("unary", "CLIENT")
    assert server.attributes["rpc.status_code"] == client.attributes["rpc.status_code"] == caught.value.code().name
    assert (server.status.status_code is StatusCode.ERROR) is server_failed
    assert client.status.status_code is StatusCode.ERROR


async def test_a_dead_peer_ends_the_client_span_as_unavailable() -> None:
    async with serve(unary=lambda request, context: None) as served:
        channel: Any = served.channels.get("127.0.0.1:1")
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/x.Y/Z")(b"", timeout=10)
        (span,) = served.recorder.named("x.Y/Z")
    assert span.attributes["rpc.status_code"] == "UNAVAILABLE"


async def test_closing_the_pool_ends_the_spans_of_open_calls() -> None:
    async def many(request: Any, context: Any) -> Any:
        yield b"1"
        await asyncio.sleep(100)

    async with serve(stream=many) as served:
        call = served.call("stream")(b"")
        async with aclosing(call.__aiter__()) as messages:
            assert await anext(messages) == b"1"
            await served.channels.close()
        await until(lambda: served.recorder.named(f"{SERVICE}/stream", "CLIENT"))


async def test_a_malformed_traceparent_begins_a_new_trace() -> None:
    async def handler(request: Any, context: Any) -> bytes:
        return current_trace_id().encode()

    async with serve(unary=handler) as served:
        plain = grpc.aio.insecure_channel(f"127.0.0.1:{served.server.port}")
        try:
            call: Any = plain.unary_unary(f"/{SERVICE}/unary")
            trace_id = await call(b"", metadata=(("traceparent", "00-zz-1"),), timeout=10)
            assert len(trace_id) == 32
            joined = await call(b"", metadata=(("traceparent", f"00-{'ab' * 16}-{'cd' * 8}-01"),), timeout=10)
            assert joined == b"ab" * 16
        finally:
            await plain.close()


async def test_each_call_has_its_own_trace_and_callers_context_is_left_alone() -> None:
    async def handler(request: Any, context: Any) -> bytes:
        await asyncio.sleep(0)
        return current_trace_id().encode()

    async with serve(unary=handler) as served:
        assert current_trace_id() == ""
        ids = await asyncio.gather(*(served.call("unary")(b"", timeout=10) for _ in range(20)))
        assert len(set(ids)) == 20 and current_trace_id() == ""


def test_method_names_have_no_leading_slash_and_system_is_grpc() -> None:
    assert (names.RPC_SYSTEM_NAME, names.RPC_STATUS_CODE) == ("rpc.system.name", "rpc.status_code")
