"""One request's way through prefill and decode: a pure state machine, events in, actions out.

    PLANNING ── Planned ──> RUNNING ── decode's or prefill's end ──> (SETTLING) ──> DONE
        ^                      │
        └── Replan ── a leg failed, tries left          any state ── an error nobody can mend ──> FAILED

A *leg* is one call to one worker. A *try* is one plan with its legs; a failed leg ends the whole try. The ladder: a failed prefill or
hand-over is tried once with another prefill worker, then the prompt is computed where it is decoded; a failed decode worker is
replaced. Sampling depends on (seed, index) only, so a new try draws the same tokens: those already sent are compared and dropped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvrelay.errors import (
    CancelledByClientError,
    DeadlineExceededError,
    HandleError,
    InternalError,
    InvalidRequestError,
    KvRelayError,
    KvTransferError,
    WorkerLostError,
)
from kvrelay.handle import KvHandle
from kvrelay.values import FinishReason, Token, TransferStats, Usage, WorkerMarks
from services.router.placement import Local, Plan, Restriction, Split
from services.runtime.ports import (
    DecodeAccepted,
    DecodeDone,
    DecodeEvent,
    DecodeToken,
    FirstToken,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    PrefillEvent,
    PrefillQueued,
    WorkerInfo,
)

MAX_EARLY_TOKENS = 1024
"""Decode tokens kept while prefill's first token is still on its way."""


class Phase(enum.Enum):
    """Where a request stands."""

    PLANNING = "planning"
    """A plan is asked for."""
    RUNNING = "running"
    """Legs run."""
    SETTLING = "settling"
    """Decode has ended well; prefill's last word is on its way."""
    DONE = "done"
    FAILED = "failed"


class Role(enum.Enum):
    """What a leg does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Leg:
    """One call to one worker."""

    attempt: int
    """1 for the first try."""
    role: Role
    worker: WorkerInfo


# --- events ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Planned:
    """The answer to `Replan`, and the first event of all."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class Unplaceable:
    """The other answer to `Replan`."""

    error: KvRelayError


@dataclass(frozen=True, slots=True)
class FromPrefill:
    leg: Leg
    event: PrefillEvent


@dataclass(frozen=True, slots=True)
class FromDecode:
    leg: Leg
    event: DecodeEvent


@dataclass(frozen=True, slots=True)
class LegFailed:
    leg: Leg
    error: KvRelayError


@dataclass(frozen=True, slots=True)
class SettleTimeout:
    """Prefill's last word did not come in time."""

    leg: Leg


Event = Planned | Unplaceable | FromPrefill | FromDecode | LegFailed | SettleTimeout


# --- actions -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replan:
    """Answer with `Planned` or `Unplaceable`."""

    restriction: Restriction
    error: KvRelayError
    """What the try before failed of."""


@dataclass(frozen=True, slots=True)
class StartLeg:
    leg: Leg
    handle: KvHandle | None = None
    """For decode: the KV to take; None computes the prompt there."""


@dataclass(frozen=True, slots=True)
class CancelLeg:
    leg: Leg


@dataclass(frozen=True, slots=True)
class Emit:
    """Send a token to the client."""

    token: Token


@dataclass(frozen=True, slots=True)
class Settle:
    """Send `SettleTimeout` unless the request ends soon."""

    leg: Leg


@dataclass(frozen=True, slots=True)
class Finish:
    """The last action of a request that ended well."""

    finish_reason: FinishReason
    usage: Usage
    path: str
    """'local', 'split' or 'fallback'."""
    transfer: TransferStats | None
    prefill_marks: WorkerMarks | None
    """None when the answer was computed on one worker."""
    decode_marks: WorkerMarks | None
    """None when prefill's first token ended the answer."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The last action of a request that did not."""

    error: KvRelayError


Action = Replan | StartLeg | CancelLeg | Emit | Settle | Finish | Fail


def mendable(error: KvRelayError) -> bool:
    """Whether another worker may do better: not where the client is at fault, has gone, or has no time left."""
    return not isinstance(error, InvalidRequestError | DeadlineExceededError | CancelledByClientError)


class RequestMachine:
    """Feed events to `handle`, carry out what it returns, in order. Events of legs that are over change nothing."""

    def __init__(self, *, max_tries: int = 3) -> None:
        self.phase = Phase.PLANNING
        self.attempt = 0
        self._max_tries = max_tries
        self._sent: list[int] = []
        self._early: list[Token] = []
        self._prefill: Leg | None = None
        self._decode: Leg | None = None
        self._prefill_done: PrefillDone | None = None
        self._decode_done: DecodeDone | None = None
        self.accepted = False
        """Whether a worker has taken the request, on this try or an earlier one."""
        self._has_handle = False
        self._kv_ready = False
        self._was_split = False
        self._holder: str | None = None
        self._hand_over_faults = 0
        self._avoid: set[str] = set()
        self._shun: set[str] = set()
        self._last_error: KvRelayError | None = None

    def handle(self, event: Event) -> list[Action]:
        match event:
            case _ if self.phase in (Phase.DONE, Phase.FAILED):
                return []
            case Planned(plan):
                return self._start(plan)
            case Unplaceable(error):
                assert self.phase is Phase.PLANNING
                return self._fail(self._last_error or error)
            case FromPrefill(leg, prefill_event):
                return self._on_prefill(leg, prefill_event) if leg == self._prefill else []
            case FromDecode(leg, decode_event):
                return self._on_decode(leg, decode_event) if leg == self._decode else []
            case LegFailed(leg, error):
                return self._on_failure(leg, error) if leg in (self._prefill, self._decode) else []
            case SettleTimeout(leg):
                late = WorkerLostError(f"prefill worker {leg.worker.worker_id} fell silent", worker=leg.worker.worker_id)
                return self._on_failure(leg, late) if leg == self._prefill else []

    def _start(self, plan: Plan) -> list[Action]:
        assert self.phase is Phase.PLANNING
        self.phase = Phase.RUNNING
        self.attempt += 1
        self._prefill = self._decode = self._prefill_done = self._decode_done = None
        self._has_handle, self._kv_ready, self._early = False, False, []
        self._holder = None
        match plan.route:
            case Split(prefill, decode):
                self._holder, self._was_split = prefill.worker_id, True
                self._prefill = Leg(self.attempt, Role.PREFILL, prefill)
                self._decode = Leg(self.attempt, Role.DECODE, decode)
                return [StartLeg(self._prefill)]
            case Local(decode):
                self._decode = Leg(self.attempt, Role.DECODE, decode)
                return [StartLeg(self._decode)]

    # --- prefill ---------------------------------------------------------------------------------------------------------------

    def _on_prefill(self, leg: Leg, event: PrefillEvent) -> list[Action]:
        match event:
            case PrefillQueued():
                self.accepted = True
                return []
            case PrefillAccepted(handle):
                if self._has_handle or self._decode is None:
                    return self._on_failure(leg, InternalError("prefill accepted twice"))
                self._has_handle = self.accepted = True
                return [StartLeg(self._decode, handle)]
            case FirstToken(token):
                if token.index != 0:
                    return self._on_failure(leg, InternalError(f"prefill began with token {token.index}"))
                return [*self._take(leg, token), *self._take_early()]
            case PrefillDone(finish_reason):
                if not self._sent:
                    return self._on_failure(leg, InternalError("prefill ended without a token"))
                self._prefill_done, self._prefill = event, None
                if self.phase is Phase.SETTLING or finish_reason is not None:
                    return self._finish()
                return []

    # --- decode ----------------------------------------------------------------------------------------------------------------

    def _on_decode(self, leg: Leg, event: DecodeEvent) -> list[Action]:
        match event:
            case DecodeAccepted():
                self.accepted = True
                return []
            case KvReady():
                self._kv_ready = True
                return []
            case DecodeToken(token):
                return self._take(leg, token)
            case DecodeDone():
                self._decode_done, self._decode = event, None
                if self._prefill is not None:
                    self.phase = Phase.SETTLING
                    return [Settle(self._prefill)]
                if not self._sent:
                    return self._on_failure(leg, InternalError("decode ended without a token"))
                return self._finish()

    def _take(self, leg: Leg, token: Token) -> list[Action]:
        """Sends a token on, once: a repeated index must be the same token, a missing one is an error."""
        expected = len(self._sent)
        if token.index < expected:
            if self._sent[token.index] == token.token_id:
                return []
            return self._fail(InternalError(f"token {token.index} was {self._sent[token.index]}, and {token.token_id} on another try"))
        if token.index == expected:
            self._sent.append(token.token_id)
            return [Emit(token)]
        in_order = token.index == 1 + len(self._early)
        if expected == 0 and self._prefill is not None and in_order and len(self._early) < MAX_EARLY_TOKENS:
            # The two legs are two streams: decode's first token may overtake prefill's.
            self._early.append(token)
            return []
        return self._on_failure(leg, InternalError(f"token {token.index} came where {expected} was due"))

    def _take_early(self) -> list[Action]:
        early, self._early = self._early, []
        actions: list[Action] = []
        for token in early:
            self._sent.append(token.token_id)
            actions.append(Emit(token))
        return actions

    # --- ends ------------------------------------------------------------------------------------------------------------------

    def _finish(self) -> list[Action]:
        decode, prefill = self._decode_done, self._prefill_done
        actions = self._cancel_legs()
        self.phase = Phase.DONE
        by_prefill = prefill is not None and prefill.finish_reason is not None
        last = prefill if by_prefill or decode is None else decode
        assert last is not None and last.finish_reason is not None
        # Prefill computed the prompt, so it knows what of it was cached.
        usage = (prefill or last).usage
        prefill_marks: WorkerMarks | None = None
        split = self._holder is not None
        if split:
            prefill_marks = WorkerMarks() if prefill is None else prefill.marks
        finish = Finish(
            finish_reason=last.finish_reason,
            usage=Usage(usage.prompt_tokens, usage.cached_tokens, len(self._sent)),
            path="split" if split else "fallback" if self._was_split else "local",
            transfer=decode.transfer if decode is not None and split else None,
            prefill_marks=prefill_marks,
            decode_marks=None if by_prefill or decode is None else decode.marks,
        )
        return [*actions, finish]

    def _on_failure(self, leg: Leg, error: KvRelayError) -> list[Action]:
        if leg == self._prefill and self._sent and (self._kv_ready or self._decode_done is not None):
            # Everything prefill had to give has arrived.
            self._prefill = None
            return [CancelLeg(leg), *(self._finish() if self.phase is Phase.SETTLING else [])]
        if not mendable(error):
            return self._fail(error)
        self._blame(leg, error)
        actions = self._cancel_legs()
        self._last_error = error
        if self.attempt >= self._max_tries:
            return [*actions, *self._fail(error)]
        self.phase = Phase.PLANNING
        # A split can give only the first token again; later ones, and a last try, need a worker that can do all of it.
        local_only = self._hand_over_faults >= 2 or self.attempt == self._max_tries - 1 or len(self._sent) > 1
        return [*actions, Replan(Restriction(frozenset(self._avoid), frozenset(self._shun), local_only), error)]

    def _blame(self, leg: Leg, error: KvRelayError) -> None:
        worker_id = leg.worker.worker_id
        if leg.role is Role.PREFILL:
            self._hand_over_faults += 1
            self._avoid.add(worker_id)
        elif self._holder is not None and isinstance(error, HandleError | KvTransferError):
            self._hand_over_faults += 1
            self._avoid.add(self._holder)
            self._shun.add(worker_id)
        elif isinstance(error, WorkerLostError):
            # The connection may have broken rather than the worker: better than giving up.
            self._shun.add(worker_id)
        else:
            self._avoid.add(worker_id)

    def _cancel_legs(self) -> list[Action]:
        legs = [leg for leg in (self._prefill, self._decode) if leg is not None]
        self._prefill = self._decode = None
        return [CancelLeg(leg) for leg in legs]

    def _fail(self, error: KvRelayError) -> list[Action]:
        actions = self._cancel_legs()
        self.phase = Phase.FAILED
        return [*actions, Fail(error)]
