"""The router as clients meet it: real gRPC on both sides of it, scripted workers behind."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import kvrelay
from kvrelay import wire
from kvrelay.errors import (
    DeadlineExceededError,
    DrainingError,
    EmptyPromptError,
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidStopError,
    InvalidTokenIdError,
    KvRelayError,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    RequestTooLargeError,
    UnknownModelError,
    WorkerLostError,
)
from kvrelay.hashing import tokenizer_digest
from kvrelay.inference.v1 import generation_pb2, router_service_pb2, router_service_pb2_grpc
from kvrelay.values import FinishReason, SamplingParams, StopConditions
from services.router.admission import AdmissionLimits
from services.router.placement import Mode
from services.runtime.ports import FleetSnapshot, RegistryLost, WorkerGone, WorkerSeen
from services.runtime.telemetry import names
from tests.integration.router.router_kit import Scene, scene
from tests.simulation.router_world import IDENTITY, VOCAB, Call, Fault, answer_of, worker

PAIR = [worker("prefill"), worker("decode")]
PROMPT = tuple(range(3, 40))


def answer(max_tokens: int, seed: int = 7) -> list[int]:
    return answer_of(PROMPT, SamplingParams(seed=seed), StopConditions(max_tokens, ignore_eos=True))


async def ask(at: Scene, **options: Any) -> tuple[list[int], kvrelay.Completion]:
    stream = at.client.generate(list(PROMPT), **{"max_tokens": 6, "seed": 7, "ignore_eos": True, "timeout": 20, **options})
    ids = [token.token_id async for token in stream]
    assert stream.completion is not None
    return ids, stream.completion


async def raw(at: Scene, request: router_service_pb2.GenerateRequest) -> list[router_service_pb2.GenerateResponse]:
    """Without the SDK, which refuses most bad requests by itself. Raises the router's own error."""
    async with grpc.aio.insecure_channel(at.address, options=[("grpc.max_send_message_length", -1)]) as channel:
        stub: Any = router_service_pb2_grpc.RouterServiceStub(channel)
        try:
            return [response async for response in stub.Generate(request, timeout=20)]
        except grpc.aio.AioRpcError as failure:
            raise wire.error_from_rpc(failure) from failure


@pytest.mark.parametrize(("mode", "path"), [(Mode.SPLIT, "split"), (Mode.COLOCATED, "local")])
async def test_a_client_gets_the_whole_answer(mode: Mode, path: str) -> None:
    async with scene(PAIR, mode=mode) as at:
        ids, completion = await ask(at)
        assert ids == answer(6)
        assert (completion.path, completion.finish_reason) == (path, FinishReason.LENGTH)
        assert (completion.usage.prompt_tokens, completion.usage.completion_tokens) == (len(PROMPT), 6)
        found = completion.timings
        parts = (found.admission_s, found.route_s, found.prefill_queue_s, found.prefill_s, found.exposed_transfer_s)
        assert sum(parts) + found.decode_queue_s + found.decode_s == pytest.approx(found.total_s, abs=1e-6)
        await at.until_idle()


async def test_one_trace_tells_the_whole_story() -> None:
    async with scene(PAIR) as at:
        _, completion = await ask(at, request_id="mine")
        await at.until(lambda: bool(at.spans("kvrelay.inference.v1.RouterService/Generate")))
        (generate,) = at.spans(names.SPAN_GENERATE)
        assert generate.context is not None and format(generate.context.trace_id, "032x") == completion.trace_id
        attributes = dict(generate.attributes or {})
        assert attributes[names.PATH] == "split" and attributes[names.GEN_AI_USAGE_OUTPUT_TOKENS] == 6
        assert str(attributes[names.REQUEST_ID]).startswith("mine-")
        phases = [value for name, value in attributes.items() if name.endswith("_s") and name.startswith("kvrelay.")]
        assert len(phases) >= 9
        (route,) = at.spans(names.SPAN_ROUTE)
        assert dict(route.attributes or {})[names.PREFILL_WORKER_ID] == "prefill-0"
        (admission,) = at.spans(names.SPAN_ADMISSION)
        children = [span for span in at.exporter.get_finished_spans() if span.parent and span.parent.span_id == generate.context.span_id]
        assert {route, admission} <= set(children) and len(children) == 4, "and a client span for each leg"
        assert all(span.context and span.context.trace_id == generate.context.trace_id for span in at.exporter.get_finished_spans())


async def test_a_fallback_is_an_event_with_its_reason() -> None:
    def fault(call: Call) -> Fault | None:
        return Fault(1, WorkerLostError("killed")) if call.role == "prefill" else None

    async with scene(PAIR, fault=fault) as at:
        ids, completion = await ask(at)
        assert ids == answer(6) and completion.path == "fallback"
        (generate,) = at.spans(names.SPAN_GENERATE)
        assert [(event.name, dict(event.attributes or {})[names.REASON]) for event in generate.events] == [("fallback", "WORKER_LOST")]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_that_dies_in_the_middle_is_replaced_and_the_answer_is_the_same(role: str) -> None:
    workers = [*PAIR, worker("decode", 1)]
    async with scene(workers, pause=lambda call: 0.05) as at:
        stream = at.client.generate(list(PROMPT), max_tokens=12, seed=7, ignore_eos=True, timeout=20)
        ids = []
        async for token in stream:
            ids.append(token.token_id)
            if len(ids) == (1 if role == "prefill" else 4):
                victim = next(call.worker_id for call in at.script.calls if call.role == role)
                await at.servers[victim].drain()
        assert ids == answer(12)
        assert stream.completion is not None and stream.completion.path in ("split", "fallback")
        await at.until_idle()


async def test_a_client_that_leaves_ends_both_legs() -> None:
    async with scene(PAIR, pause=lambda call: 0.05) as at:
        stream = at.client.generate(list(PROMPT), max_tokens=100, ignore_eos=True)
        async with stream:
            async for token in stream:
                if token.index == 2:
                    break
        await at.until_idle()
        assert (await ask(at))[0] == answer(6), "and the next request works"


async def test_a_deadline_ends_both_legs_with_one_typed_error() -> None:
    async with scene(PAIR, pause=lambda call: 0.1) as at:
        with pytest.raises(DeadlineExceededError):
            await ask(at, max_tokens=100, timeout=0.4)
        await at.until_idle()
        assert all(call.timeout_s <= 0.4 for call in at.script.calls)


async def test_a_full_router_says_when_to_come_back() -> None:
    async with scene(PAIR, pause=lambda call: 0.1, limits=AdmissionLimits(1, 0, 1.0)) as at:
        first = asyncio.create_task(ask(at))
        await at.until(lambda: at.admission.in_flight == 1)
        with pytest.raises(OverloadedError) as refused:
            await raw(at, valid())
        assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0
        assert (await first)[0] == answer(6)


def valid() -> router_service_pb2.GenerateRequest:
    return router_service_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=PROMPT))


def changed(change: Callable[[router_service_pb2.GenerateRequest], object]) -> router_service_pb2.GenerateRequest:
    request = valid()
    change(request)
    return request


def chat(*roles: str) -> generation_pb2.ChatPrompt:
    return generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role=role, content="x") for role in roles])


def bad_requests() -> Iterator[tuple[str, router_service_pb2.GenerateRequest, type[KvRelayError]]]:
    yield "no prompt", router_service_pb2.GenerateRequest(), InvalidPromptError
    yield "empty text", router_service_pb2.GenerateRequest(text=""), EmptyPromptError
    yield "no ids", router_service_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds()), EmptyPromptError
    yield "no role", router_service_pb2.GenerateRequest(chat=chat("")), InvalidChatError

    yield "long prompt", router_service_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[3] * 5000)), PromptTooLongError
    yield "big id", router_service_pb2.GenerateRequest(token_ids=generation_pb2.TokenIds(ids=[2**32 - 1])), InvalidTokenIdError
    yield "max_tokens 0", changed(lambda r: setattr(r.stop, "max_tokens", 0)), InvalidMaxTokensError
    yield "max_tokens -1", changed(lambda r: setattr(r.stop, "max_tokens", -1)), InvalidMaxTokensError
    yield "max_tokens huge", changed(lambda r: setattr(r.stop, "max_tokens", 2**62)), InvalidMaxTokensError
    yield "temperature nan", changed(lambda r: setattr(r.sampling, "temperature", math.nan)), InvalidSamplingError
    yield "temperature negative", changed(lambda r: setattr(r.sampling, "temperature", -1.0)), InvalidSamplingError
    yield "top_p 2", changed(lambda r: setattr(r.sampling, "top_p", 2.0)), InvalidSamplingError
    yield "top_k -1", changed(lambda r: setattr(r.sampling, "top_k", -1)), InvalidSamplingError
    yield "logprobs -1", changed(lambda r: setattr(r.sampling, "logprobs", -1)), InvalidSamplingError
    yield "stop list", changed(lambda r: r.stop.strings.extend(["x"] * 17)), InvalidStopError
    yield "stop id", changed(lambda r: r.stop.token_ids.append(VOCAB)), InvalidTokenIdError
    yield "bias id", changed(lambda r: r.sampling.logit_bias.update({VOCAB: 1.0})), InvalidTokenIdError
    yield "unknown model", changed(lambda r: setattr(r, "model", "huge")), UnknownModelError
    yield "too large", router_service_pb2.GenerateRequest(text="x" * (5 << 20)), RequestTooLargeError


async def test_every_bad_request_has_its_typed_error_on_the_wire_and_starts_nothing() -> None:
    async with scene(PAIR) as at:
        for name, request, expected in bad_requests():
            with pytest.raises(KvRelayError) as caught:
                await raw(at, request)
            assert type(caught.value) is expected, name
            if isinstance(caught.value, InvalidRequestError) and expected is not RequestTooLargeError:
                assert caught.value.fields.get("field") or expected in (InvalidMaxTokensError, InvalidSamplingError), name
        assert at.script.calls == [] and at.admission.in_flight == 0
        assert (await raw(at, valid()))[-1].HasField("done")


async def test_text_and_chat_use_the_workers_own_tokenizer_fetched_once(tiny_model: Path) -> None:
    files = {name: (tiny_model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    identity = replace(IDENTITY, tokenizer_digest=tokenizer_digest(files))
    async with scene([worker(role, identity=identity) for role in ("prefill", "decode")], files=files) as at:
        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(at.client.generate("the cat", max_tokens=2).collect())
        stream = at.client.generate([{"role": "user", "content": "hi"}], max_tokens=2)
        async for _ in stream:
            pass
        assert at.script.fetches == 1
        assert {len(call.job.token_ids) for call in at.script.calls} == {3, stream.completion.usage.prompt_tokens}  # type: ignore[union-attr]


async def test_models_are_listed_in_pages_with_what_they_lack() -> None:
    other, lame = replace(IDENTITY, model="other"), replace(IDENTITY, model="lame")
    fleet = [*PAIR, worker("decode", 1, identity=other), worker("prefill", 2, identity=lame)]
    async with scene(fleet) as at:
        listed = {model.name: model for model in await at.client.list_models()}
        assert {name: (model.ready, model.missing_role) for name, model in listed.items()} == {
            "tiny": (True, ""),
            "other": (True, "prefill"),
            "lame": (False, "decode"),
        }
        async with grpc.aio.insecure_channel(at.address) as channel:
            stub: Any = router_service_pb2_grpc.RouterServiceStub(channel)
            seen, token = [], ""
            while True:
                page = await stub.ListModels(router_service_pb2.ListModelsRequest(page_size=2, page_token=token))
                seen += [model.name for model in page.models]
                token = page.next_page_token
                if not token:
                    break
            assert seen == ["lame", "other", "tiny"]
        with pytest.raises(NoWorkerError) as nobody:
            await ask(at, model="lame")
        assert nobody.value.fields["role"] == "decode"


async def test_the_fleet_says_why_a_pair_is_not_formed_and_how_old_the_view_is() -> None:
    async with scene([*PAIR, worker("decode", 1, identity=replace(IDENTITY, weights_digest="sha256:cc"))]) as at:
        fleet = await at.client.fleet()
        assert [found.worker_id for found in fleet.workers] == ["decode-0", "decode-1", "prefill-0"]
        (pair,) = fleet.incompatibilities
        (difference,) = pair.differences
        assert (difference.field, difference.prefill_value, difference.decode_value) == ("weights_digest", "sha256:aa", "sha256:cc")
        assert (fleet.mode, fleet.registry_connected) == ("split", True)
        at.feed.queue.put_nowait(RegistryLost())
        await at.until(lambda: not at.fleet.connected)
        assert not (await at.client.fleet()).registry_connected
        assert (await ask(at))[0] == answer(6), "a lost registry stops no request"
        assert all(call.worker_id != "decode-1" for call in at.script.calls)


async def test_health_follows_the_fleet() -> None:
    async with scene(PAIR, announce=False) as at, grpc.aio.insecure_channel(at.address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def health(name: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

        assert not await health("") and not await health("kvrelay.inference.v1.RouterService")
        at.feed.queue.put_nowait(FleetSnapshot(at.infos, {}))
        await at.until(lambda: at.fleet.has_snapshot)
        assert await health("") and await health("kvrelay.inference.v1.RouterService") and await health("model:tiny")
        decode = next(info for info in at.infos if info.role == "decode")
        at.feed.queue.put_nowait(WorkerGone(decode.worker_id, decode.incarnation))
        await at.until(lambda: len(at.fleet.workers(0.0)) == 1)
        assert await health("") and not await health("model:tiny")
        at.feed.queue.put_nowait(WorkerSeen(decode))
        await at.until(lambda: len(at.fleet.workers(0.0)) == 2)
        assert await health("model:tiny")


async def test_a_draining_router_finishes_what_runs_and_refuses_the_rest() -> None:
    async with scene(PAIR, pause=lambda call: 0.05) as at:
        running = asyncio.create_task(ask(at))
        await at.until(lambda: at.admission.in_flight == 1)
        at.admission.drain()
        draining = asyncio.create_task(at.router.drain())
        await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            await raw(at, valid())
        assert (await running)[0] == answer(6)
        await draining
