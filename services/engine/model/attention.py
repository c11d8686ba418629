"""Paged causal attention: where each token's keys and values go, which pages each query reads, and the products themselves.

A step mixes prefill chunks and decode rows. `plan_attention` orders the entries (decode rows first) and computes once per
step what all layers share: slots, page rows, masks. `PagedAttention` then does one layer. Decode rows of like length run as
one call with the query heads of a KV head as its query rows: K and V are never repeated. Prefill chunks run tile by tile, so
that a tile reads no keys beyond its last row's. Shapes follow `exactness.Rules`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from services.engine.model.exactness import KEY_BLOCK, Rules
from services.engine.model.kv_pool import KvPool

_TILE_ROWS = 128


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens to compute for one sequence: `count` from absolute position `start`, in a sequence that owns `pages`."""

    start: int
    count: int
    pages: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class _Read:
    """Queries that run as one attention call."""

    first_row: int
    end_row: int
    page_rows: torch.Tensor
    """int64 `[layers, sequences * 2 * pages]`: rows of `KvPool.page_rows`; of each sequence keys, then values."""
    sequences: int
    keys: int
    """Keys the call sees of each sequence, padding included; the pages may hold a few more."""
    decode: bool
    masks: dict[int, torch.Tensor]
    """Additive mask for each window: decode `[sequences, 1, 1, keys]`, prefill `[padded rows, keys]`."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one step share."""

    order: tuple[int, ...]
    """Indices of the spans as their tokens lie in the flattened batch."""
    positions: list[int]
    """Absolute position of each flattened token."""
    key_slots: torch.Tensor
    """int64 `[layers, tokens]`: rows of `KvPool.slot_rows`."""
    value_slots: torch.Tensor
    reads: tuple[_Read, ...]


def plan_attention(spans: Sequence[Span], pool: KvPool, rules: Rules, windows: frozenset[int], dtype: torch.dtype) -> AttentionPlan:
    """Plans one step whose activations are of `dtype`; the spans fit their pages, and these the pool."""
    decode = sorted((i for i, span in enumerate(spans) if span.count == 1), key=lambda i: spans[i].end)
    order = (*decode, *(i for i, span in enumerate(spans) if span.count > 1))
    ordered = [spans[i] for i in order]
    slots = torch.tensor([slot for span in ordered for slot in _first_layer_slots(span, pool)], dtype=torch.int64, device=pool.device)
    per_layer = torch.arange(pool.layers, device=pool.device)[:, None] * (2 * pool.page_size)
    key_slots = slots + per_layer
    reads: list[_Read] = []
    row = 0
    for group in _groups_of_like_length([spans[i] for i in decode]):
        reads.append(_decode_read(row, group, pool, rules, windows, dtype))
        row += len(group)
    for span in ordered[len(decode) :]:
        for offset in range(0, span.count, _TILE_ROWS):
            tile = Span(span.start + offset, min(_TILE_ROWS, span.count - offset), span.pages)
            reads.append(_prefill_read(row, tile, pool, rules, windows, dtype))
            row += tile.count
    return AttentionPlan(
        order=order,
        positions=[position for span in ordered for position in range(span.start, span.end)],
        key_slots=key_slots,
        value_slots=key_slots + pool.page_size,
        reads=tuple(reads),
    )


class PagedAttention:
    """Attention of one model over one pool."""

    __slots__ = ("_pool", "_query_heads", "_rules", "_scale")

    def __init__(self, pool: KvPool, query_heads: int, scale: float, rules: Rules) -> None:
        """`scale` is a factor of the scores."""
        self._pool = pool
        self._query_heads = query_heads
        self._scale = scale
        self._rules = rules

    def write(self, plan: AttentionPlan, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values, each `[tokens, kv_heads, head_dim]`, in their slots, rounded to the pool's dtype (halves to even)."""
        self._pool.slot_rows.index_copy_(0, plan.key_slots[layer], keys.to(self._pool.dtype))
        self._pool.slot_rows.index_copy_(0, plan.value_slots[layer], values.to(self._pool.dtype))

    def read(self, plan: AttentionPlan, layer: int, window: int, queries: torch.Tensor, out: torch.Tensor) -> None:
        """Attends with `queries` `[tokens, query_heads, head_dim]` to all stored positions up to each one's own.

        Fills the first rows of `out` `[rows, query_heads * head_dim]`; each query sees `window` positions (0: all).
        """
        for call in plan.reads:
            rows = slice(call.first_row, call.end_row)
            attend = self._decode if call.decode else self._prefill
            out[rows] = attend(call, layer, call.masks[window], queries[rows])

    def _gather(self, call: _Read, layer: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each `[sequences, kv_heads, keys, head_dim]` (strided)."""
        both = self._pool.gather(call.page_rows[layer], dtype).view(call.sequences, 2, -1, self._pool.kv_heads, self._pool.head_dim)
        both = both[:, :, : call.keys]
        return both[:, 0].transpose(1, 2), both[:, 1].transpose(1, 2)

    def _decode(self, call: _Read, layer: int, mask: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        keys, values = self._gather(call, layer, queries.dtype)
        group = self._query_heads // self._pool.kv_heads
        folded = queries.reshape(call.sequences, self._pool.kv_heads, group, self._pool.head_dim)
        padded_rows = self._rules.pad_queries(group)
        if padded_rows > group:
            folded = F.pad(folded, (0, 0, 0, padded_rows - group))
        out = F.scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=self._scale)
        return out[:, :, :group].reshape(call.sequences, -1)

    def _prefill(self, call: _Read, layer: int, mask: torch.Tensor, queries: torch.Tensor) -> torch.Tensor:
        keys, values = self._gather(call, layer, queries.dtype)
        count = queries.shape[0]
        if mask.shape[0] > count:
            queries = F.pad(queries, (0, 0, 0, 0, 0, mask.shape[0] - count))
        out = F.scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, attn_mask=mask, enable_gqa=True, scale=self._scale
        )
        return out[0].transpose(0, 1)[:count].reshape(count, -1)


def _first_layer_slots(span: Span, pool: KvPool) -> list[int]:
    stride = pool.layers * 2 * pool.page_size
    size = pool.page_size
    return [span.pages[position // size] * stride + position % size for position in range(span.start, span.end)]


def _groups_of_like_length(spans: Sequence[Span]) -> list[list[Span]]:
    """Splits spans, sorted by length, so that padding to the longest of a group adds no whole key block."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and (groups[-1][0].end - 1) // KEY_BLOCK == (span.end - 1) // KEY_BLOCK:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _decode_read(row: int, spans: Sequence[Span], pool: KvPool, rules: Rules, windows: frozenset[int], dtype: torch.dtype) -> _Read:
    keys = rules.pad_keys(spans[-1].end)
    last = torch.tensor([[span.end - 1] for span in spans], device=pool.device)
    masks = {window: mask[:, None, None, :] for window, mask in causal_masks(last, keys, dtype, windows)}
    return _Read(row, row + len(spans), _page_rows(spans, keys, pool), len(spans), keys, True, masks)


def _prefill_read(row: int, tile: Span, pool: KvPool, rules: Rules, windows: frozenset[int], dtype: torch.dtype) -> _Read:
    keys = rules.pad_keys(tile.end)
    rows = torch.arange(tile.start, tile.start + rules.pad_queries(tile.count), device=pool.device)[:, None]
    masks = dict(causal_masks(rows, keys, dtype, windows))
    return _Read(row, row + tile.count, _page_rows([tile], keys, pool), 1, keys, False, masks)


def causal_masks(positions: torch.Tensor, keys: int, dtype: torch.dtype, windows: frozenset[int]) -> list[tuple[int, torch.Tensor]]:
    """For each window an additive mask `[rows, keys]` for queries at `positions` `[rows, 1]`."""
    columns = torch.arange(keys, device=positions.device)[None]
    result = []
    for window in windows:
        hidden = columns > positions
        if window:
            hidden |= columns <= positions - window
        result.append((window, torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)))
    return result


def _page_rows(spans: Sequence[Span], keys: int, pool: KvPool) -> torch.Tensor:
    """Tables hold the pages that have keys, filled up with the first of them: masked, and never another sequence's bytes."""
    pages = -(-keys // pool.page_size)
    tables = []
    for span in spans:
        used = span.pages[: -(-span.end // pool.page_size)]
        tables.append([*used, *[used[0]] * (pages - len(used))])
    key_rows = torch.tensor(tables, dtype=torch.int64, device=pool.device)[:, None, :] * (2 * pool.layers)
    both = torch.cat((key_rows, key_rows + 1), dim=1).view(1, -1)
    return both + 2 * torch.arange(pool.layers, device=pool.device)[:, None]
