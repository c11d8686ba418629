"""The paged KV cache: one tensor that attention reads, and whose pages the relay sends as they lie."""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from kvrelay.errors import KvTransferError
from services.engine.model.config import ModelConfig


class KvPool:
    """`num_pages` pages in one contiguous tensor `[pages, layers, 2, page_size, kv_heads, head_dim]` (2: keys, values).

    Page-major: a page is one run of `page_bytes` bytes that holds `page_size` token positions of every layer, so it can be
    sent, stored and received without a copy. Who may use which page is the block manager's business, not the pool's.
    Zero at the start; the engine zeroes a page again when it begins to fill it, so bytes no token wrote are zero.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str = "cpu",
    ) -> None:
        """Raises `ValueError` unless there is at least one page and `page_size` is a power of two up to 512."""
        if num_pages < 1:
            raise ValueError(f"a pool needs at least one page, got {num_pages}")
        if page_size not in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
            raise ValueError(f"page_size must be a power of two up to 512, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.layers = config.layers
        self.kv_heads = config.kv_heads
        self.head_dim = config.head_dim
        self.dtype = dtype
        self.device = torch.device(device)
        self.scratch_page = num_pages
        """A page that no sequence can own, behind all others in `page_rows` and `slot_rows`: where the padding of a step may write."""
        shape = (num_pages + 1, config.layers, 2, page_size, config.kv_heads, config.head_dim)
        whole = _zeros(shape, dtype) if self.device.type == "cpu" else torch.zeros(shape, dtype=dtype, device=self.device)
        self.data = whole[:num_pages]
        """`[pages, layers, 2, page_size, kv_heads, head_dim]`"""
        self.page_bytes = math.prod(shape[1:]) * self.data.element_size()
        self.page_rows = whole.view(-1, page_size * config.kv_heads * config.head_dim)
        """`[(pages + 1) * layers * 2, page_size * kv_heads * head_dim]`: a row is the keys, or values, of one page in one layer."""
        self.slot_rows = whole.view(-1, config.kv_heads, config.head_dim)
        """`[(pages + 1) * layers * 2 * page_size, kv_heads, head_dim]`: a row is the key, or value, of one token in one layer."""
        self._flat_pages = self.data.view(num_pages, -1)
        self._bytes = self.data.view(torch.uint8).numpy().data.cast("B") if self.device.type == "cpu" else None
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        """Kept buffers of `gather`."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values over all layers."""
        return self.page_bytes // self.page_size

    def page_view(self, page: int) -> memoryview:
        """The bytes of one page, writable and not copied: `page_bytes` long, format 'B', valid as long as the pool.

        Raises `IndexError` for a page the pool hasn't, `KvTransferError` for a pool that isn't in host memory.
        """
        self._check(page)
        if self._bytes is None:
            raise KvTransferError(f"KV on {self.device} is not in host memory: it can be neither sent nor received")
        return self._bytes[page * self.page_bytes : (page + 1) * self.page_bytes]

    def zero_page(self, page: int) -> None:
        """Clears a page that is about to be filled, so that no earlier owner's bytes remain in its unwritten slots."""
        self._check(page)
        self._flat_pages[page].zero_()

    def gather(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Copies whole `page_rows` one after another: `rows` int64 `[n]` -> `[n, page_size * kv_heads * head_dim]` of `dtype`.

        The result lies in a buffer that is kept and overwritten by the next call: a fresh large tensor costs page faults.
        """
        out = torch.index_select(self.page_rows, 0, rows, out=self._kept(rows.numel(), self.dtype))
        return out if dtype == self.dtype else self._kept(rows.numel(), dtype).copy_(out)

    def _kept(self, rows: int, dtype: torch.dtype) -> torch.Tensor:
        width = self.page_rows.shape[1]
        kept = self._scratch.get(dtype)
        if kept is None or len(kept) < rows:
            kept = torch.empty(max(rows, 2 * len(kept) if kept is not None else 0), width, dtype=dtype, device=self.device)
            self._scratch[dtype] = kept
        return kept[:rows]

    def _check(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} is outside the pool's {self.num_pages}")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Host memory on huge pages where the system has them: attention jumps from page to page, and many jumps would miss the TLB."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not Linux, or a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
