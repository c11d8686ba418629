"""A token's numbers do not depend on chunking, batch mates, page order, imported prefixes or earlier owners of its pages: bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.model.decoder import ForwardEntry
from services.engine.model.llama import LlamaModel, load_model
from tests.engine_runs import KERNELS, MODES, PagedRun, PagedSequence, options, random_ids
from tests.tiny_models import FAMILIES, write_tiny_model

CHUNKINGS = ((1,), (64,), (256,), (2000,), (3, 17, 16, 128, 1, 129, 40), (130, 65))


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def model(tmp_path: Path, mode: str, kernels: str) -> LlamaModel:
    folder = write_tiny_model(tmp_path, "llama", hidden_size=96, intermediate_size=112, num_key_value_heads=1)
    return load_model(folder, options(mode, kernels))


def assert_same(left: PagedRun, a: PagedSequence, right: PagedRun, b: PagedSequence) -> None:
    """Equal KV bytes, and equal logits wherever both asked for them."""
    assert left.kv_bytes(a) == right.kv_bytes(b)
    common = a.logits.keys() & b.logits.keys()
    assert len(a.token_ids) - 1 in common
    for position in common:
        assert torch.equal(a.logits[position], b.logits[position]), f"logits differ at {position}"


@pytest.mark.parametrize("family", FAMILIES)
def test_chunking_changes_nothing(tmp_path: Path, family: str, mode: str, kernels: str) -> None:
    model = load_model(write_tiny_model(tmp_path, family), options(mode, kernels))
    for length in (1, 15, 16, 17, 150, 700):
        ids = random_ids(length, 300, seed=length)
        whole = PagedRun(model, seed=1)
        reference = whole.prefill(ids)
        for seed, chunks in enumerate(CHUNKINGS if length < 200 else CHUNKINGS[1:]):
            run = PagedRun(model, seed=seed)
            assert_same(whole, reference, run, run.prefill(ids, chunks))


def test_a_batch_of_eight_changes_nothing(model: LlamaModel) -> None:
    lengths = (1, 30, 513, 64, 700, 16, 5, 129)
    together = PagedRun(model, seed=2)
    sequences = [together.begin(random_ids(length, 300, seed=length)) for length in lengths]
    budget = 96
    while waiting := [s for s in sequences if s.done < len(s.token_ids)]:
        work, left = [], budget
        for sequence in waiting:
            count = min(left, len(sequence.token_ids) - sequence.done, 50)
            if count:
                work.append((sequence, count))
                left -= count
        together.step(work)
    for sequence in sequences:
        alone = PagedRun(model, seed=3)
        assert_same(alone, alone.prefill(sequence.token_ids), together, sequence)


def test_decode_rows_beside_prefill_chunks_equal_a_prefill_of_the_whole(model: LlamaModel) -> None:
    ids = [random_ids(length, 300, seed=length) for length in (40, 505, 90, 511, 200)]
    run = PagedRun(model, seed=4)
    sequences = [run.begin(prompt) for prompt in ids]
    for sequence in sequences:
        run.step([(sequence, len(sequence.token_ids) - 20)])
    newcomer = run.begin(random_ids(400, 300, seed=99))
    for _ in range(20):
        run.step([(sequences[0], 1), (newcomer, 20), *((sequence, 1) for sequence in sequences[1:])])
    for sequence in [*sequences, newcomer]:
        alone = PagedRun(model, seed=5)
        assert_same(alone, alone.prefill(sequence.token_ids), run, sequence)


def test_a_prefix_brought_by_its_bytes_equals_a_computed_one(model: LlamaModel) -> None:
    ids = random_ids(333, 300, seed=7)
    producer = PagedRun(model, seed=1)
    made = producer.prefill(ids)
    for imported in (16, 160, 320, 332):
        taker = PagedRun(model, seed=2)
        sequence = taker.begin(ids)
        for source, target in zip(made.pages, sequence.pages[: -(-imported // 16)], strict=False):
            taker.pool.page_view(target)[:] = producer.pool.page_view(source)
        sequence.done = imported
        taker.step([(sequence, len(ids) - imported)])
        assert torch.equal(sequence.logits[332], made.logits[332])
        assert taker.kv_bytes(sequence) == producer.kv_bytes(made)


def test_an_earlier_owners_bytes_never_show_even_if_they_are_not_numbers(model: LlamaModel) -> None:
    ids = random_ids(70, 300, seed=8)
    fresh = PagedRun(model, num_pages=8, seed=1)
    reference = fresh.prefill(ids, (50, 1))
    dirty = PagedRun(model, num_pages=8, seed=2)
    dirty.pool.data.fill_(torch.nan)
    assert_same(fresh, reference, dirty, dirty.prefill(ids, (50, 1)))


@pytest.mark.parametrize("page_size", [1, 4, 32, 128])
def test_the_page_size_changes_no_logits(model: LlamaModel, page_size: int) -> None:
    ids = random_ids(150, 300, seed=9)
    usual, other = PagedRun(model), PagedRun(model, num_pages=300, page_size=page_size, seed=3)
    assert torch.equal(usual.prefill(ids).logits[149], other.prefill(ids, (37,)).logits[149])


def test_logits_come_in_entry_order_for_those_that_sample(model: LlamaModel) -> None:
    run = PagedRun(model)
    prompts = [random_ids(length, 300, seed=length) for length in (20, 1, 33, 1)]
    alone = [PagedRun(model).prefill(prompt).logits[len(prompt) - 1] for prompt in prompts]
    pages = [run.begin(prompt).pages for prompt in prompts]
    wanted = [True, False, True, True]
    entries = [ForwardEntry(prompt, 0, table, sample) for prompt, table, sample in zip(prompts, pages, wanted, strict=True)]
    logits = run.model.forward(entries, run.pool)
    assert torch.equal(logits, torch.stack([alone[0], alone[2], alone[3]]))
    silent = [ForwardEntry(prompts[0], 0, pages[0], sample=False)]
    assert run.model.forward(silent, run.pool).shape == (0, 300)


@pytest.mark.parametrize(
    "entry",
    [
        ForwardEntry([], 0, [0], True),
        ForwardEntry([1], -1, [0], True),
        ForwardEntry([1] * 17, 0, [0], True),
        ForwardEntry([1], 16, [0], True),
        ForwardEntry([1], 0, [8], True),
        ForwardEntry([1], 0, [-1], True),
        ForwardEntry([1], 4096, list(range(8)) * 33, True),
        ForwardEntry([5, 300], 0, [0], True),
        ForwardEntry([5, -1], 0, [0], True),
    ],
    ids=[
        "empty",
        "before the start",
        "too few pages",
        "page missing",
        "page too high",
        "page negative",
        "beyond the context",
        "token too high",
        "token negative",
    ],
)
def test_an_entry_that_does_not_fit_is_refused(model: LlamaModel, entry: ForwardEntry) -> None:
    run = PagedRun(model, num_pages=8)
    with pytest.raises(ValueError):
        model.forward([entry], run.pool)
    with pytest.raises(ValueError):
        model.forward([], run.pool)
