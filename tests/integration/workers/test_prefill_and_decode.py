"""Prefiller and decoder on real engines, joined in memory: the hand-over, every way to leave it, and what is left afterwards."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from kvrelay.errors import (
    FingerprintMismatchError,
    HandleConsumedError,
    InvalidTokenIdError,
    KvAbortedError,
    KvRelayError,
    LayoutMismatchError,
    LeaseExpiredError,
    PromptMismatchError,
)
from kvrelay.handle import KvHandle
from kvrelay.values import FinishReason, SamplingParams, StopConditions
from services.decode.decoder import Decoder
from services.engine.device_model import DeviceModel
from services.engine.engine import Engine
from services.engine.scheduling.core import StepEntry
from services.engine.settings import EngineSettings
from services.prefill.prefiller import Prefiller
from services.relay.holder import KvHolder
from services.relay.puller import KvPuller
from services.relay.transports.memory import MemoryTransfer
from services.runtime.clock import ManualClock, SystemClock
from services.runtime.ports import (
    DecodeDone,
    DecodeEvent,
    DecodeToken,
    FirstToken,
    Job,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    PrefillEvent,
    PrefillQueued,
)
from services.runtime.processes.entry import background
from services.runtime.telemetry.tracing import Telemetry
from services.worker.phases import PhaseRecorder
from services.worker.prefix import PrefixExchange

DEADLINE_S = 20.0
LEASE_TTL_S = 5.0


@dataclass(slots=True)
class Pair:
    """A prefill and a decode worker in this process."""

    prefiller: Prefiller
    decoder: Decoder
    prefill_engine: Engine
    decode_engine: Engine
    holder: KvHolder
    clock: ManualClock
    """The lease clock."""

    def job(self, prompt: int = 100, max_tokens: int = 6, name: str = "a", **sampling: object) -> Job:
        return Job(
            name,
            self.decode_engine.identity.fingerprint,
            tuple(5 + 7 * at % 250 for at in range(prompt)),
            SamplingParams(**sampling),  # type: ignore[arg-type]
            StopConditions(max_tokens=max_tokens, ignore_eos=True),
        )

    async def settle(self) -> None:
        """Waits until no engine does anything and proves that nothing is left."""
        async with asyncio.timeout(DEADLINE_S):
            await self.prefiller.settled()
            for engine in (self.prefill_engine, self.decode_engine):
                await engine.wait_idle()
                engine.check_integrity()
                assert engine.load().held_pages == 0 and engine.load().running == engine.load().waiting == 0
        assert self.holder.held_handles == 0


@asynccontextmanager
async def pair(folder: Path, *, pages: int = 96, chunk: int = 16) -> AsyncIterator[Pair]:
    settings = EngineSettings(folder, num_pages=pages, max_num_batched_tokens=chunk, max_num_seqs=8, debug=True)
    telemetry, clock = Telemetry.disabled(), ManualClock()
    prefill_engine, decode_engine = await Engine.start(settings), await Engine.start(settings)
    try:
        async with background() as tasks:
            engine = prefill_engine
            holder = KvHolder(engine.identity, engine.layout, 7, "here", engine.pages, clock, LEASE_TTL_S)
            prefiller = Prefiller(engine, holder, PrefixExchange(engine, None), PhaseRecorder(telemetry, "prefill-0"), SystemClock(), tasks)
            puller = KvPuller(MemoryTransfer({"here": holder}), decode_engine.identity, decode_engine.layout, decode_engine.pages)
            decoder = Decoder(
                decode_engine, puller, PrefixExchange(decode_engine, None), PhaseRecorder(telemetry, "decode-0"), SystemClock()
            )
            both = Pair(prefiller, decoder, prefill_engine, decode_engine, holder, clock)
            yield both
            await both.settle()
    finally:
        await prefill_engine.stop()
        await decode_engine.stop()


@asynccontextmanager
async def prefilling(both: Pair, job: Job) -> AsyncIterator[tuple[KvHandle, AsyncGenerator[PrefillEvent, None]]]:
    async with aclosing(both.prefiller.prefill(job)) as events:
        assert isinstance(await anext(events), PrefillQueued)
        accepted = await anext(events)
        assert isinstance(accepted, PrefillAccepted)
        yield accepted.handle, events


async def local(both: Pair, job: Job) -> list[int]:
    async with asyncio.timeout(DEADLINE_S), aclosing(both.decoder.decode(job, None)) as events:
        return [event.token.token_id async for event in events if isinstance(event, DecodeToken)]


async def split(both: Pair, job: Job) -> tuple[list[int], list[DecodeEvent]]:
    """Token ids, the first from prefill, and decode's events."""
    async with asyncio.timeout(DEADLINE_S), prefilling(both, job) as (handle, prefill):

        async def decode() -> list[DecodeEvent]:
            async with aclosing(both.decoder.decode(job, handle)) as events:
                return [event async for event in events]

        decoding = asyncio.ensure_future(decode())
        try:
            rest = [event async for event in prefill]
            events = await decoding
        finally:
            decoding.cancel()
            await asyncio.wait([decoding])
    assert isinstance(rest[0], FirstToken) and isinstance(rest[1], PrefillDone)
    return [rest[0].token.token_id, *(e.token.token_id for e in events if isinstance(e, DecodeToken))], events


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2}])
async def test_split_equals_local_cold_and_warm(tiny_model: Path, sampling: dict[str, object]) -> None:
    async with pair(tiny_model) as both:
        for prompt in (1, 15, 16, 17, 100):
            job = both.job(prompt, name=f"{prompt}", **sampling)
            cold, events = await split(both, job)
            warm, warm_events = await split(both, replace(job, request_id=f"{prompt}-warm"))
            assert cold == warm == await local(both, replace(job, request_id=f"{prompt}-local"))
            done = events[-1]
            assert isinstance(done, DecodeDone) and done.finish_reason is FinishReason.LENGTH
            assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (prompt, 6)
            ready = next(e for e in warm_events if isinstance(e, KvReady))
            assert ready.stats.blocks == -(-prompt // 16) - (prompt - 1) // 16, "only what the decode worker lacks is moved"


async def test_a_first_token_that_ends_the_answer_leaves_nothing_to_decode(tiny_model: Path) -> None:
    async with pair(tiny_model) as both:
        tokens, events = await split(both, both.job(max_tokens=1))
        assert len(tokens) == 1
        done = events[-1]
        assert isinstance(done, DecodeDone) and done.finish_reason is FinishReason.LENGTH and done.usage.completion_tokens == 1


async def test_closing_a_prefill_revokes_its_handle(tiny_model: Path) -> None:
    async with pair(tiny_model) as both:
        async with prefilling(both, both.job()) as (handle, _):
            pass
        await both.settle()
        with pytest.raises(KvAbortedError):
            await _first_after_accept(both, handle)


async def test_a_handle_nobody_takes_is_freed_when_its_lease_ends(tiny_model: Path) -> None:
    async with pair(tiny_model) as both:
        async with asyncio.timeout(DEADLINE_S), prefilling(both, both.job()) as (_, events):
            assert [type(event) async for event in events] == [FirstToken, PrefillDone]
        assert both.holder.held_handles == 1
        assert both.prefill_engine.load().held_pages > 0
        both.clock.advance(LEASE_TTL_S + 1)
        both.holder.sweep()


async def test_a_lease_that_ends_during_prefill_stops_the_computation(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, forward = threading.Event(), DeviceModel.forward

    def waiting(self: DeviceModel, entries: Sequence[StepEntry]) -> torch.Tensor:
        assert go_on.wait(DEADLINE_S)
        return forward(self, entries)

    monkeypatch.setattr(DeviceModel, "forward", waiting)
    async with pair(tiny_model) as both:
        with pytest.raises(LeaseExpiredError):
            async with asyncio.timeout(DEADLINE_S), prefilling(both, both.job(1000)) as (_, events):
                both.clock.advance(LEASE_TTL_S + 1)
                both.holder.sweep()
                go_on.set()
                async for _ in events:
                    pass


async def _first_after_accept(both: Pair, handle: KvHandle, job: Job | None = None) -> None:
    async with asyncio.timeout(DEADLINE_S), aclosing(both.decoder.decode(job or both.job(name="x"), handle)) as events:
        async for _ in events:
            pass


async def test_an_error_after_the_answer_is_logged_not_lost(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr("services.worker.phases.PhaseTrace.held", broken)
    async with pair(tiny_model) as both:
        tokens, _ = await split(both, both.job())
        assert len(tokens) == 6
        await both.prefiller.settled()
    assert "after prefill had ended" in caplog.text and "broken on purpose" in caplog.text


async def test_decode_refuses_what_is_not_its_own(tiny_model: Path) -> None:
    async with pair(tiny_model) as both:
        job = both.job()
        async with prefilling(both, job) as (handle, _):
            with pytest.raises(PromptMismatchError):
                await _first_after_accept(both, handle, both.job(99, name="other"))
            with pytest.raises(FingerprintMismatchError):
                both.decoder.decode(replace(job, fingerprint=bytes(32)), handle)
            other = replace(handle.identity, weights_digest="sha256:other")
            with pytest.raises(FingerprintMismatchError, match="weights_digest"):
                both.decoder.decode(job, replace(handle, identity=other))
            with pytest.raises(FingerprintMismatchError, match="numerics"):
                both.decoder.decode(job, replace(handle, identity=replace(handle.identity, numerics="other")))
            with pytest.raises(LayoutMismatchError, match="block_size"):
                both.decoder.decode(job, replace(handle, layout=replace(handle.layout, block_size=32)))
            await _first_after_accept(both, handle, job)
            with pytest.raises(HandleConsumedError):
                await _first_after_accept(both, handle, replace(job, request_id="again"))
        with pytest.raises(FingerprintMismatchError):
            await anext(both.prefiller.prefill(replace(job, fingerprint=b"")))


async def test_bad_input_is_refused_before_anything_is_held(tiny_model: Path) -> None:
    async with pair(tiny_model) as both:
        job = replace(both.job(), token_ids=(1, 2, 9999))
        with pytest.raises(InvalidTokenIdError):
            await anext(both.prefiller.prefill(job))
        with pytest.raises(InvalidTokenIdError):
            await local(both, job)


async def test_a_cancel_at_any_moment_frees_everything_and_the_next_request_works(tiny_model: Path) -> None:
    """Cancels the pair of legs after n turns of the loop, for growing n, until one survives."""
    async with pair(tiny_model) as both:
        expected = await local(both, both.job(60, name="reference"))
        for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377):
            task = asyncio.ensure_future(split(both, both.job(60, name=f"cancelled-{turns}")))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await both.settle()
        tokens, _ = await split(both, both.job(60, name="after"))
        assert tokens == expected


async def test_many_at_once_share_a_small_pool(tiny_model: Path) -> None:
    async with pair(tiny_model, pages=24) as both:
        jobs = [both.job(40 + n, name=f"{n}") for n in range(8)]
        expected = [await local(both, replace(job, request_id=f"{job.request_id}-local")) for job in jobs]
        answers = await asyncio.gather(*(split(both, job) for job in jobs), return_exceptions=True)
        assert not [answer for answer in answers if isinstance(answer, BaseException) and not isinstance(answer, KvRelayError)]
        assert [answer[0] for answer in answers if not isinstance(answer, BaseException)] == expected
