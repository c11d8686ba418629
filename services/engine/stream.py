"""One open request on the event loop: where the runner's events wait until they are read."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from services.engine.api import Admitted, EngineEvent, EngineRequest, Failed, Finished


class Stream:
    """Implements `EngineStream`. Its events are at most one a chunk and one a token, so they need no other bound."""

    def __init__(self, key: str, request: EngineRequest, on_resume: Callable[[str, int, int | None], None]) -> None:
        self.key = key
        """The request's id, made unique among its attempts."""
        self._on_resume = on_resume
        self._request = request
        self._events: deque[EngineEvent] = deque()
        self._arrived = asyncio.Event()
        self._held = False
        self._ended = False

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> EngineEvent:
        while not self._events:
            if self._ended:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Failed):
            self._events.clear()
            raise event.error
        return event

    def resume(self, imported_tokens: int, first_token: int | None = None) -> None:
        """See `EngineStream.resume`; `ValueError` unless the request is held and the arguments fit together. After a failure: nothing."""
        prompt = len(self._request.token_ids)
        if not 0 <= imported_tokens <= prompt or (first_token is not None and imported_tokens != prompt):
            raise ValueError(f"cannot resume {self.key} with {imported_tokens} of {prompt} tokens and first token {first_token}")
        if first_token is not None and self._request.prefill_only:
            raise ValueError(f"{self.key} computes its prompt only: it cannot go on from a first token")
        if self._ended:
            return
        if not self._held:
            raise ValueError(f"{self.key} is not held")
        self._held = False
        self._on_resume(self.key, imported_tokens, first_token)

    def push(self, event: EngineEvent) -> None:
        """Delivers one event; nothing follows the last."""
        if self._ended:
            return
        self._held = self._held or (isinstance(event, Admitted) and self._request.hold)
        self._ended = isinstance(event, Finished | Failed)
        self._events.append(event)
        self._arrived.set()

    def close(self) -> None:
        """No event is delivered from now on."""
        self._ended = True
        self._events.clear()
        self._arrived.set()
