"""Serves requests over workers: admission, tokenising, placement, then the legs, until the last token."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from opentelemetry.trace import Span

from kvrelay.errors import DeadlineExceededError
from kvrelay.values import Completion, Token
from services.router import tracing
from services.router.admission import Admission
from services.router.fleet import Fleet
from services.router.live_request import AdmittedRequest, LiveRequest, Patience
from services.router.placement import Policy, PromptShape
from services.router.timeline import RouterMarks, timings
from services.router.tokenization import Tokenizers
from services.router.validation import GenerateCommand, check_against_model, check_command, fit
from services.runtime.clock import Clock
from services.runtime.ports import Job, WorkersPort
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import Telemetry, current


@dataclass(frozen=True, slots=True)
class Started:
    """The request was admitted here, and a worker has accepted it."""

    request_id: str
    model: str
    prompt_tokens: int
    trace_id: str


@dataclass(frozen=True, slots=True)
class Completed:
    """The end, with why the last plan was chosen."""

    completion: Completion
    decision: str


GenerateEvent = Started | Token | Completed


class Orchestrator:
    """Serves many requests at once; belongs to one event loop."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        workers: WorkersPort,
        tokenizers: Tokenizers,
        admission: Admission,
        policy: Policy,
        clock: Clock,
        telemetry: Telemetry,
        patience: Patience | None = None,
        draw_seed: Callable[[], int] = lambda: secrets.randbits(63),
        draw_id: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self._fleet = fleet
        self._workers = workers
        self._tokenizers = tokenizers
        self._admission = admission
        self._policy = policy
        self._clock = clock
        self._telemetry = telemetry
        self._patience = patience or Patience()
        self._draw_seed = draw_seed
        self._draw_id = draw_id

    async def generate(self, command: GenerateCommand, *, timeout_s: float) -> AsyncGenerator[GenerateEvent, None]:
        """`Started`, then `Token`s with contiguous indexes, then `Completed`. Closing it early ends every leg before it returns.

        Raises `InvalidRequestError`s, `OverloadedError`, `DrainingError` and `NoWorkerError` before `Started`, those of workers
        that refuse included; `DeadlineExceededError` once `timeout_s` has passed, and what the last try failed of, at any time.
        """
        received_ns = self._clock.time_ns()
        deadline = asyncio.get_running_loop().time() + timeout_s
        sent_ns: list[int] = []
        with tracing.generate_span(self._telemetry, command, received_ns) as span:
            async with AsyncExitStack() as place:
                async with _until(deadline):
                    request = await self._admit(command, place, span, deadline)
                async with self._live(request) as live:
                    live.begin()
                    started = Started(
                        command.request_id or request.job.request_id, request.revision.model, request.shape.tokens, tracing.trace_id(span)
                    )
                    told = False
                    while live.finish is None:
                        async with _until(deadline):
                            tokens = await live.advance()
                        if not told and (live.accepted or tokens):
                            told = True
                            yield started
                        for token in tokens:
                            sent_ns.append(self._clock.time_ns())
                            yield token
            finish, plan = live.finish, live.plan
            assert plan is not None, "a request has ended without ever having been placed"
            marks = RouterMarks(received_ns, request.admitted_ns, live.planned_ns, sent_ns[0], self._clock.time_ns())
            completion = Completion(
                finish.finish_reason,
                finish.usage,
                timings(marks, finish.prefill_marks, finish.decode_marks),
                finish.transfer,
                finish.path,
                tracing.trace_id(span),
            )
            tracing.note_completion(span, completion, plan, live.attempts, sent_ns)
            span.end(marks.end)
        yield Completed(completion, plan.decision)

    async def _admit(self, command: GenerateCommand, place: AsyncExitStack, span: Span, deadline: float) -> AdmittedRequest:
        """Everything that can refuse a request, before anything is started for it. The place is held by `place`."""
        with tracing.child(self._telemetry, span, names.SPAN_ADMISSION) as admission_span, current(admission_span):
            prompt = check_command(command)
            self._fleet.resolve_model(command.model)
            await place.enter_async_context(self._admission.admitted())
            # The fleet may have changed in line.
            model = self._fleet.resolve_model(command.model)
            revision = self._fleet.choose_revision(model, self._policy.mode, self._clock.monotonic())
            limits = self._fleet.limits(revision)
            check_against_model(command, limits)
            sources = [worker for role in ("decode", "prefill") for worker in self._fleet.ready(revision, role)]
            encoded = await self._tokenizers.encode(prompt, revision, sources, command.cache_salt)
            stop = fit(command, len(encoded.token_ids), limits)
            sampling = command.sampling if command.has_seed else replace(command.sampling, seed=self._draw_seed())
            drawn = self._draw_id()
            job = Job(
                # Clients may repeat their ids; workers need them unique.
                request_id=f"{command.request_id}-{drawn}" if command.request_id else drawn,
                fingerprint=revision.fingerprint,
                token_ids=encoded.token_ids,
                sampling=sampling,
                stop=stop,
                cache_salt=command.cache_salt,
            )
            tracing.note_request(span, job, model)
            shape = PromptShape(len(encoded.token_ids), stop.max_tokens, revision.layout.block_size)
            admitted_ns = self._clock.time_ns()
            admission_span.end(admitted_ns)
            return AdmittedRequest(revision, encoded, shape, job, deadline, span, admitted_ns)

    def _live(self, request: AdmittedRequest) -> LiveRequest:
        return LiveRequest(
            request,
            fleet=self._fleet,
            workers=self._workers,
            policy=self._policy,
            patience=self._patience,
            clock=self._clock,
            telemetry=self._telemetry,
        )


@asynccontextmanager
async def _until(deadline: float) -> AsyncIterator[None]:
    """Raises `DeadlineExceededError` where the loop's clock passes `deadline` inside."""
    try:
        async with asyncio.timeout_at(deadline) as timeout:
            yield
    except TimeoutError as late:
        if not timeout.expired():
            raise
        raise DeadlineExceededError("the request's deadline has passed") from late
