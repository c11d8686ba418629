"""Continuous batching, chunked prefill and the chunk-wise hand-over, seen from outside: order of events, spans and raw bytes."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import google_crc32c
import pytest
import pytest_asyncio

from kvrelay import AsyncClient
from kvrelay.inference.v1 import prefill_service_pb2
from services.launcher import waterfall
from services.runtime.telemetry import names
from tests.integration.suite.fault_kit import Wire, handle_from, in_the_middle, job_for, ledger, pull_request, read_until
from tests.integration.suite.paths_kit import Ask, Fleet, fleet, see
from tests.tiny_models import write_tiny_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

BLOCK = 64
TOKEN_BYTES = 6 * 2 * 4 * 128 * 4
"""Of this module's model: layers, keys and values, heads, head size, fp32."""
BUDGET = 128
MIB = 1 << 20
ENDLESS = 1500


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """KV enough that a block of 64 tokens is over 1 MiB, and steps slow enough to be met."""
    folder = tmp_path_factory.mktemp("batched") / "tiny"
    return write_tiny_model(folder, "llama", num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4, head_dim=128)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def paths(model: Path) -> AsyncIterator[Fleet]:
    settings = {"block_size": BLOCK, "max_num_batched_tokens": BUDGET, "kv_cache_mib": 512, "kv_dtype": "float32", "lease_ttl_s": 20.0}
    async with fleet(model, ("split", "local"), traces=True, store=False, start_timeout_s=200.0, **settings) as running:
        yield running


def prompt_of(tokens: int, seed: int) -> list[int]:
    script = random.Random(seed)
    return [script.randrange(3, 300) for _ in range(tokens)]


@dataclass
class Talker:
    """A long answer on its way."""

    tokens: int = 0
    ended: bool = False
    came: asyncio.Event = field(default_factory=asyncio.Event)

    async def talk(self, client: AsyncClient, prompt: Sequence[int]) -> None:
        async with client.generate(prompt, max_tokens=ENDLESS, ignore_eos=True) as stream:
            async for _ in stream:
                self.tokens += 1
                self.came.set()
        self.ended = True


@asynccontextmanager
async def talking(client: AsyncClient, count: int) -> AsyncIterator[list[Talker]]:
    """So many answers that are being decoded and end after the body only, by cancellation."""
    talkers = [Talker() for _ in range(count)]
    tasks = [asyncio.ensure_future(talker.talk(client, prompt_of(40, 100 + seed))) for seed, talker in enumerate(talkers)]
    try:
        for talker in talkers:
            await talker.came.wait()
        yield talkers
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_newcomer_is_answered_while_others_decode(paths: Fleet) -> None:
    async with talking(paths.client["local"], 6) as talkers:
        before = [talker.tokens for talker in talkers]
        seen = await see(paths.client["local"], prompt_of(20, 1), max_tokens=6, ignore_eos=True)
        between = [talker.tokens - count for talker, count in zip(talkers, before, strict=True)]
        assert len(seen.ids) == 6
        assert not any(talker.ended for talker in talkers)
        # They went on meanwhile: one step gives a token to each of them as to the newcomer.
        assert min(between) >= 3, between


async def test_answers_that_decode_ride_along_with_the_chunks_of_a_long_prompt(paths: Fleet) -> None:
    prompt = prompt_of(ENDLESS, 2)
    async with talking(paths.client["local"], 2) as talkers:
        before = [talker.tokens for talker in talkers]
        async with paths.client["local"].generate(prompt, max_tokens=2, ignore_eos=True) as stream:
            await anext(stream)
            between = [talker.tokens - count for talker, count in zip(talkers, before, strict=True)]
            completion = await stream.completion_or_raise()
        assert not any(talker.ended for talker in talkers)
    assert paths.suite.otlp is not None
    spans = await paths.suite.otlp.wait_for_trace(completion.trace_id, waterfall.is_complete, 20.0)
    (compute,) = [span for span in spans if span.name == names.SPAN_PREFILL_COMPUTE]
    chunks = [event.attributes for event in compute.events if event.name == names.EVENT_CHUNK]
    computed = [0, *(chunk[names.COMPUTED_TOKENS] for chunk in chunks)]
    assert computed[-1] == len(prompt) and len(chunks) >= len(prompt) // BUDGET
    for chunk, (start, end) in zip(chunks, pairwise(computed), strict=True):
        assert chunk[names.CHUNK_TOKENS] <= BUDGET
        assert chunk[names.CHUNK_TOKENS] - (end - start) == len(talkers), "a decode was left out of this step"
        # A block that a chunk completes can be handed over at once, so chunks end with blocks.
        assert end == len(prompt) or end % BLOCK == 0
    # Their tokens came while the prompt was computed, not after it.
    assert min(between) >= len(chunks) // 2, between


async def test_prompts_that_waited_for_a_long_one_share_a_step(paths: Fleet) -> None:
    long = prompt_of(ENDLESS, 20)
    asks = [Ask(prompt_of(BUDGET // 4, 21 + number)) for number in range(4)]
    first = asyncio.ensure_future(see(paths.client["split"], long, max_tokens=2, ignore_eos=True))
    async with Wire() as stubs:
        await in_the_middle(stubs, paths.suite.address_of("prefill-0"), len(long))
    answers = await paths.all("split", asks, max_tokens=2, ignore_eos=True)
    await first
    assert paths.suite.otlp is not None
    shared = 0
    for seen in answers:
        spans = await paths.suite.otlp.wait_for_trace(seen.trace_id, waterfall.is_complete, 20.0)
        (compute,) = [span for span in spans if span.name == names.SPAN_PREFILL_COMPUTE]
        shared += max(event.attributes[names.CHUNK_TOKENS] for event in compute.events) > BUDGET // 4
    assert shared >= 3, "all but the one that got what the long prompt left are in one step"


async def test_the_first_token_reaches_the_client_before_the_transfer_ends(paths: Fleet) -> None:
    """The decode worker is frozen in the middle of the pull: nothing can end the transfer, and the first token comes all the same."""
    # Not longer: a peer that stays frozen for seconds counts as lost.
    prompt = prompt_of(6 * BUDGET, 3)
    prefill = paths.suite.address_of("prefill-0")
    async with Wire() as stubs:
        stream = paths.client["split"].generate(prompt, max_tokens=4, ignore_eos=True)
        first = asyncio.ensure_future(anext(stream))
        try:
            await in_the_middle(stubs, prefill, len(prompt))
            paths.suite.signal("decode-0", signal.SIGSTOP)
            async with asyncio.timeout(15.0):
                token = await first
            first_ns = time.time_ns()
            assert (token.index, stream.completion) == (0, None)
            assert (await ledger(stubs, prefill)).worker.load.held_handles == 1, "the hand-over is not over"
        finally:
            paths.suite.signal("decode-0", signal.SIGCONT)
            await asyncio.gather(first, return_exceptions=True)
    completion = await stream.completion_or_raise()
    assert (completion.path, completion.usage.completion_tokens) == ("split", 4)
    assert completion.transfer is not None and completion.transfer.early_bytes < completion.transfer.kv_bytes
    assert paths.suite.otlp is not None
    spans = await paths.suite.otlp.wait_for_trace(completion.trace_id, waterfall.is_complete, 20.0)
    (transfer,) = [span for span in spans if span.name == names.SPAN_KV_TRANSFER]
    (root,) = [span for span in spans if span.name == names.SPAN_GENERATE]
    assert root.start_ns < transfer.start_ns < first_ns < transfer.end_ns < root.end_ns
    assert root.start_ns + root.attributes[names.TTFT_S] * 1e9 < transfer.end_ns


async def test_blocks_are_sent_while_later_ones_are_computed(paths: Fleet) -> None:
    """A raw pull, begun before prefill: most segments are marked early, and arrive before the first token is drawn."""
    prompt = prompt_of(ENDLESS, 4)
    address = paths.suite.address_of("prefill-0")
    async with Wire() as stubs:
        worker = (await ledger(stubs, address)).worker
        job = job_for(worker.identity, prompt, "raw early")
        prefill = stubs.prefill(address).Prefill(prefill_service_pb2.PrefillRequest(job=job), timeout=60)
        accepted = (await read_until(prefill, "accepted"))[-1]
        pull = stubs.transfer(address).PullKv(pull_request(accepted.accepted.handle, worker.identity, worker.layout), timeout=60)
        messages = await read_until(pull, "end")
        headers = [message.segment for message in messages if message.WhichOneof("event") == "segment"]
        done = (await read_until(prefill, "done"))[-1].done
    early = sum(header.segment.size_bytes for header in headers if header.early)
    total = sum(header.segment.size_bytes for header in headers)
    assert total == -(-len(prompt) // BLOCK) * BLOCK * TOKEN_BYTES
    assert 0.6 * total <= early < total
    assert [header.early for header in headers] == sorted((header.early for header in headers), reverse=True)
    assert messages[-1].end.prefill_end_unix_nanos == done.marks.prefill_end_unix_nanos


async def test_every_segment_carries_its_checksum_in_chunks_of_at_most_a_mebibyte(paths: Fleet) -> None:
    prompt = prompt_of(5 * BLOCK + 7, 5)
    address = paths.suite.address_of("prefill-0")
    async with Wire() as stubs:
        worker = (await ledger(stubs, address)).worker
        assert worker.layout.block_size * TOKEN_BYTES > MIB
        for first_block in (0, 4):
            handle = await handle_from(stubs, address, job_for(worker.identity, prompt, f"raw {first_block}"))
            request = pull_request(handle, worker.identity, worker.layout, first_block=first_block)
            messages = await read_until(stubs.transfer(address).PullKv(request, timeout=30), "end")
            next_block, left, crc, expected = first_block, 0, 0, 0
            for message in messages[:-1]:
                if message.WhichOneof("event") == "segment":
                    assert (left, crc) == (0, expected), "a segment ended short, or with another checksum"
                    segment = message.segment.segment
                    assert segment.HasField("crc32c")
                    assert segment.first_block == next_block and segment.block_count >= 1
                    assert segment.size_bytes == segment.block_count * BLOCK * TOKEN_BYTES
                    next_block += segment.block_count
                    left, crc, expected = segment.size_bytes, 0, segment.crc32c
                else:
                    chunk = message.chunk
                    assert 0 < len(chunk.data) <= MIB
                    assert chunk.offset == segment.size_bytes - left
                    crc = google_crc32c.extend(crc, chunk.data)
                    left -= len(chunk.data)
            assert (left, crc) == (0, expected)
            assert next_block == 6 == handle.token_end // BLOCK + 1
