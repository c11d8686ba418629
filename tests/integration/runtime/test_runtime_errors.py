"""Exceptions of handlers as the caller gets them, over real grpc.aio."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest

from kvrelay import errors
from kvrelay.wire import error_from_rpc
from tests.integration.runtime.grpc_echo import Served, serve


async def failure(awaitable: Any) -> errors.KvRelayError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with asyncio.timeout(10):
            await awaitable
    return error_from_rpc(caught.value)


async def read_all(call: Any) -> list[bytes]:
    return [message async for message in call]


async def call_each_kind(served: Served, method: str) -> Any:
    async def requests() -> Any:
        yield b"q"

    match method:
        case "unary":
            return await served.call("unary")(b"q", timeout=10)
        case "stream":
            return await read_all(served.call("stream")(b"q", timeout=10))
        case "collect":
            return await served.call("collect")(requests(), timeout=10)
        case _:
            return await read_all(served.call("chat")(requests(), timeout=10))


def raising(error: BaseException, *, after: int = 0) -> dict[str, Any]:
    async def single(request: Any, context: Any) -> bytes:
        raise error

    async def many(request: Any, context: Any) -> Any:
        for _ in range(after):
            yield b"m"
        raise error

    return {"unary": single, "stream": many, "collect": single, "chat": many}


@pytest.mark.parametrize("method", ["unary", "stream", "collect", "chat"])
async def test_a_typed_error_crosses_with_class_message_fields_and_retry_hint(method: str) -> None:
    async with serve(**raising(errors.OverloadedError("queue is full", retry_after_s=1.5, waiting=128))) as served:
        error = await failure(call_each_kind(served, method))
    assert type(error) is errors.OverloadedError
    assert (error.message, error.retry_after_s, error.fields) == ("queue is full", 1.5, {"waiting": "128"})


@pytest.mark.parametrize("method", ["unary", "stream", "collect", "chat"])
async def test_the_text_of_an_unknown_error_stays_in_the_log_beside_its_trace_id(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(**raising(KeyError("secret-path"))) as served:
        error = await failure(call_each_kind(served, method))
    trace_id = f"{(await served.recorder.ended(method, 'SERVER')).context.trace_id:032x}"
    assert type(error) is errors.InternalError
    assert "secret" not in str(error) + repr(error.fields)
    assert trace_id in error.message
    assert "secret-path" in caplog.text


async def test_an_error_after_messages_arrives_after_those_messages() -> None:
    async with serve(**raising(errors.KvAbortedError("gone"), after=3)) as served:
        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for message in served.call("stream")(b"", timeout=10):
                got.append(message)
    assert len(got) == 3 and isinstance(error_from_rpc(caught.value), errors.KvAbortedError)


async def test_the_typed_error_inside_a_task_groups_exception_is_reported() -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        async def fail() -> None:
            raise errors.ChecksumMismatchError("bad bytes", segment=3)

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            group.create_task(asyncio.sleep(100))
        return b""

    async with serve(unary=handler) as served:
        error = await failure(served.call("unary")(b"", timeout=10))
    assert type(error) is errors.ChecksumMismatchError and error.fields["segment"] == "3"


async def test_a_handlers_own_abort_passes_untouched() -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
        return b""

    async with serve(unary=handler) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.call("unary")(b"", timeout=10)
    span = await served.recorder.ended("unary", "SERVER")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "mine")
    assert span.attributes["rpc.status_code"] == "OUT_OF_RANGE"


async def test_an_error_raised_on_top_of_an_abort_is_not_a_second_abort(caplog: pytest.LogCaptureFixture) -> None:
    async def handler(request: bytes, context: Any) -> bytes:
        try:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "mine")
        finally:
            raise errors.InternalError("clean-up failed")

    async with serve(unary=handler) as served:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.call("unary")(b"", timeout=10)
        assert await failure(served.call("unary")(b"", timeout=10))
    assert caught.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert "Abort already called" not in caplog.text
    assert "clean-up failed" in caplog.text


async def test_an_error_too_long_for_trailers_still_arrives_as_itself() -> None:
    text, field = "長い " * 2000, "ф" * 5000
    async with serve(**raising(errors.FingerprintMismatchError(text, weights_digest=field))) as served:
        error = await failure(served.call("unary")(b"", timeout=10))
    assert type(error) is errors.FingerprintMismatchError


async def test_text_that_is_not_valid_unicode_still_arrives() -> None:
    async with serve(**raising(errors.InvalidPromptError("bad \ud800 text", field="prompt \udfff"))) as served:
        assert type(await failure(served.call("unary")(b"", timeout=10))) is errors.InvalidPromptError


async def test_a_request_over_the_servers_cap_is_too_large_and_the_connection_survives() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async with serve(unary=echo, settings={"max_message_bytes": 1 << 20}) as served:
        error = await failure(served.call("unary")(b"x" * (2 << 20), timeout=10))
        assert type(error) is errors.RequestTooLargeError and error.fields["limit_bytes"] == str(1 << 20)
        assert await served.call("unary")(b"small", timeout=10) == b"small"


async def test_messages_over_grpcs_own_limit_of_4_mib_pass_both_ways() -> None:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async with serve(unary=echo) as served:
        assert len(await served.call("unary")(b"x" * (6 << 20), timeout=20)) == 6 << 20


async def test_a_cancelled_handler_is_not_turned_into_an_error(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: bytes, context: Any) -> bytes:
        started.set()
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            ended.set()
            raise
        return b""

    async with serve(unary=handler) as served:
        call = served.call("unary")(b"")
        async with asyncio.timeout(5):
            await started.wait()
            call.cancel()
            await ended.wait()
    assert caplog.text == ""


@pytest.mark.parametrize("method", ["unary", "stream", "collect", "chat"])
async def test_a_malformed_request_is_a_typed_error_without_the_parsers_text(method: str) -> None:
    def parse(data: bytes) -> Any:
        raise ValueError("secret")

    async def single(request: Any, context: Any) -> bytes:
        if method == "collect":
            async for _ in request:
                pass
        return b""

    async def many(request: Any, context: Any) -> Any:
        if method == "chat":
            async for _ in request:
                pass
        yield b""

    async with serve(parse=parse, unary=single, stream=many, collect=single, chat=many) as served:
        error = await failure(call_each_kind(served, method))
    # Messages of a stream are read by the handler, so there it is the handler's error.
    assert type(error) is (errors.InternalError if method in ("collect", "chat") else errors.InvalidRequestError)
    assert "secret" not in error.message


@pytest.mark.parametrize("method", ["unary", "stream", "collect", "chat"])
async def test_a_response_that_cannot_be_serialised_is_internal_and_its_text_withheld(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    def serialise(response: Any) -> bytes:
        raise TypeError("secret")

    async def single(request: Any, context: Any) -> object:
        return object()

    async def many(request: Any, context: Any) -> Any:
        yield object()

    async with serve(serialise=serialise, unary=single, stream=many, collect=single, chat=many) as served:
        error = await failure(call_each_kind(served, method))
    assert type(error) is errors.InternalError and "secret" not in error.message and "secret" in caplog.text


async def test_handlers_that_read_and_write_through_the_context_get_and_give_messages() -> None:
    async def chat(request: Any, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            await context.write((*message, b"!"))

    async with serve(parse=lambda data: (data,), serialise=b"".join, chat=chat) as served:
        assert await call_each_kind(served, "chat") == [b"q!"]
