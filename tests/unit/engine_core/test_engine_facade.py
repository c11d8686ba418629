"""The engine on the event loop: delivery, cancellation, refusal, stopping. The loop is watched for blocking calls meanwhile."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from kvrelay.errors import (
    ConfigError,
    EmptyPromptError,
    InternalError,
    ModelLoadError,
    OverloadedError,
    UnavailableError,
)
from kvrelay.hashing import tokenizer_digest
from kvrelay.schedule_report import draw
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Token
from services.engine.api import Admitted, EngineEvent, EnginePort, EngineRequest, EngineStream, Finished, PrefillProgress, TokenDrawn
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from tests.engine_runs import KERNELS
from tests.tiny_models import write_tiny_model


def settings(folder: Path, **changes: object) -> EngineSettings:
    return replace(EngineSettings(folder, num_pages=64, debug=True, max_num_batched_tokens=64, max_num_seqs=8), **changes)  # type: ignore[arg-type]


@pytest_asyncio.fixture
async def engine(tiny_model: Path) -> AsyncIterator[Engine]:
    one = await Engine.start(settings(tiny_model))
    yield one
    await one.wait_idle()
    one.check_integrity()
    assert one.load().held_pages == 0 and one.load().running == one.load().waiting == 0
    await one.stop()


def request(name: str, prompt: int | list[int] = 20, max_tokens: int = 5, **kwargs: object) -> EngineRequest:
    token_ids = [5 + at % 250 for at in range(prompt)] if isinstance(prompt, int) else prompt
    return EngineRequest(name, token_ids, stop=StopConditions(max_tokens=max_tokens, ignore_eos=True), **kwargs)  # type: ignore[arg-type]


async def events_of(engine: Engine, one: EngineRequest) -> list[EngineEvent]:
    async with engine.open(one) as stream:
        return [event async for event in stream]


async def answer(engine: Engine, one: EngineRequest) -> list[Token]:
    return [event.token for event in await events_of(engine, one) if isinstance(event, TokenDrawn)]


async def test_it_is_what_the_other_rooms_expect(engine: Engine, tiny_model: Path) -> None:
    port: EnginePort = engine
    async with port.open(request("a")) as stream:
        typed: EngineStream = stream
        assert isinstance(await anext(aiter(typed)), Admitted)
    assert port.pages.page_bytes == port.layout.block_bytes == len(port.pages.page_view(0))
    assert engine.identity.model == tiny_model.name and engine.identity.tokenizer_digest == tokenizer_digest(engine.tokenizer_files())
    assert engine.tokenizer_files()["tokenizer.json"] == (tiny_model / "tokenizer.json").read_bytes()
    assert (engine.vocab_size, engine.max_context_tokens, engine.eos_ids) == (300, 4096, (2,))


async def test_answers_under_page_shortage_are_those_of_an_engine_with_room_and_the_schedule_says_who_was_preempted(
    engine: Engine, tiny_model: Path, tmp_path: Path
) -> None:
    requests = [request(f"r{index}", [7 + index, *range(10, 40)], 60) for index in range(3)]
    right = [await answer(engine, one) for one in requests]
    tight = await Engine.start(settings(tiny_model, num_pages=12, policy="decode-only", explain_schedule=str(tmp_path / "schedule")))
    assert await asyncio.gather(*(answer(tight, one) for one in requests)) == right
    await tight.stop()
    picture = list(draw(tmp_path / "schedule"))
    assert picture[0].startswith("policy decode-only") and any("preempted with" in line for line in picture)


async def test_events_arrive_in_order_and_the_stream_ends_after_the_last(engine: Engine) -> None:
    async with engine.open(request("a", 100, max_tokens=3)) as stream:
        events = [event async for event in stream]
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
    assert [type(event) for event in events] == [Admitted, *[PrefillProgress] * 2, *[TokenDrawn] * 3, Finished]
    assert events[-1].finish_reason is FinishReason.LENGTH  # type: ignore[union-attr]


async def test_a_slow_reader_loses_nothing(engine: Engine) -> None:
    async with engine.open(request("a", max_tokens=40)) as stream:
        await engine.wait_idle()
        assert len([event async for event in stream if isinstance(event, TokenDrawn)]) == 40


async def test_many_requests_share_steps_and_each_gets_its_own_answer(engine: Engine) -> None:
    requests = [request(f"r{at}", [at + 5, 7, 9], sampling=SamplingParams(temperature=1.0, seed=at)) for at in range(12)]
    alone = [await answer(engine, one) for one in requests]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(answer(engine, one)) for one in requests]
    assert [task.result() for task in tasks] == alone


async def test_decodes_ride_along_with_a_long_prompt(engine: Engine) -> None:
    async with engine.open(request("short", 3, max_tokens=60)) as short:
        await anext(short)
        long_events = await events_of(engine, request("long", [9 + at % 200 for at in range(600)], max_tokens=1))
        progress = [event for event in long_events if isinstance(event, PrefillProgress)]
        assert max(event.batch_tokens for event in progress) <= 64
        drawn = [event async for event in short if isinstance(event, TokenDrawn)]
        meanwhile = [event for event in drawn if progress[0].started_ns <= event.at_ns <= progress[-1].ended_ns]
    assert len(progress) >= 600 // 64 and len(meanwhile) >= len(progress) - 1


async def test_leaving_early_gives_the_pages_back_and_the_id_too(engine: Engine) -> None:
    for _ in range(3):
        async with engine.open(request("same", 300, max_tokens=50)) as stream:
            assert isinstance(await anext(stream), Admitted)
        await engine.wait_idle()
        assert engine.load().held_pages == 0


async def test_another_attempt_of_a_request_does_not_wait_for_the_release_of_the_one_before(engine: Engine) -> None:
    wanted = await answer(engine, request("same", max_tokens=3))
    for _ in range(20):
        async with engine.open(request("same", 200, hold=True)):
            assert await answer(engine, request("same", max_tokens=3)) == wanted


async def test_cancels_at_any_moment_leave_nothing_behind(engine: Engine) -> None:
    script = random.Random(4)
    wanted = await answer(engine, request("before", 50, max_tokens=8))

    async def use(name: str) -> None:
        one = request(name, script.randrange(1, 200), script.randrange(1, 40), hold=script.random() < 0.3)
        async with engine.open(one) as stream:
            async for event in stream:
                if isinstance(event, Admitted) and one.hold and script.random() < 0.5:
                    stream.resume(0)

    async with asyncio.TaskGroup() as group:
        live: list[asyncio.Task[None]] = []
        for at in range(80):
            live.append(group.create_task(use(f"r{at}")))
            for _ in range(script.randrange(30)):
                await asyncio.sleep(0)
            if len(live) > script.randrange(6):
                live.pop(script.randrange(len(live))).cancel()
        await asyncio.sleep(0.05)
        for task in live:
            task.cancel()
    await engine.wait_idle()
    engine.check_integrity()
    assert engine.load().held_pages == 0 and engine.load().running == 0
    assert await answer(engine, request("after", 50, max_tokens=8)) == wanted


async def test_a_failed_request_raises_its_error_where_it_is_read(engine: Engine) -> None:
    async with engine.open(request("a", hold=True)) as stream:
        await anext(stream)
        stream.resume(20, 299)
        assert [event async for event in stream if isinstance(event, TokenDrawn)]
    core = engine._core
    real, core._model = core._model, None  # type: ignore[assignment]
    with pytest.raises(InternalError):
        await answer(engine, request("b"))
    core._model = real
    assert len(await answer(engine, request("c"))) == 5


async def test_the_queue_is_bounded(tiny_model: Path) -> None:
    engine = await Engine.start(settings(tiny_model, max_waiting=2, num_pages=4))
    try:
        async with engine.open(request("big", 40, max_tokens=20)) as big:
            await anext(big)
            async with engine.open(request("w1", 40)), engine.open(request("w2", 40)):
                with pytest.raises(OverloadedError) as refused:
                    await answer(engine, request("w3"))
                assert refused.value.retry_after_s
                await engine.wait_idle()
                assert engine.load().waiting == 2
                with pytest.raises(OverloadedError):
                    await answer(engine, request("w4"))
        await engine.wait_idle()
        assert len(await answer(engine, request("w5"))) == 5
    finally:
        await engine.stop()


async def test_refusals_are_raised_on_entry_and_reserve_nothing(engine: Engine) -> None:
    with pytest.raises(EmptyPromptError):
        await answer(engine, request("a", []))
    await engine.wait_idle()
    assert engine.load().held_pages == 0


async def test_resume_checks_what_it_is_given(engine: Engine) -> None:
    async with engine.open(request("a", 20, hold=True)) as stream:
        with pytest.raises(ValueError, match="not held"):
            stream.resume(0)
        await anext(stream)
        for arguments in ((21, None), (-1, None), (19, 5)):
            with pytest.raises(ValueError, match="cannot resume"):
                stream.resume(*arguments)
        stream.resume(0)
        with pytest.raises(ValueError, match="not held"):
            stream.resume(0)
    async with engine.open(request("b", 20, hold=True, prefill_only=True)) as stream:
        await anext(stream)
        with pytest.raises(ValueError, match="prompt only"):
            stream.resume(20, 5)


async def test_cached_blocks_are_reported_once(engine: Engine) -> None:
    await answer(engine, request("a", 40))
    await engine.wait_idle()
    assert len(engine.take_block_changes().stored) == 2
    await answer(engine, request("b", 40))
    await engine.wait_idle()
    assert not engine.take_block_changes().stored


async def test_stopping_fails_open_requests_and_refuses_new_ones(tiny_model: Path) -> None:
    engine = await Engine.start(settings(tiny_model))
    async with engine.open(request("a", hold=True)) as stream:
        await anext(stream)
        await engine.stop()
        with pytest.raises(UnavailableError):
            async for _ in stream:
                pass
    with pytest.raises(UnavailableError):
        await answer(engine, request("b"))
    await engine.wait_idle()
    await engine.stop()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvrelay-engine"]


async def test_an_error_in_the_thread_itself_ends_every_stream_and_is_told(tiny_model: Path) -> None:
    engine = await Engine.start(settings(tiny_model))
    async with engine.open(request("held", hold=True)) as held, engine.open(request("a", hold=True)) as stream:
        await anext(held)
        await anext(stream)
        engine._core.step = None  # type: ignore[assignment, method-assign]
        stream.resume(0)
        for one in (held, stream):
            with pytest.raises(InternalError):
                async for _ in one:
                    pass
    assert not engine.healthy
    with pytest.raises(UnavailableError):
        await answer(engine, request("b"))
    await engine.wait_idle()
    await engine.stop()


async def test_a_violation_of_the_pages_integrity_is_fatal_in_debug(tiny_model: Path) -> None:
    engine = await Engine.start(settings(tiny_model))
    engine._core._blocks._free.pop()
    with pytest.raises((InternalError, UnavailableError)):
        for at in range(100):
            await answer(engine, request(f"r{at}"))
    await engine.stop()


async def test_a_folder_that_cannot_be_served_is_an_error_of_start(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError):
        await Engine.start(EngineSettings(tmp_path))


async def test_a_tokenizer_that_cannot_be_read_is_an_error_of_start(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "llama")
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        await Engine.start(settings(folder))
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        await Engine.start(settings(folder))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "float16"},
        {"kv_dtype": "int8"},
        {"quantization": "int4"},
        {"kernels": "triton"},
        {"num_pages": 0, "kv_cache_bytes": 10},
        {"max_num_seqs": 1000},
        {"block_size": 10},
        {"device": "nonsense"},
        {"cpus": (1023,)},
        {"threads": 0},
        {"threads": 100_000},
        {"num_pages": -1},
        {"num_pages": 1 << 46},
        {"num_pages": 1 << 60},
    ],
)
async def test_wrong_settings_are_errors_of_start(tiny_model: Path, changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        await Engine.start(settings(tiny_model, **changes))


async def test_the_thread_is_pinned_when_asked(tiny_model: Path) -> None:
    cpu = min(os.sched_getaffinity(0))
    engine = await Engine.start(settings(tiny_model, cpus=(cpu,)))
    try:
        thread = next(thread for thread in threading.enumerate() if thread.name == "kvrelay-engine")
        assert thread.native_id is not None and os.sched_getaffinity(thread.native_id) == {cpu}
        assert os.sched_getaffinity(0) == os.sched_getaffinity(os.getpid())
    finally:
        await engine.stop()


def start_and_stop(folder: Path, **changes: object) -> Engine:
    async def run() -> Engine:
        engine = await Engine.start(settings(folder, **changes))
        await engine.stop()
        return engine

    return asyncio.run(run())


def test_identity_changes_with_what_changes_kv_and_with_nothing_else(tiny_model: Path, tmp_path: Path) -> None:
    base = start_and_stop(tiny_model).identity
    copy = write_tiny_model(tmp_path / "copy", "llama")
    assert start_and_stop(copy, model_name="other", num_pages=9).identity.fingerprint == base.fingerprint
    others = {
        "weights": write_tiny_model(tmp_path / "w", "llama", seed=1),
        "rope": write_tiny_model(tmp_path / "r", "llama", rope_theta=500.0),
        "epsilon": write_tiny_model(tmp_path / "e", "llama", rms_norm_eps=1e-6),
    }
    found = {name: start_and_stop(folder).identity for name, folder in others.items()}
    (copy / "tokenizer_config.json").write_text("{}")
    found["tokenizer"] = start_and_stop(copy).identity
    found["dtype"] = start_and_stop(tiny_model, dtype="float32").identity
    assert len({identity.fingerprint for identity in (base, *found.values())}) == 6
    assert found["rope"].rope != base.rope and found["tokenizer"].tokenizer_digest != base.tokenizer_digest


@pytest.mark.parametrize("kernels", KERNELS)
def test_identity_tells_what_computes(tiny_model: Path, kernels: str) -> None:
    assert start_and_stop(tiny_model, kernels=kernels).identity.numerics.startswith(f"{kernels}-")
