"""No event loop ever computes: what does refuses to run on one, and a hand-over on real engines runs all of it elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import google_crc32c
import pytest
import torch
from tokenizers import Tokenizer

from kvrelay import hashing
from kvrelay.handle import KvLayout, KvSegment
from kvrelay.values import ChatMessage, SamplingParams, StopConditions
from services.decode.decoder import Decoder
from services.engine.api import EngineRequest
from services.engine.device_model import DeviceModel
from services.engine.engine import Engine
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, load_model
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.block_manager import BlockManager
from services.engine.scheduling.core import EngineCore, StepEntry
from services.engine.scheduling.scheduler import SchedulerLimits
from services.engine.scheduling.validation import RequestLimits
from services.engine.settings import EngineSettings
from services.kvstore.memory import verified_block
from services.relay import copying
from services.router import tokenization
from services.router.fleet import Revision
from services.runtime.offloop import run_off_loop
from services.runtime.ports import Job
from services.worker import host
from services.worker.prefix import PrefixExchange
from services.worker.settings import WorkerSettings
from tests.integration.workers.test_prefill_and_decode import local, pair, split

DATA = b"x" * 64
LAYOUT = KvLayout(2, 2, 16, 16, "float32")
BLOCK_BYTES = 32 + 4 * 16
"""What is hashed for each block of a prompt."""


@dataclass
class Rig:
    """The parts of the services that compute, bare."""

    folder: Path
    model: DeviceModel
    core: EngineCore
    tokenizer: tokenization.ModelTokenizer
    files: dict[str, bytes]
    engine: Any
    """As much of an engine as hashing a job's prompt needs."""
    job: Job


@pytest.fixture(scope="module")
def rig(tiny_model: Path) -> Rig:
    model = load_model(tiny_model)
    device = DeviceModel(model, KvPool(model.config, 8))
    tokenizer = Tokenizer.from_file(str(tiny_model / "tokenizer.json"))
    core = EngineCore(
        device,
        TokenBytes(tokenizer),
        BlockManager(8, 16, bytes(32)),
        SchedulerLimits(),
        RequestLimits(model.config.vocab_size, 128, 128),
        model.config.eos_ids,
    )
    files = {file.name: file.read_bytes() for file in tiny_model.glob("tokenizer*")}
    engine = SimpleNamespace(identity=SimpleNamespace(fingerprint=bytes(32)), layout=LAYOUT)
    job = Job("job", bytes(32), tuple(range(3, 43)), SamplingParams(), StopConditions())
    return Rig(tiny_model, device, core, tokenization.ModelTokenizer(files), files, engine, job)


def _decoder(rig: Rig) -> Decoder:
    nothing: Any = None
    return Decoder(rig.engine, nothing, nothing, nothing, nothing)


def _row() -> torch.Tensor:
    return torch.zeros(300)


def _revision() -> Revision:
    return Revision("tiny", bytes(32), LAYOUT, "sha256:0")


SEGMENT = KvSegment(0, 1, len(DATA), google_crc32c.value(DATA))
ENTRY_POINTS: dict[str, Callable[[Rig], object]] = {
    "a forward pass": lambda rig: rig.model.forward([StepEntry([5, 6], 0, [0], sample=True)]),
    "drawing a token": lambda rig: rig.model.sample(_row(), SamplingParams(), index=0, prompt_ids=[5], output_ids=[], blocked_ids=()),
    "loading a model": lambda rig: Engine(EngineSettings(rig.folder, num_pages=4))._build(),
    "looking for a model": lambda rig: host._engine_settings(WorkerSettings(model=str(rig.folder))),
    "hashing an engine's prompt": lambda rig: rig.core.add(EngineRequest("one", range(3, 43), stop=StopConditions(max_tokens=8)), 0),
    "hashing the store's prompt": lambda rig: PrefixExchange(rig.engine, None)._hash(rig.job),
    "hashing a handle's prompt": lambda rig: _decoder(rig)._hash(rig.job),
    "hashing a routed prompt": lambda rig: tokenization._hashed(range(3, 43), _revision(), ""),
    "hashing a tokenizer": lambda rig: tokenization._checked(rig.files, hashing.tokenizer_digest(rig.files), "decode-0"),
    "loading a tokenizer": lambda rig: tokenization.ModelTokenizer(rig.files),
    "tokenising": lambda rig: rig.tokenizer.encode_text("the sea"),
    "tokenising a conversation": lambda rig: rig.tokenizer.encode_chat([ChatMessage("user", "the sea")]),
    "rendering a chat template": lambda rig: rig.tokenizer.render([ChatMessage("user", "the sea")]),
    "copying pages out": lambda rig: copying.gather([memoryview(DATA)]),
    "a checksum": lambda rig: copying.checksum([DATA]),
    "verifying a segment": lambda rig: copying.verify(SEGMENT, [DATA]),
    "copying a segment in": lambda rig: copying.land(SEGMENT, [DATA], [memoryview(bytearray(DATA))]),
    "verifying a store's block": lambda rig: verified_block(SEGMENT, [DATA]),
}


@pytest.mark.parametrize("what", ENTRY_POINTS)
async def test_what_computes_refuses_to_run_on_an_event_loop(rig: Rig, what: str) -> None:
    with pytest.raises(AssertionError, match="on the event loop"):
        ENTRY_POINTS[what](rig)
    await run_off_loop(ENTRY_POINTS[what], rig)


class Watch:
    """Counts calls by where they ran."""

    def __init__(self) -> None:
        self.elsewhere: Counter[str] = Counter()
        self.on_a_loop: Counter[str] = Counter()

    def __call__(self, what: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (self.elsewhere if asyncio._get_running_loop() is None else self.on_a_loop)[what] += 1
        return fn(*args, **kwargs)


async def test_a_hand_over_computes_nothing_on_the_event_loop(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the assertions cover or miss: the libraries themselves are watched, below everything of ours."""
    watch = Watch()

    def sha256(data: bytes = b"") -> Any:
        return watch("prompt hash" if len(data) >= BLOCK_BYTES else "sha256 of little", real.sha256, data)

    real = hashlib
    monkeypatch.setattr(hashing, "hashlib", SimpleNamespace(sha256=sha256))
    forward = LlamaModel.forward
    monkeypatch.setattr(LlamaModel, "forward", lambda *args: watch("forward", forward, *args))
    monkeypatch.setattr(copying, "google_crc32c", SimpleNamespace(extend=partial(watch, "crc32c", google_crc32c.extend)))
    monkeypatch.setattr(torch, "tensor", partial(watch, "torch", torch.tensor))

    async with pair(tiny_model) as both:
        job = both.job(prompt=150)
        assert (await split(both, job))[0] == await local(both, job)
    assert not set(watch.on_a_loop) - {"sha256 of little"}, watch.on_a_loop
    assert {"forward", "crc32c", "torch", "prompt hash"} <= set(watch.elsewhere), watch.elsewhere
