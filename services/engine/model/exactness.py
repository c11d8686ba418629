"""When torch gives a token the same numbers whoever shares its batch: every rule about that, in one place.

Split, colocated, cold, cached and resumed runs of a prompt must give the same tokens. That needs each row's bits to be the
same whether it is computed alone or among others, in chunks of any length, on a computed or an imported prefix. CPU kernels
choose other summation orders for other shapes; padding keeps them within one class of shapes. The classes were measured bit
for bit on AVX512 and on AVX2; `checks.exactness.violations` measures whole decoders again on the machine it runs on, and a test
holds each operator. They hold in float32, for one torch thread a process, and between machines of one kind only. Int8 linears
need no rule: their integer sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KEY_BLOCK = 512
"""Keys that torch's CPU attention sums in one matrix product."""

_AVX2_TAILS = (64, 128, 192, 384, 512)
"""Sums over 193 to 383 keys are split elsewhere than longer and shorter ones."""


@dataclass(frozen=True, slots=True)
class Rules:
    """How to shape operators so that a row keeps its bits."""

    linear_rows: int
    """A linear's input has at least this many rows."""
    query_rows: int
    """Query rows of an attention call are padded to a multiple of this."""
    key_tails: tuple[int, ...]
    """Attention sums keys in blocks of `KEY_BLOCK`; the last block is padded (masked) to one of these sizes, ascending."""
    pack_linear: bool
    """Linears run in oneDNN on weights it has reordered once: up to twice as fast for few rows, and alike for two rows or more."""

    def pad_rows(self, rows: int) -> int:
        """Rows that a linear should be given for `rows` real ones."""
        return max(rows, self.linear_rows)

    def pad_queries(self, rows: int) -> int:
        """Query rows that an attention call should be given for `rows` real ones."""
        return round_up(rows, self.query_rows)

    def pad_keys(self, keys: int) -> int:
        """Keys that an attention call should be given for `keys` real ones."""
        blocks, tail = divmod(keys, KEY_BLOCK)
        return blocks * KEY_BLOCK + (next(size for size in self.key_tails if size >= tail) if tail else 0)


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def rules_for(device: torch.device) -> Rules:
    """The rules for this process's CPU, or the plain ones (no promise of equal bits) for another device."""
    if device.type != "cpu":
        return Rules(linear_rows=1, query_rows=1, key_tails=tuple(range(16, KEY_BLOCK + 1, 16)), pack_linear=False)
    pack: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    rows = 2 if pack else 16
    if torch.backends.cpu.get_cpu_capability() == "AVX2":
        return Rules(linear_rows=rows, query_rows=4, key_tails=_AVX2_TAILS, pack_linear=pack)
    return Rules(linear_rows=rows, query_rows=16, key_tails=(KEY_BLOCK,), pack_linear=pack)
