"""The tasks that read workers' streams for one request."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from types import TracebackType

from kvrelay.errors import InternalError, KvRelayError, WorkerLostError
from kvrelay.handle import KvHandle
from services.router.fleet import Fleet
from services.router.load import Dispatch
from services.router.request import Event, FromDecode, FromPrefill, Leg, LegFailed, Role
from services.runtime.clock import Clock
from services.runtime.ports import DecodeDone, DecodeEvent, DecodeToken, FirstToken, Job, PrefillDone, PrefillEvent, WorkersPort

log = logging.getLogger(__name__)

INBOX_EVENTS = 64
"""Events read ahead of a slow client; then the legs wait, and grpc's flow control holds the workers back."""

LAST_STATUS_S = 0.5
"""What a call that has said its last word gets to end by itself: cancelled, it would look like a failure in every trace."""


class Legs:
    """Runs legs and puts what they say into one bounded inbox; leaving the context cancels those that still run.

    Errors of legs are events, never exceptions, so this may surround a `yield`: a task group as such may not, because it would wrap
    the `GeneratorExit` of a client that goes away.
    """

    def __init__(self, workers: WorkersPort, fleet: Fleet, clock: Clock, *, accept_timeout_s: float) -> None:
        self._workers = workers
        self._fleet = fleet
        self._clock = clock
        self._accept_timeout_s = accept_timeout_s
        self._group = asyncio.TaskGroup()
        self._tasks: dict[Leg, asyncio.Task[None]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        """Have said their last word."""
        self.inbox: asyncio.Queue[Event] = asyncio.Queue(INBOX_EVENTS)

    async def __aenter__(self) -> Legs:
        await self._group.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._ending:
                await asyncio.wait(self._ending, timeout=LAST_STATUS_S)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await self._group.__aexit__(None, None, None)

    def start(self, leg: Leg, job: Job, handle: KvHandle | None, dispatch: Dispatch, timeout_s: float) -> None:
        """In the caller's context: its current span is the parent of the call's."""
        events: AsyncGenerator[PrefillEvent, None] | AsyncGenerator[DecodeEvent, None]
        if leg.role is Role.PREFILL:
            events = self._workers.prefill(leg.worker, job, timeout_s=timeout_s)
        else:
            events = self._workers.decode(leg.worker, job, handle, timeout_s=timeout_s)
        name = f"{leg.role.value} {job.request_id}"
        self._tasks[leg] = self._group.create_task(self._read(leg, events, dispatch), name=name)

    def cancel(self, leg: Leg) -> None:
        """Ends the call at once; what it has already put into the inbox stays there."""
        task = self._tasks.pop(leg, None)
        if task is not None:
            task.cancel()

    async def _read(
        self, leg: Leg, events: AsyncGenerator[PrefillEvent, None] | AsyncGenerator[DecodeEvent, None], dispatch: Dispatch
    ) -> None:
        try:
            error = await self._forward(leg, events, dispatch)
        except KvRelayError as failure:
            error = failure
        # A bug in one request's adapter must end that request with an error, not leave its client waiting.
        except Exception:
            log.exception("leg %s on %s failed unexpectedly", leg.role.value, leg.worker.worker_id)
            error = InternalError("internal error while reading a worker's stream")
        finally:
            dispatch.close(self._clock.monotonic())
        if isinstance(error, WorkerLostError):
            self._fleet.mark_down(leg.worker, self._clock.monotonic())
        if error is not None:
            await self.inbox.put(LegFailed(leg, error))

    async def _forward(
        self, leg: Leg, events: AsyncGenerator[PrefillEvent, None] | AsyncGenerator[DecodeEvent, None], dispatch: Dispatch
    ) -> KvRelayError | None:
        """Whatever else goes wrong is raised."""
        who = leg.worker.worker_id
        event: PrefillEvent | DecodeEvent | None = None
        async with aclosing(events):
            if leg.role is Role.PREFILL:
                # A prefill worker says at once that it has queued the job: one that does not answer hangs.
                try:
                    async with asyncio.timeout(self._accept_timeout_s):
                        event = await anext(events, None)
                except TimeoutError:
                    return WorkerLostError(f"worker {who} did not accept within {self._accept_timeout_s:g} s", worker=who)
                if event is not None:
                    await self._put(leg, event)
            async for event in events:
                if isinstance(event, FirstToken | DecodeToken):
                    dispatch.prefilled(self._clock.monotonic())
                if isinstance(event, PrefillDone | DecodeDone):
                    self._ending.add(self._tasks[leg])
                await self._put(leg, event)
        return None if isinstance(event, PrefillDone | DecodeDone) else WorkerLostError(f"worker {who} ended its stream early", worker=who)

    async def _put(self, leg: Leg, event: PrefillEvent | DecodeEvent) -> None:
        await self.inbox.put(FromPrefill(leg, event) if leg.role is Role.PREFILL else FromDecode(leg, event))  # type: ignore[arg-type]
