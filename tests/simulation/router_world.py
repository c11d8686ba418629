"""A router's world in memory: workers that follow a script, a model that is a hash, a fleet that is what the test says."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvrelay.errors import (
    ChecksumMismatchError,
    DrainingError,
    InternalError,
    KvRelayError,
    KvTransferError,
    LeaseExpiredError,
    OverloadedError,
    WorkerLostError,
)
from kvrelay.handle import HandleState, KvHandle, KvLayout, Lease, ModelIdentity, PeerLocation
from kvrelay.values import FinishReason, SamplingParams, StopConditions, Token, TransferStats, Usage, WorkerMarks
from services.router.admission import Admission, AdmissionLimits
from services.router.fleet import Fleet
from services.router.live_request import Patience
from services.router.orchestrator import Completed, GenerateEvent, Orchestrator, Started
from services.router.placement import Mode, Policy
from services.router.tokenization import Tokenizers
from services.router.validation import GenerateCommand, TokenPrompt
from services.runtime.clock import Clock
from services.runtime.ports import (
    DecodeAccepted,
    DecodeDone,
    DecodeEvent,
    DecodeToken,
    FirstToken,
    FleetSnapshot,
    Job,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    PrefillEvent,
    WorkerInfo,
    WorkerLoad,
)
from services.runtime.telemetry.tracing import Telemetry
from tests.simulation.virtual_time import LoopClock

LAYOUT = KvLayout(layers=2, kv_heads=2, head_dim=16, block_size=16, dtype="float32")
IDENTITY = ModelIdentity("tiny", "sha256:aa", "sha256:bb", "float32", "float32", "theta=10000", "native-1")
VOCAB = 300
END_TOKEN = 2


def worker(
    role: str,
    number: int = 0,
    *,
    incarnation: int = 1,
    identity: ModelIdentity = IDENTITY,
    layout: KvLayout = LAYOUT,
    state: str = "ready",
    max_context_tokens: int = 4096,
    load: WorkerLoad | None = None,
) -> WorkerInfo:
    """'prefill-0' and the like."""
    return WorkerInfo(
        worker_id=f"{role}-{number}",
        role=role,
        address=f"127.0.0.1:{7000 + number}",
        incarnation=incarnation,
        state=state,
        identity=identity,
        layout=layout,
        max_context_tokens=max_context_tokens,
        vocab_size=VOCAB,
        load=load or WorkerLoad(total_pages=1024, available_pages=1024),
    )


def answer_of(prompt: Sequence[int], sampling: SamplingParams, stop: StopConditions) -> list[int]:
    """What the model says: depends on (prompt, seed, index) only; the end token may come at any index."""
    ids: list[int] = []
    while len(ids) < stop.max_tokens:
        digest = hashlib.sha256(repr((tuple(prompt), sampling.seed, len(ids))).encode()).digest()
        ids.append(END_TOKEN if digest[0] < 16 and not stop.ignore_eos else 3 + digest[1])
        if ids[-1] == END_TOKEN:
            break
    return ids


def reason_of(ids: Sequence[int]) -> FinishReason:
    return FinishReason.STOP if ids[-1] == END_TOKEN else FinishReason.LENGTH


@dataclass(slots=True)
class Fault:
    """What goes wrong in one call: before event number `at` (0: before any) `error` is raised, or nothing ever comes again."""

    at: int
    error: Exception | None


@dataclass(slots=True)
class Call:
    """One call as a worker got it."""

    role: str
    worker_id: str
    job: Job
    handle: KvHandle | None
    timeout_s: float


@dataclass(slots=True)
class _HandedOver:
    """KV under way from one prefill to its taker."""

    complete: asyncio.Event = field(default_factory=asyncio.Event)
    failed: bool = False


class ScriptedWorkers:
    """`WorkersPort` in memory. `fault(call)` says what goes wrong, `pause(call)` how long each event takes."""

    def __init__(
        self,
        clock: Clock,
        fault: Callable[[Call], Fault | None] = lambda call: None,
        pause: Callable[[Call], float] = lambda call: 0.01,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.calls: list[Call] = []
        self.open_calls = 0
        self.fetches = 0
        self._clock = clock
        self._fault = fault
        self._pause = pause
        self._files = files or {}
        self._kv: dict[str, _HandedOver] = {}

    async def prefill(self, worker: WorkerInfo, job: Job, *, timeout_s: float) -> AsyncGenerator[PrefillEvent, None]:
        call = Call("prefill", worker.worker_id, job, None, timeout_s)
        step = self._enter(call)
        name = f"kvHandles/{len(self.calls):032x}"
        kv = self._kv[name] = _HandedOver()
        ids = answer_of(job.token_ids, job.sampling, job.stop)
        try:
            await step()
            yield PrefillAccepted(_handle(name, worker, job))
            start = self._clock.time_ns()
            await step()
            yield FirstToken(_token(0, ids[0]))
            kv.complete.set()
            marks = WorkerMarks(prefill_start=start, prefill_end=self._clock.time_ns())
            await step()
            yield PrefillDone(reason_of(ids) if len(ids) == 1 else None, Usage(len(job.token_ids), 0, 1), marks)
        finally:
            kv.failed = not kv.complete.is_set()
            kv.complete.set()
            self.open_calls -= 1

    async def decode(self, worker: WorkerInfo, job: Job, handle: KvHandle | None, *, timeout_s: float) -> AsyncGenerator[DecodeEvent, None]:
        call = Call("decode", worker.worker_id, job, handle, timeout_s)
        step = self._enter(call)
        ids = answer_of(job.token_ids, job.sampling, job.stop)
        stats, ready = None, 0
        try:
            await step()
            yield DecodeAccepted(0)
            start = self._clock.time_ns()
            if handle is not None:
                kv = self._kv[handle.name]
                await kv.complete.wait()
                if kv.failed:
                    raise KvTransferError("the holder went away")
                await step()
                stats, ready = TransferStats(kv_bytes=len(job.token_ids) * 64, blocks=1, transport="grpc"), self._clock.time_ns()
                yield KvReady(stats)
            prefill_end = ready
            decode_start = 0
            for index in range(0 if handle is None else 1, len(ids)):
                await step()
                if index == 0:
                    prefill_end = self._clock.time_ns()
                elif not decode_start:
                    decode_start = self._clock.time_ns()
                yield DecodeToken(_token(index, ids[index]))
            await step()
            marks = WorkerMarks(
                prefill_start=start if handle is None else 0,
                prefill_end=prefill_end,
                kv_ready=ready,
                decode_start=decode_start,
                end=self._clock.time_ns(),
            )
            yield DecodeDone(reason_of(ids), Usage(len(job.token_ids), 0, len(ids)), marks, stats)
        finally:
            self.open_calls -= 1

    async def tokenizer_files(self, worker: WorkerInfo, digest: str, *, timeout_s: float) -> Mapping[str, bytes]:
        self.fetches += 1
        await asyncio.sleep(0.01)
        return self._files

    def _enter(self, call: Call) -> Callable[[], asyncio.Future[None]]:
        self.calls.append(call)
        self.open_calls += 1
        fault, pause_s, done = self._fault(call), self._pause(call), 0

        async def step() -> None:
            nonlocal done
            await asyncio.sleep(pause_s)
            if fault is not None and done == fault.at:
                if fault.error is None:
                    await asyncio.Event().wait()
                else:
                    raise fault.error
            done += 1

        return step  # type: ignore[return-value]


class World:
    """One router over scripted workers, made inside a running (virtual) loop."""

    def __init__(
        self,
        workers: Iterable[WorkerInfo],
        *,
        mode: Mode = Mode.SPLIT,
        fault: Callable[[Call], Fault | None] = lambda call: None,
        pause: Callable[[Call], float] = lambda call: 0.01,
        limits: AdmissionLimits | None = None,
        patience: Patience | None = None,
        telemetry: Telemetry | None = None,
        files: Mapping[str, bytes] | None = None,
    ) -> None:
        self.clock = LoopClock()
        self.fleet = Fleet()
        self.fleet.apply(FleetSnapshot(list(workers), {}), self.clock.monotonic())
        self.workers = ScriptedWorkers(self.clock, fault, pause, files)
        self.admission = Admission(limits or AdmissionLimits(), self.clock)
        numbers = iter(range(10**6))
        self.router = Orchestrator(
            fleet=self.fleet,
            workers=self.workers,
            tokenizers=Tokenizers(self.workers),
            admission=self.admission,
            policy=Policy(mode),
            clock=self.clock,
            telemetry=telemetry or Telemetry.disabled(),
            patience=patience,
            draw_seed=lambda: 7,
            draw_id=lambda: f"r{next(numbers)}",
        )

    async def run(self, command: GenerateCommand, *, timeout_s: float = 600.0) -> list[GenerateEvent]:
        return [event async for event in self.router.generate(command, timeout_s=timeout_s)]

    def assert_idle(self) -> None:
        """Nothing of any request is left anywhere."""
        assert self.workers.open_calls == 0
        assert self.admission.in_flight == 0 and self.admission.waiting == 0
        for info in self.fleet.workers(self.clock.monotonic()):
            corrected = self.fleet.corrected_load(info.worker_id)
            assert corrected == info.load, f"{info.worker_id} still counts {corrected}"


def command(prompt: Sequence[int] = tuple(range(3, 35)), *, max_tokens: int = 8, seed: int = 1, ignore_eos: bool = True) -> GenerateCommand:
    return GenerateCommand(
        prompt=TokenPrompt(tuple(prompt)),
        sampling=SamplingParams(temperature=1.0, seed=seed),
        has_seed=True,
        stop=StopConditions(max_tokens=max_tokens, ignore_eos=ignore_eos),
        has_max_tokens=True,
    )


def expected(request: GenerateCommand) -> list[int]:
    assert isinstance(request.prompt, TokenPrompt)
    return answer_of(request.prompt.ids, request.sampling, request.stop)


def check_whole(events: Sequence[GenerateEvent], request: GenerateCommand) -> Completed:
    """The events are one complete, right answer; returns its end."""
    first, *tokens, last = events
    assert isinstance(first, Started) and isinstance(last, Completed)
    check_tokens(tokens, request)
    ids, completion = expected(request), last.completion
    assert len(tokens) == len(ids)
    assert completion.finish_reason is reason_of(ids)
    assert isinstance(request.prompt, TokenPrompt)
    assert completion.usage == Usage(len(request.prompt.ids), 0, len(ids))
    check_timings(completion.timings)
    return last


def check_tokens(tokens: Sequence[object], request: GenerateCommand) -> None:
    """A beginning of the right answer, without repetition and gap."""
    ids = expected(request)
    seen = [(token.index, token.token_id) for token in tokens if isinstance(token, Token)]
    assert seen == list(enumerate(ids[: len(seen)]))
    assert len(seen) == len(tokens)


def check_timings(timings: object) -> None:
    phases = [
        getattr(timings, name)
        for name in ("admission_s", "route_s", "prefill_queue_s", "prefill_s", "exposed_transfer_s", "decode_queue_s", "decode_s")
    ]
    total = getattr(timings, "total_s")  # noqa: B009
    assert min(phases) >= 0
    assert abs(sum(phases) - total) < 1e-6
    assert 0 <= getattr(timings, "ttft_s") <= total  # noqa: B009


def some_error(draw: random.Random) -> KvRelayError | None:
    """A failure that another worker may mend; None is silence."""
    return draw.choice(
        [
            WorkerLostError("killed"),
            OverloadedError("full", retry_after_s=1.0),
            DrainingError("going"),
            KvTransferError("broken off"),
            ChecksumMismatchError("flipped"),
            LeaseExpiredError("late"),
            InternalError("bug"),
            None,
        ]
    )


def _token(index: int, token_id: int) -> Token:
    return Token(index, token_id, f"<{token_id}>")


def _handle(name: str, holder: WorkerInfo, job: Job) -> KvHandle:
    return KvHandle(
        name=name,
        state=HandleState.WRITING,
        identity=IDENTITY,
        layout=LAYOUT,
        token_start=0,
        token_end=len(job.token_ids),
        block_hashes=(),
        prompt_digest=b"\0" * 32,
        segments=(),
        lease=Lease("secret", 10.0),
        incarnation=holder.incarnation,
        locations=(PeerLocation(holder.address),),
    )
