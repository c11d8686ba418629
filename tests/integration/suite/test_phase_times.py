"""Where a request's time went, out of the spans that the real services sent: the phases add up, and one request is one trace."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields

import pytest
import pytest_asyncio

from kvrelay import hashing, wire
from kvrelay.kv.v1 import kv_store_service_pb2
from services.launcher import waterfall
from services.runtime.telemetry import names
from services.runtime.telemetry.otlp_receiver import ReceivedSpan
from tests.integration.suite.fault_kit import Wire, eventually
from tests.integration.suite.paths_kit import Ask, Fleet, Seen, fleet
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

BLOCK = 16
PHASES = ("admission_s", "route_s", "prefill_queue_s", "prefill_s", "exposed_transfer_s", "decode_queue_s", "decode_s")
ROUTER_SPANS = {names.SPAN_GENERATE, names.SPAN_ADMISSION, names.SPAN_ROUTE}
COMPUTE_SPANS = {names.SPAN_PREFILL_QUEUE, names.SPAN_PREFILL_COMPUTE}
DECODE_SPANS = {names.SPAN_DECODE_QUEUE, names.SPAN_DECODE_COMPUTE}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paths(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    model = write_tiny_model(tmp_path_factory.mktemp("timed") / "tiny", "qwen2")
    async with fleet(model, ("split", "local"), traces=True, start_timeout_s=200.0) as running:
        yield running


def prompt_of(tokens: int, seed: int) -> list[int]:
    script = random.Random(seed)
    return [script.randrange(3, 300) for _ in range(tokens)]


async def trace_of(paths: Fleet, seen: Seen, wanted: set[tuple[str, str]]) -> list[ReceivedSpan]:
    """The whole trace of a request: the (service, span) pairs that are wanted, and the parent of every span."""

    def complete(spans: Sequence[ReceivedSpan]) -> bool:
        ids = {span.span_id for span in spans}
        pairs = {(span.service.removeprefix("kvrelay-"), span.name) for span in spans}
        return wanted <= pairs and all(span.parent_id in ids for span in spans if span.parent_id)

    assert paths.suite.otlp is not None
    return await paths.suite.otlp.wait_for_trace(seen.trace_id, complete, 20.0)


def check_adds_up(seen: Seen, spans: Sequence[ReceivedSpan]) -> None:
    timings = seen.completion.timings
    (root,) = [span for span in spans if span.name == names.SPAN_GENERATE]
    phases = [getattr(timings, phase) for phase in PHASES]
    allowed_s = max(0.001, 0.01 * root.duration_s)
    assert min(phases) >= 0
    assert abs(sum(phases) - timings.total_s) <= allowed_s
    assert abs(sum(phases) - root.duration_s) <= allowed_s
    assert 0 < timings.ttft_s <= timings.total_s
    assert timings.ttft_s >= sum(phases[:4]) - allowed_s, "the first token went out before it was drawn"
    for phase in fields(timings):
        assert root.attributes[names.TIMING_PREFIX + phase.name] == getattr(timings, phase.name)
    # The same phases once more, from the spans of the processes they happened in.
    drawn = waterfall.build(spans)
    assert waterfall.disagreements(drawn, timings) == []
    assert abs(sum(bar.ms for bar in drawn.phases) / 1e3 - root.duration_s) <= allowed_s
    assert drawn.path == seen.completion.path


def check_one_trace(spans: Sequence[ReceivedSpan], parent: str = "", cancelled: bool = False) -> None:
    roots = [span for span in spans if span.parent_id == parent]
    assert [(span.service, span.kind) for span in roots] == [("kvrelay-router", "SERVER")], roots
    requests = {span.attributes[names.REQUEST_ID] for span in spans if names.REQUEST_ID in span.attributes}
    assert len({request.partition(".")[0] for request in requests}) == 1, requests
    # A renewal that is under way when its pull is over is dropped.
    failed = [span for span in spans if span.status == "ERROR" and not span.name.endswith("/RenewLeases")]
    assert not failed or (cancelled and {span.attributes[names.ERROR_TYPE] for span in failed} == {"CANCELLED"}), failed


def wanted(**services: set[str]) -> set[tuple[str, str]]:
    return {(service, name) for service, spans in services.items() for name in spans}


async def test_a_local_request(paths: Fleet) -> None:
    (seen,) = await paths.all("local", [Ask(prompt_of(700, 1))], max_tokens=24, ignore_eos=True)
    spans = await trace_of(paths, seen, wanted(router=ROUTER_SPANS, decode=COMPUTE_SPANS | DECODE_SPANS))
    check_adds_up(seen, spans)
    check_one_trace(spans)
    assert (seen.completion.path, seen.completion.timings.exposed_transfer_s, seen.completion.transfer) == ("local", 0, None)
    assert seen.completion.timings.prefill_s > 0 and seen.completion.timings.decode_s > 0


async def test_a_split_request(paths: Fleet) -> None:
    (seen,) = await paths.all("split", [Ask(prompt_of(700, 2))], max_tokens=24, ignore_eos=True)
    services = {
        "router": ROUTER_SPANS,
        "prefill": COMPUTE_SPANS | {names.SPAN_KV_HOLD},
        "decode": DECODE_SPANS | {names.SPAN_KV_TRANSFER, names.SPAN_EXPOSED_TRANSFER},
    }
    spans = await trace_of(paths, seen, wanted(**services))
    check_adds_up(seen, spans)
    check_one_trace(spans)
    assert seen.completion.path == "split" and seen.completion.timings.exposed_transfer_s > 0
    workers = {span.name: span.attributes.get(names.WORKER_ID) for span in spans}
    assert (workers[names.SPAN_PREFILL_COMPUTE], workers[names.SPAN_DECODE_COMPUTE]) == ("prefill-0", "decode-0")


async def test_a_split_request_of_one_token(paths: Fleet) -> None:
    """Nothing is decoded: the first token is the last."""
    (seen,) = await paths.all("split", [Ask(prompt_of(400, 3))], max_tokens=1)
    spans = await trace_of(paths, seen, wanted(router=ROUTER_SPANS, prefill=COMPUTE_SPANS))
    check_adds_up(seen, spans)
    check_one_trace(spans, cancelled=True)  # the decode worker is told that it need not go on
    assert len(seen.ids) == 1 and seen.completion.path == "split"


async def test_requests_that_wait_for_one_another(paths: Fleet) -> None:
    """Eight at once on every path: queues take time now, and no span strays into another's trace."""
    asks = [Ask(prompt_of(200 + 10 * number, 10 + number)) for number in range(8)]
    both = await asyncio.gather(*(paths.all(path, asks, max_tokens=16, ignore_eos=True, cache_salt=path) for path in ("split", "local")))
    for seen in (answer for answers in both for answer in answers):
        worker = "prefill" if seen.completion.path == "split" else "decode"
        spans = await trace_of(paths, seen, wanted(router=ROUTER_SPANS, decode=DECODE_SPANS) | wanted(**{worker: COMPUTE_SPANS}))
        check_adds_up(seen, spans)
        # On a busy machine a worker's last status may come after the router has stopped waiting for it.
        check_one_trace(spans, cancelled=True)
    assert len({seen.trace_id for answers in both for seen in answers}) == 16


async def test_a_request_whose_prefix_comes_from_the_store(paths: Fleet) -> None:
    prompt, salt = prompt_of(640, 4), "stored"
    await paths.all("local", [Ask(prompt)], max_tokens=2, cache_salt=salt)
    (worker,) = [worker for worker in (await paths.client["split"].fleet()).workers if worker.worker_id == "decode-0"]
    assert worker.identity is not None and worker.layout is not None
    hashes = hashing.block_hashes(hashing.root_hash(worker.identity.fingerprint, salt), prompt, BLOCK)
    look_up = kv_store_service_pb2.LookupPrefixRequest(
        identity=wire.identity_to_proto(worker.identity), layout=wire.layout_to_proto(worker.layout), block_hashes=hashes
    )
    async with Wire() as stubs:
        store = stubs.store(paths.suite.address_of("kvstore-0"))

        async def stored() -> bool:
            # A worker's cache never answers for a whole prompt, so what it writes behind lacks the last block.
            return bool((await store.LookupPrefix(look_up, timeout=5)).blocks >= 639 // BLOCK)

        await eventually(stored, 30.0, "the store has the prompt's blocks")
    # The prefill worker has never seen this prompt.
    (seen,) = await paths.all("split", [Ask(prompt)], max_tokens=16, ignore_eos=True, cache_salt=salt)
    assert seen.completion.usage.cached_tokens == 624
    services = {"router": ROUTER_SPANS, "prefill": COMPUTE_SPANS, "decode": DECODE_SPANS}
    spans = await trace_of(paths, seen, wanted(**services) | {("kvstore", "kvrelay.kv.v1.KvStoreService/ReadKv")})
    check_adds_up(seen, spans)
    check_one_trace(spans)


async def test_a_clients_own_trace_goes_on(paths: Fleet) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    traceparent = f"00-{trace_id}-{span_id}-01"
    (seen,) = await paths.all("split", [Ask(prompt_of(50, 5))], max_tokens=3, ignore_eos=True, traceparent=traceparent)
    assert seen.trace_id == trace_id
    assert paths.suite.otlp is not None
    spans = await paths.suite.otlp.wait_for_trace(trace_id, waterfall.is_complete, 20.0)
    check_one_trace(spans, parent=span_id)
    check_adds_up(seen, spans)


async def test_a_request_whose_prefill_worker_is_killed(paths: Fleet) -> None:
    """What the lost try took is part of the wait for prefill. The last test here: the worker stays dead."""
    prompt = prompt_of(500, 6)
    paths.suite.signal("prefill-0", signal.SIGSTOP)
    asked = asyncio.ensure_future(paths.all("split", [Ask(prompt)], max_tokens=16, ignore_eos=True))
    try:

        async def placed() -> int:
            return (await paths.client["split"].fleet()).in_flight

        await eventually(placed, 10.0, "the request is in flight")
    finally:
        paths.suite.kill("prefill-0")
    (seen,) = await asked
    assert seen.completion.path == "fallback"
    spans = await trace_of(paths, seen, wanted(router=ROUTER_SPANS, decode=COMPUTE_SPANS | DECODE_SPANS))
    check_adds_up(seen, spans)
    (root,) = [span for span in spans if span.name == names.SPAN_GENERATE]
    assert [event.name for event in root.events] == [names.EVENT_FALLBACK]
    assert root.attributes[names.ATTEMPT] == 2
    assert len([span for span in spans if span.name == names.SPAN_ROUTE]) == 2
    assert seen.completion.transfer is None and seen.completion.timings.exposed_transfer_s == 0


async def test_a_list_of_traces_shows_requests_and_what_was_written_behind_them_and_nothing_else(paths: Fleet) -> None:
    otlp = paths.suite.otlp
    assert otlp is not None
    before = {span.trace_id for span in otlp.spans()}
    (seen,) = await paths.all("split", [Ask(prompt_of(5 * BLOCK + 3, 77))])
    await paths.suite.client.fleet()
    await paths.suite.client.list_models()

    def behind() -> list[ReceivedSpan]:
        return [span for span in otlp.spans() if span.name == names.SPAN_KV_WRITE_BEHIND and span.trace_id not in before]

    async def for_this_request() -> list[ReceivedSpan]:
        return [span for span in behind() if span.links and span.links[0][0] == seen.trace_id]

    (written,) = await eventually(for_this_request, 20.0, "the write-behind of the request")
    tree = await otlp.wait_for_trace(written.trace_id, lambda spans: sum(span.name.endswith("/CommitKv") for span in spans) == 2, 20.0)
    calls = [span.name.rpartition("/")[2] for span in tree if span.kind == "CLIENT"]
    assert calls == ["CreateKv", "WriteKv", "CommitKv"]
    assert written.parent_id == "" and {span.parent_id for span in tree if span.kind == "CLIENT"} == {written.span_id}
    roots = {span.name for span in otlp.spans() if not span.parent_id}
    assert roots <= {"kvrelay.inference.v1.RouterService/Generate", names.SPAN_KV_WRITE_BEHIND}
