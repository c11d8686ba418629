"""The engine on the event loop: opens requests, delivers their events, and never blocks. The work is on the runner's thread."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from kvrelay.errors import ConfigError, InternalError, KvRelayError, ModelLoadError, OverloadedError, UnavailableError
from kvrelay.handle import KvLayout, ModelIdentity
from services.engine.api import Admitted, BlockChanges, EngineLoad, EngineRequest, Failed
from services.engine.checks.early import pages_in
from services.engine.checks.start import check_exactness
from services.engine.cost.coefficients import Floors
from services.engine.cost.learner import StepCostModel
from services.engine.cost.profile import Profile, ProfiledModel, Setup, read_profile
from services.engine.device_model import DeviceModel
from services.engine.model.identity import identity_of, layout_of, read_tokenizer_files
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import LlamaModel, load_model
from services.engine.model.quantization import SCHEMES
from services.engine.model.torch_decoder import TorchDecoder
from services.engine.runner import Add, Release, Resume, Runner, RunnerOptions, StepReport
from services.engine.sampling.detokenizer import TokenBytes
from services.engine.scheduling.block_manager import BlockChangeLog, BlockManager
from services.engine.scheduling.core import EngineCore
from services.engine.scheduling.schedule_log import ScheduleLog
from services.engine.scheduling.scheduler import RETRY_AFTER_S, SchedulerLimits
from services.engine.scheduling.validation import RequestLimits
from services.engine.settings import EngineSettings
from services.engine.stream import Stream
from services.runtime.offloop import assert_off_loop
from services.runtime.processes.machine import this_machine

log = logging.getLogger(__name__)

_STOPPED = "the engine has stopped"


class Engine:
    """Implements `EnginePort`. Create with `start`, end with `stop`; all methods belong to the loop that started it."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._runner = Runner(self._build, self._deliver, RunnerOptions(cpus=settings.cpus, debug=settings.debug))
        self._streams: dict[str, Stream] = {}
        """Open streams by key."""
        self._unadmitted: set[str] = set()
        """Keys of requests that wait for pages, or whose release the thread has not seen yet."""
        self._keys = itertools.count()
        self._posted = self._handled = 0
        self._idle = True
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._stopped = False
        self._over = asyncio.Event()
        self._load = EngineLoad()
        self._changes = BlockChangeLog()
        self._core: EngineCore
        self._identity: ModelIdentity
        self._layout: KvLayout
        self._pool: KvPool
        self._limits: RequestLimits
        self._tokenizer_files: Mapping[str, bytes]
        self._eos_ids: tuple[int, ...]

    @classmethod
    async def start(cls, settings: EngineSettings) -> Engine:
        """Loads the model on the runner's thread. Raises `ModelLoadError` or `ConfigError`."""
        engine = cls(settings)
        try:
            engine._core = await engine._runner.start()
        except BaseException:
            await engine._runner.stop(timeout_s=30.0)
            raise
        engine._load = engine._core.load()
        return engine

    async def stop(self, timeout_s: float = 30.0) -> None:
        """Ends the thread after its present step; open requests fail with `UnavailableError`."""
        self._fail_all(UnavailableError, _STOPPED)
        if not await self._runner.stop(timeout_s):
            raise InternalError(f"the engine thread did not end within {timeout_s} s")

    @property
    def identity(self) -> ModelIdentity:
        return self._identity

    @property
    def layout(self) -> KvLayout:
        return self._layout

    @property
    def pages(self) -> KvPool:
        """The pool's bytes, lent to the relay."""
        return self._pool

    @property
    def max_context_tokens(self) -> int:
        return self._limits.max_context_tokens

    @property
    def vocab_size(self) -> int:
        return self._limits.vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """The model's end tokens."""
        return self._eos_ids

    @property
    def healthy(self) -> bool:
        """False once the thread has ended."""
        return not self._stopped

    def tokenizer_files(self) -> Mapping[str, bytes]:
        """File name to content; what `identity.tokenizer_digest` covers."""
        return self._tokenizer_files

    @asynccontextmanager
    async def open(self, request: EngineRequest) -> AsyncIterator[Stream]:
        """See `EnginePort.open`; raises `UnavailableError` once the engine has stopped.

        A request may be tried again under its id while an earlier attempt is still being released.
        """
        stream = self._submit(request)
        try:
            yield stream
        finally:
            self._release(stream)

    def load(self) -> EngineLoad:
        """As of the last step."""
        return self._load

    def take_block_changes(self) -> BlockChanges:
        """Net changes of the prefix cache since the last call."""
        return self._changes.take()

    def check_integrity(self) -> None:
        """See `EnginePort`; while a step runs only the page counts are checked, for the core is the thread's then."""
        load = self._load
        assert load.free_pages + load.cached_pages + load.held_pages == load.total_pages
        if self._at_rest:
            self._core.check_integrity()

    async def wait_ended(self) -> None:
        """Returns when the engine takes no more requests: stopped, or its thread has died of an error."""
        await self._over.wait()

    async def wait_idle(self) -> None:
        """Returns when every message is handled and no request can go on (held ones, and finished ones not released, may be open)."""
        while not self._at_rest and not self._stopped:
            waiter = asyncio.get_running_loop().create_future()
            self._idle_waiters.append(waiter)
            await waiter

    @property
    def _at_rest(self) -> bool:
        """The thread sleeps, and will until the next message: only then may the loop look at its core."""
        return self._idle and self._handled == self._posted

    def _submit(self, request: EngineRequest) -> Stream:
        if self._stopped:
            raise UnavailableError(_STOPPED)
        self._limits.check(request)
        if len(self._unadmitted) >= self._settings.max_waiting:
            raise OverloadedError(
                f"{len(self._unadmitted)} requests are waiting", retry_after_s=RETRY_AFTER_S, waiting=len(self._unadmitted)
            )
        # The thread may see a release later than the same request's next attempt here, so it tells attempts apart by a key.
        key = f"{request.request_id}#{next(self._keys)}"
        stream = Stream(key, request, self._resume)
        self._streams[key] = stream
        self._unadmitted.add(key)
        self._post(Add(replace(request, request_id=key), time.time_ns()))
        return stream

    def _resume(self, key: str, imported_tokens: int, first_token: int | None) -> None:
        self._post(Resume(key, imported_tokens, first_token, time.time_ns()))

    def _release(self, stream: Stream) -> None:
        """Only posts: the pages are free when the thread has handled it."""
        if self._streams.pop(stream.key, None) is not None:
            self._post(Release(stream.key))
        stream.close()

    def _post(self, message: Add | Resume | Release) -> None:
        if not self._stopped:
            self._posted += 1
            self._runner.post(message)

    def _deliver(self, report: StepReport) -> None:
        self._handled = report.messages
        self._idle = report.idle
        self._load = report.load
        self._changes.add(report.changes)
        for key, event in report.events:
            if isinstance(event, Admitted | Failed):
                self._unadmitted.discard(key)
            stream = self._streams.get(key)
            if stream is not None:
                stream.push(event)
        self._unadmitted.difference_update(report.released)
        if report.fatal:
            self._fail_all(InternalError, report.fatal)
        if self._at_rest:
            self._wake()

    def _fail_all(self, error: type[KvRelayError], message: str) -> None:
        self._stopped = True
        self._over.set()
        for stream in self._streams.values():
            stream.push(Failed(error(message)))
        self._wake()

    def _wake(self) -> None:
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _build(self) -> EngineCore:
        """On the runner's thread: everything that is slow or touches torch."""
        assert_off_loop("loading a model")
        settings = self._settings
        options = settings.check()
        scheduling = SchedulerLimits(
            settings.max_num_batched_tokens,
            settings.max_num_seqs,
            settings.max_waiting,
            settings.policy,
            settings.tbt_objective_ms,
            settings.prefill_order,
        )
        files = read_tokenizer_files(settings.model_path)
        token_bytes = TokenBytes(_tokenizer(files["tokenizer.json"]))
        profile = read_profile(Path(settings.profile).expanduser()) if settings.profile else None
        torch.set_num_threads(1)
        model = load_model(settings.model_path, options)
        if model.decoder.name == TorchDecoder.name:
            torch.set_num_threads(settings.threads)
        check_exactness(model, settings.exactness_check)
        config = model.config
        name = settings.model_name or settings.model_path.name
        self._identity = identity_of(
            settings.model_path,
            config,
            files,
            model=name,
            dtype=settings.dtype,
            kv_dtype=settings.kv_dtype,
            numerics=model.decoder.numerics,
            quantization=SCHEMES[settings.quantization],
        )
        self._layout = layout_of(config, settings.block_size, settings.kv_dtype)
        num_pages = settings.num_pages or pages_in(settings.kv_cache_bytes, self._layout.block_bytes)
        try:
            self._pool = KvPool(config, num_pages, settings.block_size, options.kv_dtype, options.device)
        except (RuntimeError, OSError, OverflowError) as error:  # torch's, and of a mapping: no memory, no such size
            raise ConfigError(
                f"a KV cache of {num_pages * self._layout.block_bytes} bytes cannot be allocated on {options.device}"
            ) from error
        context = min(settings.max_context_tokens or config.max_positions, config.max_positions)
        self._limits = RequestLimits(config.vocab_size, context, num_pages * settings.block_size)
        self._tokenizer_files = files
        self._eos_ids = config.eos_ids
        blocks = BlockManager(num_pages, settings.block_size, self._identity.fingerprint)
        schedule_log = ScheduleLog(Path(settings.explain_schedule), scheduling, blocks) if settings.explain_schedule else None
        log.info("%s is computed by %s with %d threads", name, model.decoder.name, settings.threads)
        return EngineCore(
            DeviceModel(model, self._pool),
            token_bytes,
            blocks,
            scheduling,
            self._limits,
            config.eos_ids,
            self._cost(profile, model),
            schedule_log,
        )

    def _cost(self, profile: Profile | None, model: LlamaModel) -> StepCostModel:
        """Where the step cost begins; `ConfigError` if the profile is of a model of other sizes."""
        settings = self._settings
        floors = Floors.of(model.config, dtype=settings.dtype, kv_dtype=settings.kv_dtype, quantization=settings.quantization)
        if profile is None:
            return StepCostModel(floors.guess(), measured=False)
        profile.check_sizes(floors)
        setup = Setup(model.decoder.name, settings.device, settings.threads, settings.block_size, torch.__version__)
        for difference in profile.differences(ProfiledModel.of(self._identity), setup, this_machine()):
            log.warning("the profile tells of another setup, until steps correct it: %s", difference)
        return StepCostModel(profile.coefficients, measured=True)


def _tokenizer(content: bytes) -> Tokenizer:
    try:
        return Tokenizer.from_str(content.decode())
    except Exception as error:
        # The library raises plain `Exception`.
        raise ModelLoadError(f"tokenizer.json cannot be read: {error}") from error
