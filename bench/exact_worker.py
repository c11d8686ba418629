"""One engine core over a real model, driven by hand, and what happened in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvrelay.values import Token
from services.engine.api import Admitted, EngineEvent, EngineRequest, Failed, Finished, PrefillProgress, TokenDrawn
from services.engine.device_model import DeviceModel
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.core import EngineCore, StepEntry
from services.engine.scheduling.scheduler import SchedulerLimits
from services.engine.scheduling.step_cost import StepShape
from services.engine.scheduling.validation import RequestLimits


@dataclass(slots=True)
class Counts:
    """What happened on the way to the answers: proof that a run was as crowded as it was meant to be."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0
    steps: int = 0
    shared_steps: int = 0
    """Steps of more than one request."""
    chunks: int = 0
    """Pieces in which prompts were computed."""
    hits: int = 0
    """Requests that found a prefix in a cache."""
    cached_tokens: int = 0
    imported: int = 0
    """Requests whose KV, or the first blocks of it, came from another worker."""
    evicted_blocks: int = 0
    preemptions: int = 0

    def add(self, other: Counts) -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


class MeteredModel(DeviceModel):
    """Counts steps."""

    def __init__(self, model: LlamaModel, pool: KvPool, counts: Counts) -> None:
        super().__init__(model, pool)
        self._counts = counts

    def forward(self, entries: Sequence[StepEntry]) -> torch.Tensor:
        self._counts.steps += 1
        self._counts.shared_steps += len(entries) > 1
        return super().forward(entries)


class SteadyCost:
    """What policy dynamic goes by: a millisecond a token, whatever was measured."""

    def predict_s(self, step: StepShape) -> float:
        return (step.prefill_tokens + step.decode_seqs) / 1000

    def observe(self, step: StepShape, seconds: float) -> None:
        pass


class Worker:
    """One engine core over a model and a pool, driven by hand. Its clock counts."""

    def __init__(self, model: LlamaModel, text: TokenBytes, pool: KvPool, limits: SchedulerLimits) -> None:
        self.pool = pool
        self.counts = Counts()
        self.core = EngineCore(
            MeteredModel(model, pool, self.counts),
            text,
            BlockManager(pool.num_pages, pool.page_size, b"exact runs"),
            limits,
            RequestLimits(model.config.vocab_size, model.config.max_positions, pool.num_pages * pool.page_size),
            model.config.eos_ids,
            SteadyCost(),
        )
        self.events: dict[str, list[EngineEvent]] = {}
        self._clock = itertools.count().__next__

    def add(self, request: EngineRequest) -> None:
        self.core.add(request, self._clock())
        self.events[request.request_id] = []

    def resume(self, request_id: str, imported_tokens: int, first_token: int | None) -> None:
        self.counts.imported += 1
        self.core.resume(request_id, imported_tokens, first_token, self._clock())

    def step(self) -> None:
        """Raises `RuntimeError` for a request that fails, or when all that is left waits for nothing."""
        if self.events and not self.core.has_work and not any(self.ended(name) for name in self.events):
            raise RuntimeError(f"{len(self.events)} requests can never go on")
        for name, event in self.core.step(self._clock):
            if isinstance(event, Failed):
                raise RuntimeError(f"request {name} failed: {event.error}")
            self.counts.chunks += isinstance(event, PrefillProgress)
            if isinstance(event, Admitted) and event.cached_tokens:
                self.counts.hits += 1
                self.counts.cached_tokens += event.cached_tokens
            self.events[name].append(event)
        self.counts.preemptions = self.core.preemptions
        self.counts.evicted_blocks += len(self.core.take_block_changes().removed)

    def ended(self, request_id: str) -> bool:
        events = self.events[request_id]
        return bool(events) and isinstance(events[-1], Finished)

    def admitted(self, request_id: str) -> Admitted | None:
        return next((event for event in self.events[request_id] if isinstance(event, Admitted)), None)

    def tokens(self, request_id: str) -> list[Token]:
        return [event.token for event in self.events[request_id] if isinstance(event, TokenDrawn)]

    def release(self, request_id: str) -> None:
        del self.events[request_id]
        self.core.release(request_id)

    def check_empty(self) -> None:
        """Raises AssertionError if a page is still held."""
        self.core.check_integrity()
        assert not self.events and self.core.load().held_pages == 0
