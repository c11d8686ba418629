"""The first phase: compute a prompt, draw its first token, and hold the KV until it is taken or its lease ends.

A handle is given out when the prompt has its pages, never before: whoever takes pages on a decode worker has them here already, and
so nobody who holds pages there waits for pages here (`docs/architecture.md`, "No mutual wait").
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from kvrelay.errors import KvRelayError
from kvrelay.handle import check_fingerprint
from services.engine.api import Admitted, EnginePort, EngineRequest, EngineStream, Finished, PrefillProgress, TokenDrawn
from services.relay.holder import HeldKv, KvHolder
from services.relay.leases import refusal
from services.runtime.clock import Clock
from services.runtime.ports import FirstToken, Job, PrefillAccepted, PrefillDone, PrefillEvent, PrefillQueued
from services.runtime.rpc.deadline import remaining_s
from services.worker.phases import PhaseRecorder, PhaseTrace
from services.worker.prefix import PrefixExchange

log = logging.getLogger(__name__)


class Prefiller:
    """Serves jobs on one engine. A job outlives its RPC: pages stay held until the handle has ended."""

    def __init__(
        self,
        engine: EnginePort,
        holder: KvHolder,
        prefixes: PrefixExchange,
        phases: PhaseRecorder,
        clock: Clock,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._prefixes = prefixes
        self._phases = phases
        self._clock = clock
        self._tasks = tasks
        self._serving: set[asyncio.Task[None]] = set()

    async def prefill(self, job: Job) -> AsyncGenerator[PrefillEvent, None]:
        """`PrefillQueued`, `PrefillAccepted`, `FirstToken`, then `PrefillDone`. Closing it early revokes the handle and frees everything.

        Raises `FingerprintMismatchError`, `OverloadedError` and the `InvalidRequestError`s before `PrefillQueued`, `OverloadedError` for
        too many handles before `PrefillAccepted`; `LeaseExpiredError` when nobody kept the handle alive. However often it is renewed,
        the handle ends with the call's deadline.
        """
        check_fingerprint(self._engine.identity, job.fingerprint)
        # Four events and one error at most: no bound needed beyond that.
        out: asyncio.Queue[PrefillEvent | BaseException] = asyncio.Queue(maxsize=5)
        task = self._tasks.create_task(self._serve(job, out), name=f"prefill {job.request_id}")
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        done = False
        try:
            while not done:
                item = await out.get()
                if isinstance(item, BaseException):
                    raise item
                done = isinstance(item, PrefillDone)
                yield item
        finally:
            if not done:
                task.cancel()

    async def settled(self) -> None:
        """Returns when no job is computed and no handle held any more."""
        while self._serving:
            await asyncio.wait(self._serving)

    async def _serve(self, job: Job, out: asyncio.Queue[PrefillEvent | BaseException]) -> None:
        """Owns the job's pages and handle from first to last; never raises into the task group."""
        request = EngineRequest(
            job.request_id,
            job.token_ids,
            job.sampling,
            job.stop,
            cache_salt=job.cache_salt,
            prefill_only=True,
            hold=self._prefixes.enabled,
        )
        trace = self._phases.begin(job.request_id)
        answered = False
        try:
            async with self._engine.open(request) as stream:
                out.put_nowait(PrefillQueued())
                admitted = await anext(stream)
                assert isinstance(admitted, Admitted)
                # Leaving `held` waits until no reader copies any more; only then does leaving the stream free the pages.
                async with await self._holder.hold(job.token_ids, job.cache_salt, admitted.pages, at_most_s=remaining_s()) as held:
                    began_ns = self._clock.time_ns()
                    out.put_nowait(PrefillAccepted(held.handle))
                    await self._compute_while_held(job, held, stream, admitted, trace, out)
                    answered = True
                    self._prefixes.offer(job)
                    why = await held.ended()
                    trace.held(began_ns, self._clock.time_ns(), held.served, why.value)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if answered:
                log.exception("holding the KV failed after prefill had ended", extra={"request_id": job.request_id})
            else:
                # The RPC raises it; its interceptor types and logs it.
                out.put_nowait(error)

    async def _compute_while_held(
        self,
        job: Job,
        held: HeldKv,
        stream: EngineStream,
        admitted: Admitted,
        trace: PhaseTrace,
        out: asyncio.Queue[PrefillEvent | BaseException],
    ) -> None:
        """Raises the error that ended the handle when that happens before its KV is complete."""

        async def compute() -> None:
            try:
                async with aclosing(self._compute(job, held, stream, admitted, trace)) as events:
                    async for event in events:
                        out.put_nowait(event)
            except KvRelayError as error:
                held.fail(error)
                raise

        computing = asyncio.ensure_future(compute())
        ended = asyncio.ensure_future(held.ended())
        try:
            await asyncio.wait((computing, ended), return_when=asyncio.FIRST_COMPLETED)
            if not computing.done() and not held.committed:
                raise refusal(held.handle.name, ended.result())
            await computing
        finally:
            for task in (computing, ended):
                task.cancel()
            await asyncio.gather(computing, ended, return_exceptions=True)

    async def _compute(
        self, job: Job, held: HeldKv, stream: EngineStream, admitted: Admitted, trace: PhaseTrace
    ) -> AsyncGenerator[PrefillEvent, None]:
        held.progress(admitted.cached_tokens)
        held.progress(await self._prefixes.complete(job, stream, admitted, trace))
        async for event in stream:
            match event:
                case PrefillProgress():
                    held.progress(event.computed_tokens)
                    trace.chunk(event)
                case TokenDrawn(token=token, at_ns=at_ns, finish=finish):
                    held.commit(token.token_id, finish is not None, at_ns)
                    yield FirstToken(token)
                case Finished(finish_reason=finish_reason, usage=usage, marks=marks):
                    trace.prefill(marks, usage)
                    yield PrefillDone(finish_reason, usage, marks)
