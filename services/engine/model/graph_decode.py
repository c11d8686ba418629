"""Decode by CUDA graphs: a step of decode rows alone is one replay of what was recorded once, instead of hundreds of launches.

A graph repeats the same operators on the same memory, so the recorded function knows the step by static tensors only: for each row
its token, its position and its page table, in one int64 tensor that is filled before a replay. Rows and page tables are padded to
powers of two; there is one graph for each pair of them, recorded when it is first needed. Padding writes to the pool's scratch page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from services.engine.model.attention import causal_masks
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.torch_decoder import TorchDecoder

LEAST_KEYS = 128
"""Positions that the smallest page table holds."""
MOST_KEYS = 1 << 18
"""Rows times positions of the largest graph. With `LEAST_KEYS` it bounds their memory, and their number to 78."""

Compute = Callable[[], torch.Tensor]


class Capture(Protocol):
    """How a function over static tensors is recorded."""

    def __call__(self, compute: Compute) -> Compute:
        """May run `compute`; returns what repeats its operators, on the content that the same tensors have by then."""
        ...


class CudaCapture:
    """Records CUDA graphs. They share one memory pool, for no two run at once, and none reads what another has left there."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Compute) -> Compute:
        with torch.cuda.device(self._device):
            # Libraries allocate and choose their kernels at the first call, which a recording would not survive.
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                compute()
            torch.cuda.current_stream().wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
                out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True, slots=True)
class _Graph:
    inputs: torch.Tensor
    """int64 `[rows, 2 + pages]`: token id, position, page table."""
    run: Compute
    """Float32 logits `[rows, vocab]`, overwritten by the next run of any graph."""


class GraphDecoder:
    """Replays steps whose entries have one token each; all others, and those too large for a graph, are the eager decoder's."""

    name = "torch cuda-graphs"

    def __init__(self, eager: TorchDecoder, capture: Capture) -> None:
        self._eager = eager
        self._capture = capture
        self._pool: KvPool | None = None
        self._graphs: dict[tuple[int, int], _Graph] = {}
        """By rows and pages; over the memory of `_pool`."""

    @property
    def numerics(self) -> str:
        """See `Decoder.numerics`: a graph's shapes, and so its kernels, are not those of an eager step."""
        return f"{self._eager.numerics}/graphs"

    def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
        """See `Decoder.forward`."""
        shape = graph_shape(entries, pool.page_size)
        if shape is None:
            return self._eager.forward(entries, pool)
        if pool is not self._pool:
            self._pool, self._graphs = pool, {}
        graph = self._graphs.get(shape) or self._record(shape, pool)
        graph.inputs.copy_(self._staged(entries, shape, pool), non_blocking=True)
        sampled = torch.tensor([row for row, entry in enumerate(entries) if entry.sample], dtype=torch.int64, pin_memory=self._pinned)
        sampled = sampled.to(self._eager.device, non_blocking=True)
        return graph.run().index_select(0, sampled)

    @property
    def _pinned(self) -> bool:
        """Host memory that is copied from without waiting; torch does not reuse it before the copy has ended."""
        return self._eager.device.type == "cuda"

    def _record(self, shape: tuple[int, int], pool: KvPool) -> _Graph:
        # Whatever the recording runs, it runs on padding.
        inputs = self._staged((), shape, pool).to(self._eager.device)
        graph = _Graph(inputs, self._capture(lambda: _logits(self._eager, inputs, pool)))
        self._graphs[shape] = graph
        return graph

    def _staged(self, entries: Sequence[ForwardEntry], shape: tuple[int, int], pool: KvPool) -> torch.Tensor:
        """The inputs of a step, in host memory. Padding is token 0 at position 0 of the scratch page.

        Tables are filled up with their own first page: masked, and neither another sequence's bytes nor anything but numbers.
        """
        rows, pages = shape
        staged = torch.zeros(rows, 2 + pages, dtype=torch.int64, pin_memory=self._pinned)
        table = staged.numpy()
        table[len(entries) :, 2:] = pool.scratch_page
        for row, entry in enumerate(entries):
            used = entry.pages[: -(-entry.end // pool.page_size)]
            table[row, :2] = entry.token_ids[0], entry.start
            table[row, 2 : 2 + len(used)] = used
            table[row, 2 + len(used) :] = used[0]
        return staged


def graph_shape(entries: Sequence[ForwardEntry], page_size: int) -> tuple[int, int] | None:
    """Rows and pages of the graph for a step, both powers of two; None for a step that is not one of decode rows, or too large."""
    if any(len(entry.token_ids) != 1 for entry in entries):
        return None
    rows = _power_of_two(len(entries))
    keys = _power_of_two(max(LEAST_KEYS, page_size, *(entry.end for entry in entries)))
    return (rows, keys // page_size) if rows * keys <= MOST_KEYS else None


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _logits(eager: TorchDecoder, inputs: torch.Tensor, pool: KvPool) -> torch.Tensor:
    """One token a row. What is recorded: it depends on `inputs` and `pool` by their shapes and, on the device, by their content."""
    token_ids, positions, tables = inputs[:, 0], inputs[:, 1], inputs[:, 2:]
    rows, context = len(tables), tables.shape[1] * pool.page_size
    config = eager.config
    own_page = tables.gather(1, (positions // pool.page_size)[:, None])[:, 0]
    slots = own_page * (pool.layers * 2 * pool.page_size) + positions % pool.page_size
    key_rows = tables * (2 * pool.layers)
    page_rows = torch.cat((key_rows, key_rows + 1), dim=1).view(-1)
    masks = {window: mask[:, None, None] for window, mask in causal_masks(positions[:, None], context, eager.dtype, eager.windows)}

    def attend(layer: int, window: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        key_slots = slots + layer * 2 * pool.page_size
        pool.slot_rows.index_copy_(0, key_slots, keys.to(pool.dtype))
        pool.slot_rows.index_copy_(0, key_slots + pool.page_size, values.to(pool.dtype))
        gathered = pool.page_rows.index_select(0, page_rows + 2 * layer).to(eager.dtype)
        both = gathered.view(rows, 2, context, pool.kv_heads, pool.head_dim).transpose(2, 3)
        # The query heads of a KV head as its query rows: fused kernels that take a mask do not take grouped heads.
        folded = queries.reshape(rows, pool.kv_heads, -1, pool.head_dim)
        out = F.scaled_dot_product_attention(folded, both[:, 0], both[:, 1], attn_mask=masks[window], scale=config.query_scale)
        return out.reshape(rows, -1)

    return eager.logits(eager.hidden(token_ids, positions, attend))
