"""The engine core's `ModelPort` over the real model, its pool and sampler."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from kvrelay.values import SamplingParams
from services.engine.model.decoder import ForwardEntry
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel
from services.engine.sampling.sampler import SampledToken, sample
from services.engine.scheduling.core import StepEntry
from services.runtime.offloop import assert_off_loop


class DeviceModel:
    """One model and the KV pool it writes. Owned by the runner thread; the relay writes only into held requests' pages."""

    def __init__(self, model: LlamaModel, pool: KvPool) -> None:
        self.model = model
        self.pool = pool

    def forward(self, entries: Sequence[StepEntry]) -> torch.Tensor:
        """The logits are in host memory: copied together, and their step has ended when its time is taken."""
        assert_off_loop("a forward pass")
        wanted = [ForwardEntry(entry.token_ids, entry.start, entry.pages, entry.sample) for entry in entries]
        return self.model.forward(wanted, self.pool).cpu()

    def sample(
        self,
        row: torch.Tensor,
        params: SamplingParams,
        *,
        index: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        blocked_ids: Collection[int],
    ) -> SampledToken:
        assert_off_loop("drawing a token")
        return sample(row, params, index=index, prompt_ids=prompt_ids, output_ids=output_ids, blocked_ids=blocked_ids)
