"""The second phase: take the KV a handle describes and generate from it; without a handle, both phases here."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

from kvrelay import hashing
from kvrelay.errors import HandleError, HandleForgedError, PromptMismatchError
from kvrelay.handle import KvHandle, check_compatible, check_fingerprint
from kvrelay.values import FinishReason, Usage, WorkerMarks
from services.engine.api import Admitted, EnginePort, EngineRequest, EngineStream, Finished, PrefillProgress, TokenDrawn
from services.relay.puller import KvPuller, PullResult
from services.runtime.clock import Clock
from services.runtime.offloop import assert_off_loop, run_off_loop
from services.runtime.ports import DecodeAccepted, DecodeDone, DecodeEvent, DecodeToken, Job, KvReady
from services.runtime.rpc.deadline import remaining_s
from services.worker.phases import PhaseRecorder
from services.worker.prefix import PrefixExchange


class Decoder:
    """Serves jobs on one engine. Everything a job holds is freed when its generator is closed."""

    def __init__(self, engine: EnginePort, puller: KvPuller, prefixes: PrefixExchange, phases: PhaseRecorder, clock: Clock) -> None:
        self._engine = engine
        self._puller = puller
        self._prefixes = prefixes
        self._phases = phases
        self._clock = clock

    def decode(self, job: Job, handle: KvHandle | None) -> AsyncGenerator[DecodeEvent, None]:
        """`DecodeAccepted`, with a handle `KvReady`, then `DecodeToken`s (from index 1 with a handle, else 0), then `DecodeDone`.

        Raises `FingerprintMismatchError`, `LayoutMismatchError`, `PromptMismatchError`, `HandleForgedError`, `OverloadedError` and
        the `InvalidRequestError`s before `DecodeAccepted`; the other `HandleError`s and `KvTransferError` before `KvReady`.
        """
        check_fingerprint(self._engine.identity, job.fingerprint)
        if handle is None:
            return self._local(job)
        check_compatible(self._engine.identity, self._engine.layout, handle.identity, handle.layout)
        return self._split(job, handle)

    async def _local(self, job: Job) -> AsyncGenerator[DecodeEvent, None]:
        trace = self._phases.begin(job.request_id)
        async with self._engine.open(_request(job, hold=self._prefixes.enabled)) as stream:
            async for event in stream:
                match event:
                    case Admitted():
                        yield DecodeAccepted(await self._prefixes.complete(job, stream, event, trace))
                    case PrefillProgress():
                        trace.chunk(event)
                    case TokenDrawn(token=token):
                        if token.index == 0:
                            self._prefixes.offer(job)
                        yield DecodeToken(token)
                    case Finished(finish_reason=finish_reason, usage=usage, marks=marks):
                        assert finish_reason is not None
                        trace.prefill(marks, usage)
                        trace.decode(marks, usage)
                        yield DecodeDone(finish_reason, usage, marks)

    async def _split(self, job: Job, handle: KvHandle) -> AsyncGenerator[DecodeEvent, None]:
        trace = self._phases.begin(job.request_id)
        async with AsyncExitStack() as until_pulled:
            # However this ends before a pull has ended the handle: the holder need not wait for the lease to run out.
            until_pulled.push_async_callback(self._puller.release, handle)
            try:
                digest = await self._check_content(job, handle)
            except HandleError:
                # Refused, so somebody else's: not ours to end.
                until_pulled.pop_all()
                raise
            async with self._engine.open(_request(job, hold=True)) as stream:
                admitted = await self._admitted(stream, handle)
                yield DecodeAccepted(admitted.cached_tokens)
                pull_start = self._clock.time_ns()
                result = await self._puller.pull(
                    handle,
                    prompt_digest=digest,
                    pages=admitted.pages,
                    first_block=admitted.cached_tokens // self._engine.layout.block_size,
                    timeout_s=remaining_s(),
                )
                until_pulled.pop_all()
                trace.transfer(pull_start, self._clock.time_ns(), result.stats, result.prefill_end_ns, admitted.cached_tokens)
                if result.finished:
                    # Prefill's own token ended the answer: there is nothing to decode.
                    yield KvReady(result.stats)
                    yield _finished_by_prefill(job, admitted.cached_tokens, result)
                    return
                stream.resume(len(job.token_ids), result.first_token_id)
                yield KvReady(result.stats)
                async for event in stream:
                    match event:
                        case TokenDrawn(token=token):
                            yield DecodeToken(token)
                        case Finished(finish_reason=finish_reason, usage=usage, marks=marks):
                            assert finish_reason is not None
                            trace.decode(marks, usage)
                            yield DecodeDone(finish_reason, usage, marks, result.stats)

    async def _check_content(self, job: Job, handle: KvHandle) -> bytes:
        """The prompt's digest; raises unless the handle is bound to this very prompt."""
        hashes, digest = await run_off_loop(self._hash, job)
        if digest != handle.prompt_digest:
            raise PromptMismatchError("the handle holds the KV of another prompt", handle=handle.name)
        if (handle.token_start, handle.token_end, tuple(handle.block_hashes)) != (0, len(job.token_ids), hashes):
            raise HandleForgedError("the handle's tokens are not those that its digest binds", handle=handle.name)
        return digest

    async def _admitted(self, stream: EngineStream, handle: KvHandle) -> Admitted:
        """Waits for pages and keeps the handle alive meanwhile."""
        async with self._puller.keep_alive(handle):
            admitted = await anext(stream)
        assert isinstance(admitted, Admitted)
        return admitted

    def _hash(self, job: Job) -> tuple[tuple[bytes, ...], bytes]:
        """Block hashes and digest of the prompt."""
        assert_off_loop("hashing a prompt")
        root = hashing.root_hash(self._engine.identity.fingerprint, job.cache_salt)
        block_size = self._engine.layout.block_size
        return tuple(hashing.block_hashes(root, job.token_ids, block_size)), hashing.prompt_digest(root, job.token_ids, block_size)


def _request(job: Job, *, hold: bool) -> EngineRequest:
    return EngineRequest(job.request_id, job.token_ids, job.sampling, job.stop, cache_salt=job.cache_salt, hold=hold)


def _finished_by_prefill(job: Job, cached_tokens: int, result: PullResult) -> DecodeDone:
    reason = FinishReason.LENGTH if job.stop.max_tokens == 1 else FinishReason.STOP
    return DecodeDone(reason, Usage(len(job.token_ids), cached_tokens, 1), WorkerMarks(prefill_end=result.prefill_end_ns), result.stats)
