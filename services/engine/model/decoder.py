"""The arithmetic of one model behind one small interface: torch's operators or this suite's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from services.engine.model.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class ForwardEntry:
    """The next tokens of one sequence."""

    token_ids: Sequence[int]
    """Tokens to compute now, at least one."""
    start: int
    """Absolute position of the first; the KV of all earlier positions is in `pages`."""
    pages: Sequence[int]
    """Page table of the sequence; holds at least `start + len(token_ids)` tokens."""
    sample: bool
    """Whether the logits of the last token are wanted."""

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.token_ids)


class Decoder(Protocol):
    """Computes tokens. Made for one model, owned by one thread.

    On CPUs a row's bits depend on its own sequence only: not on the other entries, nor on how a prompt was cut into chunks.
    """

    @property
    def name(self) -> str:
        """What computes, for people: 'torch', 'native avx512-vnni'."""
        ...

    @property
    def numerics(self) -> str:
        """What decides its last bits, for the model's identity: decoders of equal numerics give equal bits wherever they run."""
        ...

    def forward(self, entries: Sequence[ForwardEntry], pool: KvPool) -> torch.Tensor:
        """Computes all tokens, writes their KV into the pool, rounded once to its dtype (halves to even), and reads it back from there.

        Returns float32 logits `[entries with sample, vocab]` in entry order. `LlamaModel.forward` has checked the entries, of which
        there is at least one and no two of the same sequence, and has cleared the pages that they begin to fill. Blocks.
        """
        ...
