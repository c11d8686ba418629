"""One running generation, as the client reads it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from kvrelay import wire
from kvrelay.errors import CancelledByClientError, InternalError, KvRelayError, UnavailableError
from kvrelay.inference.v1 import router_service_pb2
from kvrelay.retry import RetryPolicy
from kvrelay.values import Completion, Token


@dataclass(frozen=True, slots=True)
class GenerationStarted:
    """The router admitted the request."""

    request_id: str
    model: str
    prompt_tokens: int
    trace_id: str
    """Hex."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole generation."""

    text: str
    token_ids: Sequence[int]
    completion: Completion


class GenerationStream:
    """Iterate it for `Token`s; after the end `completion` is set. The request is sent at the first step or on `async with`.

    Leaving it early cancels the generation everywhere: at once when it is left by `async with` or `cancel()`, or when the last
    reference goes, as in `async for token in client.generate(...): break`. A cancelled or timed-out step ends the stream.
    Belongs to one task at a time. Errors are `kvrelay.errors`.
    """

    def __init__(
        self,
        open_call: Callable[[float | None], Any],
        *,
        target: str,
        timeout_s: float | None,
        retry: RetryPolicy | None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.started: GenerationStarted | None = None
        self.completion: Completion | None = None
        self.token_ids: list[int] = []
        self.ttft_s: float | None = None
        """Client-side: request sent to first token received."""
        self.itl_s: list[float] = []
        """Gaps between tokens as received."""
        self.decision = ""
        """Why the router chose the path, for people; known at the end."""
        self._open_call = open_call
        self._target, self._timeout_s, self._retry, self._sleep = target, timeout_s, retry, sleep
        self._call: Any = None
        self._first: router_service_pb2.GenerateResponse | None = None
        self._over = False
        self._text: list[str] = []
        self._sent_at = self._last_at = 0.0

    @property
    def text(self) -> str:
        """The answer so far."""
        return "".join(self._text)

    def __aiter__(self) -> GenerationStream:
        return self

    async def __anext__(self) -> Token:
        if self._over:
            raise StopAsyncIteration
        try:
            if self._call is None:
                await self._start()
            while (response := await self._next_response()) is not None:
                if (token := self._take(response)) is not None:
                    return token
            if self.completion is None:
                raise InternalError(f"the router at {self._target} ended the stream without its last event")
        except BaseException:
            self.cancel()
            raise
        self._over = True
        raise StopAsyncIteration

    async def __aenter__(self) -> GenerationStream:
        try:
            await self._start()
        except BaseException:
            self.cancel()
            raise
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.cancel()

    async def aclose(self) -> None:
        """`cancel()`, for `contextlib.aclosing`."""
        self.cancel()

    def cancel(self) -> None:
        """Ends the generation if it runs; what was received stays readable. Idempotent, does not block."""
        self._over = True
        if self._call is not None:
            self._call.cancel()

    def __del__(self) -> None:
        call = getattr(self, "_call", None)
        if call is not None and not self._over:
            call.cancel()

    async def completion_or_raise(self) -> Completion:
        """Reads to the end. Raises `CancelledByClientError` for a stream that was left before its end."""
        async for _ in self:
            pass
        if self.completion is None:
            raise CancelledByClientError("the stream was left before its end")
        return self.completion

    async def collect(self) -> Answer:
        """Reads to the end and returns all of it, tokens already iterated included."""
        completion = await self.completion_or_raise()
        return Answer(self.text, tuple(self.token_ids), completion)

    async def _start(self) -> None:
        """Sends the request and waits for its first event; sends again, if the policy says so, while nothing has come."""
        if self._over or self._call is not None:
            return
        self._sent_at = time.monotonic()
        for attempt in itertools.count(1):
            remaining_s = None
            if self._timeout_s is not None:
                remaining_s = self._sent_at + self._timeout_s - time.monotonic()
            self._call = self._open_call(remaining_s)
            try:
                first = await self._read()
                if first is not None and self._take_start(first):
                    first = None
                self._first = first
                return
            except KvRelayError as error:
                delay_s = None if self._retry is None else self._retry.delay_s(attempt, error)
                if delay_s is None or (remaining_s is not None and delay_s >= remaining_s):
                    raise
            await self._sleep(delay_s)
            if self._over:
                raise CancelledByClientError("the stream was closed")

    async def _next_response(self) -> router_service_pb2.GenerateResponse | None:
        if self._first is not None:
            response, self._first = self._first, None
            return response
        if self.completion is None:
            return await self._read()
        try:
            return await self._read()
        except KvRelayError:
            return None  # everything was received: how the call then ended changes nothing

    async def _read(self) -> router_service_pb2.GenerateResponse | None:
        """The next message; None at the end."""
        response = await answer_of(self._call, self._call.read(), self._target, reached=self.started is not None)
        return None if response is grpc.aio.EOF else response

    def _take_start(self, response: router_service_pb2.GenerateResponse) -> bool:
        if response.WhichOneof("event") != "started":
            return False
        event = response.started
        self.started = GenerationStarted(event.request_id, event.model, event.prompt_tokens, event.trace_id)
        return True

    def _take(self, response: router_service_pb2.GenerateResponse) -> Token | None:
        match response.WhichOneof("event"):
            case "token":
                return self._take_token(wire.token_from_proto(response.token))
            case "done":
                trace_id = self.started.trace_id if self.started is not None else ""
                self.completion = wire.completion_from_proto(response.done, trace_id=trace_id)
                self.decision = response.done.decision
            case _:
                self._take_start(response)  # anything else is an event of a later version
        return None

    def _take_token(self, token: Token) -> Token:
        if token.index != len(self.token_ids):
            raise InternalError(f"token {len(self.token_ids)} was expected, token {token.index} came", token_index=token.index)
        now = time.monotonic()
        if self.ttft_s is None:
            self.ttft_s = now - self._sent_at
        else:
            self.itl_s.append(now - self._last_at)
        self._last_at = now
        self.token_ids.append(token.token_id)
        self._text.append(token.text)
        return token


async def answer_of(call: Any, waiting: Awaitable[Any], target: str, *, reached: bool) -> Any:
    """What a call gives, its failures as `kvrelay.errors`: a cancel of this task passes, one of the call (closed) does not.

    `reached`: whether the router had answered before, for the text only.
    """
    try:
        return await waiting
    except grpc.aio.AioRpcError as failure:
        # A cancel of ours never comes as a status: CANCELLED means that the router went away.
        lost = failure.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        if not lost or wire.names_kvrelay_reason(failure):
            raise wire.error_from_rpc(failure) from failure
        what = "was lost" if reached else "cannot be reached"
        raise UnavailableError(f"the router at {target} {what}: {failure.details()}", target=target) from failure
    except asyncio.CancelledError:
        call.cancel()
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CancelledByClientError("the call was closed while it was waited for") from None
