"""One admitted request while it runs: carries out what its state machine decides."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import TracebackType

from opentelemetry.trace import Span

from kvrelay.errors import KvRelayError
from kvrelay.handle import KvHandle
from kvrelay.values import Token
from services.router import tracing
from services.router.fleet import Fleet, Revision
from services.router.legs import Legs
from services.router.load import Dispatch
from services.router.placement import UNRESTRICTED, Plan, Policy, PromptShape, Restriction, Split, place
from services.router.request import (
    CancelLeg,
    Emit,
    Event,
    Fail,
    Finish,
    Leg,
    Planned,
    Replan,
    RequestMachine,
    Role,
    Settle,
    SettleTimeout,
    StartLeg,
    Unplaceable,
)
from services.router.tokenization import EncodedPrompt
from services.runtime.clock import Clock
from services.runtime.ports import Job, WorkersPort
from services.runtime.telemetry import names
from services.runtime.telemetry.tracing import Telemetry, current

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Patience:
    """How much a request is worth."""

    max_tries: int = 3
    """Plans it gets at most."""
    accept_timeout_s: float = 15.0
    """What a prefill worker gets to accept a job."""
    settle_timeout_s: float = 1.0
    """What prefill's last word is waited for once decode has ended: it only completes the statistics."""


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """Everything a plan and a job need."""

    revision: Revision
    prompt: EncodedPrompt
    shape: PromptShape
    job: Job
    deadline: float
    """On the loop's clock."""
    span: Span
    admitted_ns: int
    """When it was; nanoseconds since the epoch."""


class LiveRequest:
    """Enter, `begin`, then `advance` until `finish` is set. Leaving it ends every leg, at once."""

    def __init__(
        self,
        request: AdmittedRequest,
        *,
        fleet: Fleet,
        workers: WorkersPort,
        policy: Policy,
        patience: Patience,
        clock: Clock,
        telemetry: Telemetry,
    ) -> None:
        self._request = request
        self._fleet = fleet
        self._policy = policy
        self._patience = patience
        self._clock = clock
        self._telemetry = telemetry
        self._machine = RequestMachine(max_tries=patience.max_tries)
        self._legs = Legs(workers, fleet, clock, accept_timeout_s=patience.accept_timeout_s)
        self._dispatches: dict[Leg, Dispatch] = {}
        self._settling: Leg | None = None
        self._settle_at = math.inf
        self.plan: Plan | None = None
        """Of the present try."""
        self.planned_ns = 0
        """When the first plan was made, nanoseconds since the epoch."""
        self.finish: Finish | None = None

    @property
    def attempts(self) -> int:
        return self._machine.attempt

    @property
    def accepted(self) -> bool:
        """Whether a worker has taken it: until then a client may as well ask again."""
        return self._machine.accepted

    async def __aenter__(self) -> LiveRequest:
        await self._legs.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self._legs.__aexit__(kind, error, trace)
        finally:
            self._close_dispatches()

    def begin(self) -> None:
        """Plans and starts the first leg. Raises `NoWorkerError`."""
        self._perform(self._machine.handle(Planned(self._place(UNRESTRICTED))))

    async def advance(self) -> list[Token]:
        """Waits for the next event; returns the tokens to send because of it. Raises what the request has failed of."""
        try:
            async with asyncio.timeout_at(None if self._settling is None else self._settle_at):
                event = await self._legs.inbox.get()
        except TimeoutError:
            # The request's own deadline is the caller's affair and passes as a cancellation.
            assert self._settling is not None
            event = SettleTimeout(self._settling)
        return self._perform(self._machine.handle(event))

    def _perform(self, actions: Iterable[object]) -> list[Token]:
        tokens: list[Token] = []
        for action in actions:
            match action:
                case Emit(token):
                    tokens.append(token)
                case StartLeg(leg, handle):
                    self._start(leg, handle)
                case CancelLeg(leg):
                    self._legs.cancel(leg)
                case Settle(leg):
                    self._settling = leg
                    self._settle_at = asyncio.get_running_loop().time() + self._patience.settle_timeout_s
                case Replan(restriction, error):
                    tokens += self._perform(self._machine.handle(self._place_again(restriction, error)))
                case Finish():
                    self.finish = action
                case Fail(error):
                    raise error
        return tokens

    def _place_again(self, restriction: Restriction, error: KvRelayError) -> Event:
        log.warning("try %d of request %s failed: %s", self.attempts, self._request.job.request_id, error.message)
        tracing.note_fallback(self._request.span, error, self.attempts)
        self._settling = None
        self._close_dispatches()
        try:
            return Planned(self._place(restriction))
        except KvRelayError as no_plan:
            return Unplaceable(no_plan)

    def _place(self, restriction: Restriction) -> Plan:
        request, now = self._request, self._clock.monotonic()
        with tracing.child(self._telemetry, request.span, names.SPAN_ROUTE) as span:
            prefills, decodes = (
                self._fleet.candidates(request.revision, role, request.prompt.block_hashes, request.shape.tokens, now)
                for role in ("prefill", "decode")
            )
            plan = place(self._policy, request.shape, prefills, decodes, restriction)
            tracing.note_plan(span, plan, self._policy.mode, self.attempts + 1)
            decided_ns = self._clock.time_ns()
            span.end(decided_ns)
        self.plan = plan
        self.planned_ns = self.planned_ns or decided_ns
        self._dispatch(plan, now)
        return plan

    def _close_dispatches(self) -> None:
        for dispatch in self._dispatches.values():
            dispatch.close(self._clock.monotonic())

    def _dispatch(self, plan: Plan, now: float) -> None:
        """Counts the request on its workers from the moment it is planned, so that the next one of a burst sees it."""
        shape, attempt = self._request.shape, self.attempts + 1
        pages = -(-shape.tokens // shape.block_size)
        whole = -(-(shape.tokens + shape.max_tokens) // shape.block_size)
        to_compute = shape.tokens - plan.decode_cached_tokens
        if isinstance(plan.route, Split):
            leg = Leg(attempt, Role.PREFILL, plan.route.prefill)
            uncached = shape.tokens - plan.prefill_cached_tokens
            self._dispatches[leg] = self._fleet.dispatch(leg.worker, now, prefill_tokens=uncached, pages=pages)
            to_compute = 0
        leg = Leg(attempt, Role.DECODE, plan.route.decode)
        self._dispatches[leg] = self._fleet.dispatch(leg.worker, now, prefill_tokens=to_compute, pages=whole)

    def _start(self, leg: Leg, handle: KvHandle | None) -> None:
        job = self._request.job
        if leg.attempt > 1:
            # A worker may still be ending the leg of an earlier try.
            job = replace(job, request_id=f"{job.request_id}.{leg.attempt}")
        left_s = max(0.0, self._request.deadline - asyncio.get_running_loop().time())
        with current(self._request.span):
            self._legs.start(leg, job, handle, self._dispatches[leg], left_s)
