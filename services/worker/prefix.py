"""A worker's traffic with the shared block store: take a prefix before computing, write finished blocks behind."""

from __future__ import annotations

import asyncio
import logging

from kvrelay import hashing
from kvrelay.errors import KvRelayError
from kvrelay.values import StopConditions
from services.engine.api import Admitted, EnginePort, EngineRequest, EngineStream
from services.relay.store_client import BlockStoreClient
from services.runtime.clock import Clock, SystemClock
from services.runtime.offloop import assert_off_loop, run_off_loop
from services.runtime.ports import Job
from services.runtime.rpc.deadline import remaining_s
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import Attributes, Telemetry, current_traceparent
from services.worker.phases import PhaseTrace

log = logging.getLogger(__name__)

FETCH_TIMEOUT_S = 10.0
STORE_TIMEOUT_S = 30.0


class PrefixExchange:
    """Optional company of an engine: with no store, `enabled` is False and the rest does nothing.

    The store only ever saves work: no failure of it reaches a request.
    """

    def __init__(
        self,
        engine: EnginePort,
        store: BlockStoreClient | None,
        telemetry: Telemetry | None = None,
        *,
        max_pending: int = 32,
        clock: Clock | None = None,
    ) -> None:
        self._engine = engine
        self._store = store
        self._clock = clock or SystemClock()
        self._telemetry = telemetry or Telemetry.disabled()
        self._pending: asyncio.Queue[tuple[Job, str]] = asyncio.Queue(max_pending)
        """Each with the traceparent of its request."""
        self.dropped = 0
        """Jobs whose blocks were not written because the queue was full: a later request offers them again."""

    @property
    def enabled(self) -> bool:
        return self._store is not None

    def _hash(self, job: Job) -> list[bytes]:
        assert_off_loop("hashing a prompt")
        root = hashing.root_hash(self._engine.identity.fingerprint, job.cache_salt)
        return hashing.block_hashes(root, job.token_ids, self._engine.layout.block_size)

    async def complete(self, job: Job, stream: EngineStream, admitted: Admitted, trace: PhaseTrace) -> int:
        """Ends the hold of a request that was opened with `hold=enabled`, after importing what the store has beyond the worker's own cache.

        Returns the leading tokens that need not be computed. Without a store there is no hold and nothing is done.
        """
        if self._store is None:
            return admitted.cached_tokens
        began_ns = self._clock.time_ns()
        tokens = await self._fetch(self._store, job, admitted)
        trace.fetched(began_ns, self._clock.time_ns(), tokens - admitted.cached_tokens)
        stream.resume(tokens)
        return tokens

    async def _fetch(self, store: BlockStoreClient, job: Job, admitted: Admitted) -> int:
        """Tokens now in the pages. The prompt's last token is never imported: its logits have to be computed."""
        block_size = self._engine.layout.block_size
        first, last = admitted.cached_tokens // block_size, (len(job.token_ids) - 1) // block_size
        if first == last:
            return admitted.cached_tokens
        hashes = (await run_off_loop(self._hash, job))[:last]
        blocks = await store.fetch_prefix(hashes, admitted.pages, first, timeout_s=min(FETCH_TIMEOUT_S, remaining_s()))
        return (first + blocks) * block_size

    def offer(self, job: Job) -> None:
        """Queues a computed prompt's full blocks for the store. Never waits; a full queue drops the offer."""
        if self._store is None or len(job.token_ids) <= self._engine.layout.block_size:
            return
        try:
            self._pending.put_nowait((job, current_traceparent()))
        except asyncio.QueueFull:
            self.dropped += 1

    async def run(self) -> None:
        """Writes offers to the store, one after the other, until cancelled."""
        while True:
            job, request = await self._pending.get()
            try:
                await self._write(job, request)
            except KvRelayError as error:
                log.warning("blocks not stored: %s", error, extra={"request_id": job.request_id, "reason": error.reason})
            except TimeoutError:
                log.warning("blocks not stored: not within %g s", STORE_TIMEOUT_S, extra={"request_id": job.request_id})

    async def _write(self, job: Job, traceparent: str) -> None:
        assert self._store is not None
        # A held request pins the blocks in the cache for as long as they are read, by the same rule as any other request.
        request = EngineRequest(
            f"store/{job.request_id}",
            job.token_ids,
            stop=StopConditions(max_tokens=1),
            cache_salt=job.cache_salt,
            prefill_only=True,
            hold=True,
        )
        hashes = await run_off_loop(self._hash, job)
        async with self._engine.open(request) as stream, asyncio.timeout(STORE_TIMEOUT_S):
            admitted = await anext(stream)
            assert isinstance(admitted, Admitted)
            blocks = admitted.cached_tokens // self._engine.layout.block_size
            if blocks:
                about: Attributes = {names.REQUEST_ID: job.request_id, names.KV_BLOCKS: blocks}
                with self._telemetry.span(names.SPAN_KV_WRITE_BEHIND, about, follows=traceparent):
                    await self._store.store(hashes[:blocks], admitted.pages[:blocks], timeout_s=STORE_TIMEOUT_S)
