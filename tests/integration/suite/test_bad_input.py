"""Bad input, through the SDK and past it: each its own typed error, before anything has been started for it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

import kvrelay
from kvrelay.errors import (
    EmptyPromptError,
    FingerprintMismatchError,
    HandleForgedError,
    InvalidChatError,
    InvalidMaxTokensError,
    InvalidPromptError,
    InvalidRequestError,
    InvalidSamplingError,
    InvalidStopError,
    InvalidTokenIdError,
    KvRelayError,
    PromptTooLongError,
    RequestTooLargeError,
    TokenizerNotFoundError,
    UnknownModelError,
)
from kvrelay.inference.v1 import decode_service_pb2, generation_pb2, prefill_service_pb2, router_service_pb2, worker_service_pb2
from kvrelay.kv.v1 import handle_pb2, transfer_service_pb2
from kvrelay.values import ChatMessage
from tests.integration.suite.fault_kit import (
    Refusal,
    Wire,
    ask,
    at_rest,
    errors_logged,
    job_for,
    ledger,
    prompt_of,
    read_until,
    refusal_of,
    right_answer,
    with_fields,
)
from tests.suite import Suite
from tests.tiny_models import write_tiny_model

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAN, INF = float("nan"), float("inf")
CONTEXT = 128
VOCABULARY = 300
INT64_MIN, INT64_MAX, UINT32_MAX = -(2**63), 2**63 - 1, 2**32 - 1
LONGEST_REQUEST = 4 << 20
"""The router's default cap, bytes."""

Sampling, Stop = generation_pb2.SamplingParams, generation_pb2.StopConditions


@dataclass(slots=True)
class World:
    suite: Suite
    stubs: Wire
    model: Path
    traces: list[str] = field(default_factory=list)
    """Of every refused request."""

    def traceparent(self) -> str:
        self.traces.append(secrets.token_hex(16))
        return f"00-{self.traces[-1]}-{secrets.token_hex(8)}-01"

    async def refusal(self, request: router_service_pb2.GenerateRequest) -> Refusal:
        metadata = (("traceparent", self.traceparent()),)
        return await refusal_of(self.stubs.router(self.suite.address).Generate(request, timeout=20, metadata=metadata))

    async def refused_by_sdk(self, *args: Any, **options: Any) -> KvRelayError:
        with pytest.raises(KvRelayError) as caught:
            await self.suite.client.generate(*args, traceparent=self.traceparent(), timeout=20, **options).collect()
        return caught.value


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    model = write_tiny_model(tmp_path_factory.mktemp("bad-input") / "tiny", "llama", max_position_embeddings=CONTEXT)
    async with Suite(model, traces=True, split_threshold_tokens=32) as suite, Wire() as stubs:
        world = World(suite, stubs, model)
        yield world
        # Whoever had been given work would have said so by now: exporters send several times a second.
        await asyncio.sleep(1.0)
        assert suite.otlp is not None
        reached = {(span.service, span.name) for trace in world.traces for span in suite.otlp.trace(trace)}
        # The router asks a worker for the tokenizer once, whoever needs it first.
        reached -= {(service, "kvrelay.inference.v1.WorkerService/GetTokenizer") for service in ("kvrelay-decode", "kvrelay-prefill")}
        assert {service for service, _ in reached} == {"kvrelay-router"}
        assert not {name for _, name in reached} & {"route", "prefill", "decode"}
        assert errors_logged(suite) == []


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def nothing_started(world: World) -> AsyncIterator[None]:
    """Every refusal leaves the fleet as idle as it found it."""
    yield
    await at_rest(world.suite, world.stubs)


def request_with(**parts: Any) -> router_service_pb2.GenerateRequest:
    """A request that is right but for `parts`."""
    base = router_service_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=[5, 6, 7]), sampling=Sampling(seed=1), stop=Stop(max_tokens=4, ignore_eos=True)
    )
    return with_fields(base, **parts)


def ids(*token_ids: int) -> dict[str, Any]:
    return {"token_ids": generation_pb2.TokenIds(ids=token_ids)}


def chat(*roles: str) -> dict[str, Any]:
    return {"chat": generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role=role, content="hello") for role in roles])}


def sampling(**fields: Any) -> dict[str, Any]:
    return {"sampling": Sampling(**fields)}


def stop(**fields: Any) -> dict[str, Any]:
    return {"stop": Stop(**fields)}


RAW: Sequence[tuple[str, Mapping[str, Any], type[KvRelayError], str]] = [
    ("an empty text", {"text": ""}, EmptyPromptError, "prompt"),
    ("no token ids", ids(), EmptyPromptError, "prompt"),
    ("a token id beyond the vocabulary", ids(5, VOCABULARY), InvalidTokenIdError, "token_ids"),
    ("the greatest token id", ids(UINT32_MAX, 5), InvalidTokenIdError, "token_ids"),
    ("a prompt as long as the context", ids(*prompt_of(CONTEXT, 1)), PromptTooLongError, "prompt"),
    ("a prompt longer than the context", ids(*prompt_of(CONTEXT + 1, 1)), PromptTooLongError, "prompt"),
    ("a text longer than the context", {"text": "zq" * CONTEXT}, PromptTooLongError, "prompt"),
    ("a conversation longer than the context", {"chat": generation_pb2.ChatPrompt(
        messages=[generation_pb2.ChatMessage(role="user", content="zq" * CONTEXT)])}, PromptTooLongError, "prompt"),
    ("an empty conversation", chat(), InvalidChatError, "chat.messages"),
    ("no role", chat("user", ""), InvalidChatError, "chat.messages[1].role"),
    ("a role that is a text", chat("r" * 65), InvalidChatError, "chat.messages[0].role"),
    ("an unknown model", {"model": "no-such-model"}, UnknownModelError, "model"),
    ("a model's name that differs in case", {"model": "TINY"}, UnknownModelError, "model"),
    ("a very long model name", {"model": "m" * 100_000}, UnknownModelError, ""),
    ("a long request id", {"request_id": "r" * 129}, InvalidRequestError, "request_id"),
    ("a long salt", {"cache_salt": "s" * 129}, InvalidRequestError, "cache_salt"),
    *((f"temperature {x}", sampling(temperature=x), InvalidSamplingError, "temperature") for x in (NAN, -0.01, INF, -INF, 100.5)),
    *((f"top_p {x}", sampling(top_p=x), InvalidSamplingError, "top_p") for x in (NAN, 0.0, -0.1, 1.01, INF)),
    *((f"min_p {x}", sampling(min_p=x), InvalidSamplingError, "min_p") for x in (NAN, -0.1, 1.01)),
    *((f"top_k {x}", sampling(top_k=x), InvalidSamplingError, "top_k") for x in (-1, 2**31, INT64_MAX, INT64_MIN)),
    *((f"repetition_penalty {x}", sampling(repetition_penalty=x), InvalidSamplingError, "repetition_penalty")
      for x in (NAN, 0.0, -1.0, INF, 101.0)),
    *((f"presence_penalty {x}", sampling(presence_penalty=x), InvalidSamplingError, "presence_penalty") for x in (NAN, 2.1, -2.1)),
    *((f"frequency_penalty {x}", sampling(frequency_penalty=x), InvalidSamplingError, "frequency_penalty") for x in (NAN, 2.1, -INF)),
    *((f"min_tokens {x}", sampling(min_tokens=x), InvalidSamplingError, "min_tokens") for x in (-1, 5, 2**31, INT64_MAX, INT64_MIN)),
    *((f"logprobs {x}", sampling(logprobs=x), InvalidSamplingError, "logprobs") for x in (-1, 6, 2**31 - 1, -(2**31))),
    *((f"a bias of {x}", sampling(logit_bias={5: x}), InvalidSamplingError, "logit_bias[5]") for x in (NAN, INF, 100.1, -101.0)),
    ("a bias beyond the vocabulary", sampling(logit_bias={VOCABULARY: 1.0}), InvalidTokenIdError, "logit_bias"),
    ("a bias far beyond", sampling(logit_bias={5: 1.0, UINT32_MAX: 1.0}), InvalidTokenIdError, "logit_bias"),
    ("too many biases", sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), InvalidSamplingError, "logit_bias"),
    *((f"max_tokens {x}", stop(max_tokens=x), InvalidMaxTokensError, "") for x in (0, -1, INT64_MIN)),
    *((f"max_tokens {x}", stop(max_tokens=x), InvalidMaxTokensError, "stop.max_tokens") for x in (CONTEXT - 2, 2**31, INT64_MAX)),
    ("one answer token too many", ids(*prompt_of(CONTEXT - 1, 1)) | stop(max_tokens=2), InvalidMaxTokensError, "stop.max_tokens"),
    ("too many stop strings", stop(strings=[f"stop {i}" for i in range(17)]), InvalidStopError, "stop.strings"),
    ("an empty stop string", stop(strings=["ok", ""]), InvalidStopError, "stop.strings"),
    ("a long stop string", stop(strings=["x" * 257]), InvalidStopError, "stop.strings"),
    ("too many stop ids", stop(token_ids=range(65)), InvalidStopError, "stop.token_ids"),
    ("a stop id beyond the vocabulary", stop(token_ids=[VOCABULARY]), InvalidTokenIdError, "stop.token_ids"),
    ("a stop id far beyond", stop(token_ids=[5, UINT32_MAX]), InvalidTokenIdError, "stop.token_ids"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "parts", "kind", "name"), RAW, ids=[case[0] for case in RAW])
async def test_the_router_refuses(world: World, what: str, parts: Mapping[str, Any], kind: type[KvRelayError], name: str) -> None:
    refusal = await world.refusal(request_with(**parts))
    assert refusal.kind is kind, refusal.error
    assert refusal.code.name == kind.code
    if name:
        assert refusal.error.fields["field"] == name


async def test_no_prompt_is_refused(world: World) -> None:
    refusal = await world.refusal(router_service_pb2.GenerateRequest(stop=Stop(max_tokens=4)))
    assert (refusal.kind, refusal.error.fields["field"]) == (InvalidPromptError, "prompt")


async def test_refusals_carry_the_numbers_a_caller_needs(world: World) -> None:
    error = (await world.refusal(request_with(model="no-such-model"))).error
    assert (error.fields["model"], error.fields["known"]) == ("no-such-model", "tiny")
    assert "tiny" in error.message
    error = (await world.refusal(request_with(**ids(*prompt_of(CONTEXT, 1))))).error
    assert (error.fields["prompt_tokens"], error.fields["limit_tokens"]) == (str(CONTEXT), str(CONTEXT))
    error = (await world.refusal(request_with(**ids(*prompt_of(CONTEXT - 12, 1)), **stop(max_tokens=13)))).error
    assert (error.fields["max_tokens"], error.fields["limit_tokens"]) == ("13", "12")
    error = (await world.refusal(request_with(**ids(5, 4242)))).error
    assert (error.fields["token_id"], error.fields["vocab_size"]) == ("4242", str(VOCABULARY))


async def test_what_fits_exactly_is_answered(world: World) -> None:
    for tokens, max_tokens in ((CONTEXT - 1, 1), (CONTEXT - 12, 12), (1, CONTEXT - 1)):
        prompt = prompt_of(tokens, seed=tokens)
        outcome = await ask(world.suite, prompt, max_tokens)
        assert (outcome.error, outcome.token_ids) == (None, right_answer(world.model, prompt, max_tokens))
    # Without max_tokens the answer fills what the context leaves.
    stream = world.suite.client.generate(token_ids=prompt_of(CONTEXT - 12, 0), ignore_eos=True)
    assert len((await stream.collect()).token_ids) == 12
    await at_rest(world.suite, world.stubs)


async def test_a_request_over_the_cap_is_refused_and_the_connection_lives_on(world: World) -> None:
    async with world.suite.client.generate(token_ids=[5, 6, 7], max_tokens=120, ignore_eos=True) as beside:
        await anext(beside)
        refusal = await world.refusal(request_with(text="a" * LONGEST_REQUEST))
        assert (refusal.kind, refusal.code) == (RequestTooLargeError, grpc.StatusCode.RESOURCE_EXHAUSTED)
        error = await world.refused_by_sdk("a" * LONGEST_REQUEST)
        assert type(error) is RequestTooLargeError
        assert int(error.fields["size_bytes"]) > int(error.fields["limit_bytes"]) == LONGEST_REQUEST
        error = await world.refused_by_sdk("a" * (17 << 20))
        assert type(error) is RequestTooLargeError
        assert len((await beside.collect()).token_ids) == 120


async def test_bytes_that_are_no_message_are_refused_without_harm(world: World) -> None:
    async with grpc.aio.insecure_channel(world.suite.address) as channel:
        for method in ("Generate", "ListModels"):
            # Field 2 (text) that is no UTF-8; then a length that never comes; then a group nobody closes.
            for body in (b"\x12\x02\xff\xfe", b"\x12\x7f", b"\x0b"):
                path = f"/kvrelay.inference.v1.RouterService/{method}"
                make: Any = channel.unary_stream if method == "Generate" else channel.unary_unary
                refusal = await refusal_of(make(path)(body, timeout=5))
                assert refusal.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT), refusal
    assert (await ask(world.suite, [5, 6, 7], 2)).error is None


async def test_a_page_of_models_has_a_size(world: World) -> None:
    call = world.stubs.router(world.suite.address).ListModels(router_service_pb2.ListModelsRequest(page_size=-1), timeout=5)
    refusal = await refusal_of(call)
    assert (refusal.kind, refusal.error.fields["field"]) == (InvalidRequestError, "page_size")


USER = ChatMessage("user", "hello")
SDK: Sequence[tuple[str, tuple[Any, ...], Mapping[str, Any], type[KvRelayError]]] = [
    ("nothing", (), {}, InvalidPromptError),
    ("text and token ids", (), {"text": "a", "token_ids": [5]}, InvalidPromptError),
    ("prompt and text", ("a",), {"text": "a"}, InvalidPromptError),
    ("text and messages", (), {"text": "a", "messages": [USER]}, InvalidPromptError),
    ("an empty text", ("",), {}, EmptyPromptError),
    ("no token ids", (), {"token_ids": []}, EmptyPromptError),
    ("an empty list", ([],), {}, EmptyPromptError),
    ("half a surrogate pair", ("a\ud800",), {}, InvalidPromptError),
    ("a list of texts", (["a"],), {}, InvalidPromptError),
    ("bytes", (b"a",), {}, InvalidPromptError),
    ("a negative token id", ([-1],), {}, InvalidTokenIdError),
    ("a token id of 33 bits", ([2**32],), {}, InvalidTokenIdError),
    ("a token id that is huge", ([10**400],), {}, InvalidTokenIdError),
    ("a token id beyond the vocabulary", ([VOCABULARY],), {}, InvalidTokenIdError),
    ("a prompt as long as the context", (prompt_of(CONTEXT, 1),), {}, PromptTooLongError),
    ("no messages", (), {"messages": []}, InvalidChatError),
    ("a message without content", ([{"role": "user"}],), {}, InvalidChatError),
    ("a role that is no text", ([{"role": 1, "content": "a"}],), {}, InvalidChatError),
    ("an empty role", ([USER, ChatMessage("", "a")],), {}, InvalidChatError),
    ("an unknown model", ("a",), {"model": "no-such-model"}, UnknownModelError),
    ("max_tokens 0", ("a",), {"max_tokens": 0}, InvalidMaxTokensError),
    ("max_tokens over", ("a",), {"max_tokens": CONTEXT}, InvalidMaxTokensError),
    ("max_tokens of 64 bits", ("a",), {"max_tokens": 2**63}, InvalidMaxTokensError),
    ("max_tokens huge", ("a",), {"max_tokens": 10**400}, InvalidMaxTokensError),
    *((f"temperature {x}", ("a",), {"temperature": x}, InvalidSamplingError) for x in (NAN, INF, -1.0, 10.0**300)),
    *((f"top_p {x}", ("a",), {"top_p": x}, InvalidSamplingError) for x in (NAN, 0.0, 1.5, -INF)),
    ("a huge seed", ("a",), {"seed": 2**64}, InvalidSamplingError),
    ("a negative seed", ("a",), {"seed": -1}, InvalidSamplingError),
    ("a huge top_k", ("a",), {"top_k": 2**64}, InvalidSamplingError),
    ("logprobs 6", ("a",), {"logprobs": 6}, InvalidSamplingError),
    ("a bias of a negative id", ("a",), {"logit_bias": {-1: 1.0}}, InvalidTokenIdError),
    ("a bias beyond the vocabulary", ("a",), {"logit_bias": {VOCABULARY: 1.0}}, InvalidTokenIdError),
    ("a bias that is no number", ("a",), {"logit_bias": {5: NAN}}, InvalidSamplingError),
    ("a huge bias", ("a",), {"logit_bias": {5: 10**400}}, InvalidSamplingError),
    ("min_tokens over max_tokens", ("a",), {"min_tokens": 5, "max_tokens": 4}, InvalidSamplingError),
    ("min_tokens over what there will be", ("a",), {"min_tokens": CONTEXT}, InvalidSamplingError),
    ("17 stop strings", ("a",), {"stop": ["x"] * 17}, InvalidStopError),
    ("an empty stop string", ("a",), {"stop": ""}, InvalidStopError),
    ("a stop string that is no text", ("a",), {"stop": ["\udfff"]}, InvalidStopError),
    ("a negative stop id", ("a",), {"stop_token_ids": [-1]}, InvalidStopError),
    ("65 stop ids", ("a",), {"stop_token_ids": [5] * 65}, InvalidStopError),
    ("a stop id beyond the vocabulary", ("a",), {"stop_token_ids": [VOCABULARY]}, InvalidTokenIdError),
    ("a long salt", ("a",), {"cache_salt": "s" * 129}, InvalidRequestError),
]  # fmt: skip


@pytest.mark.parametrize(("what", "args", "options", "kind"), SDK, ids=[case[0] for case in SDK])
async def test_the_sdk_raises(world: World, what: str, args: tuple[Any, ...], options: Mapping[str, Any], kind: type[KvRelayError]) -> None:
    assert type(await world.refused_by_sdk(*args, **options)) is kind


async def test_the_synchronous_client_raises_the_same(world: World) -> None:
    def run() -> list[type[KvRelayError]]:
        found = []
        with kvrelay.Client(world.suite.address) as client:
            for options in ({"text": ""}, {"text": "a", "model": "no-such-model"}, {"token_ids": [VOCABULARY]}):
                with pytest.raises(KvRelayError) as caught:
                    client.generate(**options).collect()
                found.append(type(caught.value))
        return found

    assert await asyncio.to_thread(run) == [EmptyPromptError, UnknownModelError, InvalidTokenIdError]


# --- workers, called past the router -------------------------------------------------------------------------------------------

JOBS: Sequence[tuple[str, Mapping[str, Any], type[KvRelayError]]] = [
    ("another model", {"fingerprint": bytes(32)}, FingerprintMismatchError),
    ("no model", {"fingerprint": b""}, FingerprintMismatchError),
    ("half a fingerprint", {"fingerprint": b"abc"}, FingerprintMismatchError),
    ("no prompt", {"prompt": generation_pb2.TokenIds()}, EmptyPromptError),
    ("a token id beyond the vocabulary", {"prompt__ids": [5, VOCABULARY]}, InvalidTokenIdError),
    ("the greatest token id", {"prompt__ids": [UINT32_MAX]}, InvalidTokenIdError),
    ("a prompt as long as the context", {"prompt__ids": prompt_of(CONTEXT, 1)}, PromptTooLongError),
    ("max_tokens 0", {"stop__max_tokens": 0}, InvalidMaxTokensError),
    ("max_tokens over the context", {"stop__max_tokens": CONTEXT}, InvalidMaxTokensError),
    ("max_tokens of 63 bits", {"stop__max_tokens": INT64_MAX}, InvalidMaxTokensError),
    ("temperature NaN", {"sampling__temperature": NAN}, InvalidSamplingError),
    ("top_k below 0", {"sampling__top_k": INT64_MIN}, InvalidSamplingError),
    ("a bias beyond the vocabulary", {"sampling": Sampling(logit_bias={UINT32_MAX: 1.0})}, InvalidTokenIdError),
    ("a stop id beyond the vocabulary", {"stop__token_ids": [VOCABULARY]}, InvalidTokenIdError),
    ("an empty stop string", {"stop__strings": [""]}, InvalidStopError),
    ("too many stop strings", {"stop__strings": ["x"] * 17}, InvalidStopError),
]  # fmt: skip

CALLS: Mapping[str, Callable[[Wire, str, Any], Any]] = {
    "prefill-0": lambda stubs, address, job: stubs.prefill(address).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=10),
    "decode-0": lambda stubs, address, job: stubs.decode(address).Decode(decode_service_pb2.DecodeRequest(job=job), timeout=10),
}


@pytest.mark.parametrize("worker", CALLS)
@pytest.mark.parametrize(("what", "changed", "kind"), JOBS, ids=[case[0] for case in JOBS])
async def test_a_worker_refuses_a_bad_job(
    world: World, worker: str, what: str, changed: Mapping[str, Any], kind: type[KvRelayError]
) -> None:
    address = world.suite.address_of(worker)
    identity = (await ledger(world.stubs, address)).worker.identity
    job = with_fields(job_for(identity, [5, 6, 7]), **changed)
    refusal = await refusal_of(CALLS[worker](world.stubs, address, job))
    assert (refusal.kind, refusal.code.name) == (kind, kind.code), refusal.error


async def test_workers_refuse_requests_without_a_job_or_with_half_a_handle(world: World) -> None:
    prefill, decode = world.suite.address_of("prefill-0"), world.suite.address_of("decode-0")
    identity = (await ledger(world.stubs, decode)).worker.identity
    assert (await refusal_of(world.stubs.prefill(prefill).Prefill(prefill_service_pb2.PrefillRequest()))).kind is FingerprintMismatchError
    assert (await refusal_of(world.stubs.decode(decode).Decode(decode_service_pb2.DecodeRequest()))).kind is FingerprintMismatchError
    half = decode_service_pb2.DecodeRequest(job=job_for(identity, [5, 6, 7]), handle=handle_pb2.KvHandle())
    assert (await refusal_of(world.stubs.decode(decode).Decode(half))).kind is HandleForgedError
    many = transfer_service_pb2.RenewLeasesRequest(renewals=[transfer_service_pb2.LeaseRenewal()] * 1025)
    assert (await refusal_of(world.stubs.transfer(prefill).RenewLeases(many))).kind is InvalidRequestError
    unknown = worker_service_pb2.GetTokenizerRequest(tokenizer_digest="sha256:0")
    refusal = await refusal_of(world.stubs.worker(decode).GetTokenizer(unknown))
    assert (refusal.kind, refusal.error.fields["served"]) == (TokenizerNotFoundError, identity.tokenizer_digest)
    big = generation_pb2.WorkerJob(cache_salt="s" * (17 << 20))
    assert (await refusal_of(CALLS["prefill-0"](world.stubs, prefill, big))).kind is RequestTooLargeError


async def test_requests_that_share_an_id_are_told_apart(world: World) -> None:
    decode = world.suite.address_of("decode-0")
    identity = (await ledger(world.stubs, decode)).worker.identity
    prompts = [prompt_of(40, seed) for seed in range(3)]
    calls = [CALLS["decode-0"](world.stubs, decode, job_for(identity, prompt, "the same id")) for prompt in prompts]
    for prompt, call in zip(prompts, calls, strict=True):
        tokens = [m.token.token_id for m in await read_until(call, "done") if m.WhichOneof("event") == "token"]
        assert tokens == list(right_answer(world.model, prompt, 8))
    outcomes = await asyncio.gather(*(ask(world.suite, prompt, request_id="the same id") for prompt in prompts))
    assert [outcome.token_ids for outcome in outcomes] == [right_answer(world.model, prompt, 8) for prompt in prompts]
    await at_rest(world.suite, world.stubs)
