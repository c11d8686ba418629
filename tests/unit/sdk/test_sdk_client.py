"""The asynchronous client against a scripted router over real gRPC."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import grpc
import pytest

import kvrelay
from kvrelay import errors, wire
from kvrelay.client import TARGET_ENV
from kvrelay.handle import KvLayout, ModelIdentity
from kvrelay.inference.v1 import router_service_pb2 as pb
from kvrelay.inference.v1 import worker_pb2
from kvrelay.retry import RetryPolicy
from kvrelay.stream import GenerationStream
from kvrelay.values import FinishReason, Usage
from tests.unit.sdk.scripted_router import (
    ScriptedRouter,
    done,
    failing,
    one_token_then_silence,
    playing,
    serving,
    started,
    token,
)

NO_DELAY = RetryPolicy(draw=lambda: 0.0)
IDENTITY = ModelIdentity("tiny", "sha256:aa", "sha256:bb", "bfloat16", "bfloat16", "default:10000", "native-1")
LAYOUT = KvLayout(layers=2, kv_heads=1, head_dim=8, block_size=16, dtype="bfloat16")


def client_of(router: ScriptedRouter, **options: object) -> kvrelay.AsyncClient:
    return kvrelay.AsyncClient(router.target, **{"retry": NO_DELAY, "timeout": 20.0, **options})  # type: ignore[arg-type]


async def read_until_error(stream: GenerationStream) -> errors.KvRelayError:
    with pytest.raises(errors.KvRelayError) as caught:
        async for _ in stream:
            pass
    return caught.value


async def test_tokens_come_in_order_and_the_end_carries_completion_and_client_side_times(router: ScriptedRouter) -> None:
    async with client_of(router) as client:
        stream = client.generate("hello", max_tokens=3)
        tokens = [t async for t in stream]
    assert [(t.index, t.token_id, t.text) for t in tokens] == [(0, 100, "w0 "), (1, 101, "w1 "), (2, 102, "w2 ")]
    assert stream.text == "w0 w1 w2 " and stream.token_ids == [100, 101, 102]
    assert stream.completion is not None and stream.completion.finish_reason is FinishReason.LENGTH
    assert stream.completion.usage == Usage(3, 0, 3) and stream.completion.path == "split"
    assert stream.completion.transfer is not None and stream.completion.transfer.kv_bytes == 4096
    assert stream.started is not None and stream.completion.trace_id == stream.started.trace_id != ""
    assert stream.ttft_s is not None and stream.ttft_s > 0 and len(stream.itl_s) == 2
    assert stream.decision == "long prompt"


@pytest.mark.parametrize("timeout", [float("inf"), 1e12, None])
async def test_a_client_without_end_or_with_a_far_one_gets_its_answer(router: ScriptedRouter, timeout: float | None) -> None:
    async with client_of(router, timeout=timeout) as client:
        assert (await client.generate("x").collect()).text == "w0 w1 w2 "
        await client.fleet()
    async with client_of(router, timeout=0.001) as client:
        if timeout is not None:  # there it means the client's own
            assert (await client.generate("x", timeout=timeout).collect()).text == "w0 w1 w2 "
            await client.fleet(timeout=timeout)


@pytest.mark.parametrize("timeout", [float("nan"), 0, -1, "5"])
async def test_a_timeout_that_is_none_is_refused_before_anything_is_sent(router: ScriptedRouter, timeout: float) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        client_of(router, timeout=timeout)
    assert caught.value.fields["field"] == "timeout"
    async with client_of(router) as client:
        with pytest.raises(errors.InvalidRequestError):
            client.generate("x", timeout=timeout)
        with pytest.raises(errors.InvalidRequestError):
            await client.fleet(timeout=timeout)
    assert router.requests == [] and not router.asked.is_set()


async def test_metadata_that_grpc_would_refuse_is_an_invalid_request(router: ScriptedRouter) -> None:
    with pytest.raises(errors.InvalidRequestError, match="metadata must be"):
        client_of(router, metadata={"Bad Key": "x"})
    async with client_of(router, metadata={"x-raw-bin": b"\x00\xff"}) as client:
        await client.generate("x").collect()
    assert router.metadata[0]["x-raw-bin"] == b"\x00\xff"


async def test_every_option_reaches_the_router(router: ScriptedRouter) -> None:
    async with client_of(router, metadata={"x-tenant": "a"}) as client:
        await client.generate(
            [7, 8, 9], model="tiny", max_tokens=5, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=2**64 - 1,
            repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=-0.3, logit_bias={5: -1.5}, min_tokens=2, logprobs=5,
            stop="END", stop_token_ids=[4], ignore_eos=True, request_id="mine", cache_salt="pepper",
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", metadata={"x-more": "b"},
        ).collect()  # fmt: skip
    (request,) = router.requests
    assert list(request.token_ids.ids) == [7, 8, 9] and request.WhichOneof("prompt") == "token_ids"
    assert (request.model, request.request_id, request.cache_salt) == ("tiny", "mine", "pepper")
    sampling = wire.sampling_from_proto(request.sampling)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 3, 0.9, 0.1)
    assert (sampling.seed, sampling.logit_bias, sampling.min_tokens, sampling.logprobs) == (2**64 - 1, {5: -1.5}, 2, 5)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, -0.3)
    stop = wire.stop_from_proto(request.stop)
    assert (stop.max_tokens, stop.strings, stop.token_ids, stop.ignore_eos) == (5, ("END",), (4,), True)
    (metadata,) = router.metadata
    assert metadata["x-tenant"] == "a" and metadata["x-more"] == "b"
    assert metadata["traceparent"].endswith("-b7ad6b7169203331-01")


async def test_absent_seed_and_max_tokens_are_left_to_the_router(router: ScriptedRouter) -> None:
    async with client_of(router) as client:
        await client.generate(messages=[{"role": "user", "content": "hi"}, kvrelay.ChatMessage("assistant", "ho")]).collect()
    (request,) = router.requests
    assert not request.sampling.HasField("seed") and not request.stop.HasField("max_tokens")
    assert [(m.role, m.content) for m in request.chat.messages] == [("user", "hi"), ("assistant", "ho")]


async def test_leaving_the_loop_early_cancels_on_the_server(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    async with client_of(router) as client:
        async for _ in client.generate("x"):
            break
        gc.collect()
        await asyncio.wait_for(router.cancelled.wait(), 10)


async def test_leaving_the_context_cancels_on_the_server_while_the_stream_is_still_referenced(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    async with client_of(router) as client:
        async with client.generate("x") as stream:
            assert stream.started is not None and stream.started.request_id == "r-1"
            await anext(stream)
        await asyncio.wait_for(router.cancelled.wait(), 10)
        assert stream.text == "w0 "
        with pytest.raises(errors.CancelledByClientError):
            await stream.collect()


async def test_cancelling_the_reading_task_cancels_on_the_server(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    first = asyncio.Event()

    async def read(stream: GenerationStream) -> None:
        async for _ in stream:
            first.set()

    async with client_of(router) as client:
        stream = client.generate("x")
        task = asyncio.create_task(read(stream))
        await first.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(router.cancelled.wait(), 10)


async def test_closing_the_stream_or_the_client_ends_a_waiting_read_with_a_typed_error(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    async with client_of(router) as client:
        for close in ("stream", "client"):
            stream = client.generate("x")
            await anext(stream)
            reading = asyncio.create_task(read_until_error(stream))
            await asyncio.sleep(0)
            if close == "stream":
                stream.cancel()
            else:
                await client.aclose()
            assert isinstance(await reading, errors.CancelledByClientError)
        with pytest.raises(errors.CancelledByClientError, match="closed"):
            await client.fleet()
        assert isinstance(await read_until_error(client.generate("x")), errors.CancelledByClientError)


@pytest.mark.parametrize(
    "error",
    [
        errors.PromptTooLongError("too long", prompt_tokens=9000, limit_tokens=8192),
        errors.UnknownModelError("no such model", model="m"),
        errors.InvalidChatError("roles must alternate", field="chat.messages[1]"),
        errors.FingerprintMismatchError("weights", weights_digest="a != b"),
        errors.InternalError("withheld"),
    ],
    ids=lambda error: error.reason,
)
async def test_a_typed_error_arrives_with_class_text_and_fields_and_is_not_sent_again(
    router: ScriptedRouter, error: errors.KvRelayError
) -> None:
    router.script = failing(error)
    async with client_of(router) as client:
        got = await read_until_error(client.generate("x"))
    assert type(got) is type(error) and got.message == error.message and got.fields == error.fields
    assert len(router.requests) == 1


async def test_an_overloaded_router_is_asked_once_more_and_its_hint_is_kept(router: ScriptedRouter) -> None:
    router.script = failing(errors.OverloadedError("full", retry_after_s=0.015625))
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async with client_of(router) as client:
        stream = client.generate("x")
        stream._sleep = sleep
        got = await read_until_error(stream)
        assert isinstance(got, errors.OverloadedError) and got.retry_after_s == 0.015625
        assert len(router.requests) == 2 and slept == [0.015625]
    async with client_of(router, retry=None) as client:
        await read_until_error(client.generate("x"))
        assert len(router.requests) == 3


async def test_a_second_try_can_succeed(router: ScriptedRouter) -> None:
    good = router.script

    async def fail_once(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        router.script = good
        async for response in failing(errors.DrainingError("going down"))(request, context):
            yield response

    router.script = fail_once
    async with client_of(router) as client:
        answer = await client.generate("x").collect()
    assert answer.text == "w0 w1 w2 " and answer.token_ids == (100, 101, 102) and len(router.requests) == 2


@pytest.mark.parametrize("before", [(started(),), (started(), token(0))], ids=["started", "token"])
async def test_nothing_is_sent_again_once_something_arrived(router: ScriptedRouter, before: tuple[pb.GenerateResponse, ...]) -> None:
    router.script = failing(errors.WorkerLostError("decode-0 died", worker="decode-0"), *before)
    async with client_of(router) as client:
        stream = client.generate("x")
        got = await read_until_error(stream)
    assert isinstance(got, errors.WorkerLostError) and got.fields == {"worker": "decode-0"} and len(router.requests) == 1
    assert [t async for t in stream] == [], "a failed stream stays ended"


async def test_a_passed_deadline_is_typed_and_reaches_the_server(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    async with client_of(router) as client:
        got = await read_until_error(client.generate("x", timeout=1.0))
    assert isinstance(got, errors.DeadlineExceededError)
    assert router.time_remaining[0] <= 1.5  # gRPC rounds up
    await asyncio.wait_for(router.cancelled.wait(), 10)


async def test_an_unreachable_router_is_unavailable_and_named() -> None:
    async with serving(ScriptedRouter()) as router:
        target = router.target
    async with kvrelay.AsyncClient(target, retry=NO_DELAY, timeout=20) as client:
        got = await read_until_error(client.generate("x"))
        assert isinstance(got, errors.UnavailableError) and target in got.message and got.fields["target"] == target
        with pytest.raises(errors.UnavailableError, match=target):
            await client.list_models()


async def test_a_router_that_dies_mid_stream_is_unavailable_and_keeps_what_came() -> None:
    async with serving(ScriptedRouter()) as router, client_of(router) as client:
        router.script = one_token_then_silence
        stream = client.generate("x")
        await anext(stream)
        reading = asyncio.create_task(read_until_error(stream))
        await router.stop()
        got = await reading
    assert isinstance(got, errors.UnavailableError) and stream.text == "w0 "
    assert len(router.requests) == 1


async def test_a_request_over_the_cap_is_not_sent(router: ScriptedRouter) -> None:
    async with client_of(router, max_message_bytes=1000) as client:
        with pytest.raises(errors.RequestTooLargeError) as caught:
            client.generate("x" * 1001)
    assert int(caught.value.fields["size_bytes"]) > 1001 and caught.value.fields["limit_bytes"] == "1000"
    assert router.requests == []


async def test_a_servers_own_cap_is_the_same_error() -> None:
    async with serving(ScriptedRouter(), options=[("grpc.max_receive_message_length", 1000)]) as router, client_of(router) as client:
        got = await read_until_error(client.generate("x" * 1001))
    assert isinstance(got, errors.RequestTooLargeError) and got.fields["limit_bytes"] == "1000"


@pytest.mark.parametrize("indexes", [(0, 2), (1,), (0, 0)], ids=["lost", "first-lost", "repeated"])
async def test_a_gap_or_repetition_of_token_indexes_is_an_error(router: ScriptedRouter, indexes: tuple[int, ...]) -> None:
    router.script = playing(started(), *(token(i) for i in indexes), done(len(indexes)))
    async with client_of(router) as client:
        assert isinstance(await read_until_error(client.generate("x")), errors.InternalError)


async def test_a_stream_without_its_last_event_is_an_error(router: ScriptedRouter) -> None:
    router.script = playing(started(), token(0))
    async with client_of(router) as client:
        assert isinstance(await read_until_error(client.generate("x")), errors.InternalError)


async def test_events_of_a_later_version_are_passed_over(router: ScriptedRouter) -> None:
    router.script = playing(started(), token(0), pb.GenerateResponse(), done(1))
    async with client_of(router) as client:
        assert (await client.generate("x").collect()).text == "w0 "


async def test_models_come_page_by_page(router: ScriptedRouter) -> None:
    def page(name: str, following: str) -> pb.ListModelsResponse:
        model = pb.Model(name=name, identity=wire.identity_to_proto(IDENTITY), max_context_tokens=64, missing_role="prefill")
        return pb.ListModelsResponse(models=[model], next_page_token=following)

    router.model_pages = [page("a", "1"), page("b", "")]
    async with client_of(router) as client:
        models = await client.list_models()
    assert [m.name for m in models] == ["a", "b"]
    assert models[0].identity == IDENTITY and not models[0].ready and models[0].missing_role == "prefill"


async def test_the_fleet_comes_with_loads_and_both_values_of_each_difference(router: ScriptedRouter) -> None:
    worker = worker_pb2.Worker(
        worker_id="decode-0", role="decode", address="127.0.0.1:1", state="ready", identity=wire.identity_to_proto(IDENTITY),
        layout=wire.layout_to_proto(LAYOUT), incarnation=5, load=worker_pb2.WorkerLoad(running=2, total_pages=64, available_pages=60),
    )  # fmt: skip
    difference = pb.FieldDifference(field="block_size", prefill_value="16", decode_value="32")
    router.fleet = pb.GetFleetResponse(
        workers=[worker, worker_pb2.Worker(worker_id="store", role="kvstore")], mode="hybrid", registry_connected=True, in_flight=3,
        view_age=wire.duration_to_proto(1.5),
        incompatibilities=[pb.Incompatibility(prefill_worker="prefill-0", decode_worker="decode-0", differences=[difference])],
    )  # fmt: skip
    async with client_of(router) as client:
        fleet = await client.fleet()
    assert [w.worker_id for w in fleet.workers] == ["decode-0", "store"]
    assert fleet.workers[0].identity == IDENTITY and fleet.workers[0].layout == LAYOUT and fleet.workers[0].load.available_pages == 60
    assert fleet.workers[1].identity is None and fleet.view_age_s == 1.5 and fleet.registry_connected and fleet.in_flight == 3
    (pair,) = fleet.incompatibilities
    assert [(d.field, d.prefill_value, d.decode_value) for d in pair.differences] == [("block_size", "16", "32")]


@pytest.mark.parametrize("way", ["close", "cancel", "deadline", "death"])
async def test_a_question_without_an_answer_ends_in_each_way_as_it_should(router: ScriptedRouter, way: str) -> None:
    router.silent = True
    async with client_of(router) as client:
        asking = asyncio.create_task(client.fleet(timeout=1.0 if way == "deadline" else None))
        await router.asked.wait()
        stopping = None
        if way == "close":
            await client.aclose()
        elif way == "cancel":
            asking.cancel()
        elif way == "death":
            stopping = asyncio.create_task(router.stop())
        expected = {
            "close": errors.CancelledByClientError,
            "cancel": asyncio.CancelledError,
            "deadline": errors.DeadlineExceededError,
            "death": errors.UnavailableError,
        }[way]
        with pytest.raises(expected):
            await asking
        if stopping is not None:
            await stopping


async def test_a_current_opentelemetry_span_is_continued(router: ScriptedRouter) -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import use_span

    span = TracerProvider().get_tracer("test").start_span("caller")
    async with client_of(router) as client:
        with use_span(span):
            await client.generate("x").collect()
        await client.generate("x").collect()
    context = span.get_span_context()
    assert router.metadata[0]["traceparent"] == f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
    assert "traceparent" not in router.metadata[1]


def test_the_target_is_argument_then_environment_then_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TARGET_ENV, raising=False)
    assert kvrelay.AsyncClient().target == "127.0.0.1:50051"
    monkeypatch.setenv(TARGET_ENV, "router:1")
    assert kvrelay.AsyncClient().target == "router:1"
    assert kvrelay.AsyncClient("other:2").target == "other:2"


def test_the_sdk_pulls_in_nothing_heavy() -> None:
    program = (
        "import sys, kvrelay; assert 'grpc' not in sys.modules; kvrelay.AsyncClient, kvrelay.Client, kvrelay.errors.KvRelayError\n"
        "import kvrelay.cli\n"
        "print([n for n in ('torch', 'redis', 'opentelemetry', 'numpy', 'tokenizers', 'services') if n in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, check=True)
    assert run.stdout.strip() == "[]"


def test_every_exported_name_exists_and_others_do_not() -> None:
    assert all(getattr(kvrelay, name) is not None for name in kvrelay.__all__)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = kvrelay.nonsense
