"""Pages as bytes, and the bounds of the pool."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from services.engine.model.config import ModelConfig
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import DTYPES
from tests.tiny_models import write_tiny_model


@pytest.fixture
def config(tmp_path: Path) -> ModelConfig:
    return ModelConfig.from_folder(write_tiny_model(tmp_path, "llama", num_hidden_layers=3))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_page_is_one_run_of_bytes_that_is_seen_without_a_copy(config: ModelConfig, dtype: torch.dtype) -> None:
    pool = KvPool(config, 5, 16, dtype)
    assert pool.page_bytes == 3 * 2 * 16 * 2 * 16 * dtype.itemsize
    assert pool.token_bytes * 16 == pool.page_bytes
    view = pool.page_view(3)
    assert (view.format, view.nbytes, view.readonly, view.contiguous) == ("B", pool.page_bytes, False, True)
    pool.data[3] = 1.5
    assert bytes(view) == bytes(pool.data[3].flatten().view(torch.uint8).numpy())
    view[:] = bytes(pool.page_bytes)
    assert not pool.data.any()


def test_a_view_that_outlives_its_pool_keeps_the_memory(config: ModelConfig) -> None:
    """A transfer may still hold one when the engine is gone."""
    view = KvPool(config, 2).page_view(1)
    gc.collect()
    view[:] = b"\x01" * len(view)
    assert bytes(view) == b"\x01" * len(view)


def test_writing_one_page_leaves_its_neighbours_alone(config: ModelConfig) -> None:
    pool = KvPool(config, 3)
    pool.page_view(1)[:] = b"\x3f" * pool.page_bytes
    assert not pool.data[0].any() and not pool.data[2].any() and pool.data[1].all()
    pool.zero_page(1)
    assert not pool.data.any()


@pytest.mark.parametrize("kept_in", DTYPES.values(), ids=str)
def test_gather_returns_whole_pages_in_order_from_one_kept_buffer(config: ModelConfig, kept_in: torch.dtype) -> None:
    pool = KvPool(config, 4, dtype=kept_in)
    pool.data.normal_(generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([7, 2, 7, 0])
    first = pool.gather(rows, torch.float32)
    assert first.dtype == torch.float32 and torch.equal(first, pool.page_rows[rows].float())
    assert pool.gather(rows[:2], torch.float32).data_ptr() == first.data_ptr()


@pytest.mark.parametrize("page", [-1, 4, 10**9])
def test_a_page_outside_the_pool_is_refused(config: ModelConfig, page: int) -> None:
    pool = KvPool(config, 4)
    with pytest.raises(IndexError):
        pool.page_view(page)
    with pytest.raises(IndexError):
        pool.zero_page(page)


@pytest.mark.parametrize(("pages", "page_size"), [(0, 16), (4, 0), (4, 24), (4, 1024)])
def test_a_pool_of_no_pages_or_odd_pages_is_refused(config: ModelConfig, pages: int, page_size: int) -> None:
    with pytest.raises(ValueError):
        KvPool(config, pages, page_size)
