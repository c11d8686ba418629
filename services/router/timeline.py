"""A request's moments on one time line, and the phases between them. Pure.

Workers' clocks differ a little from the router's, and a fallback leaves marks of failed tries behind: moments are put in order by
clamping each between the one before it and the end, so the seven phases always partition the total exactly.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from kvrelay.values import Timings, WorkerMarks

NS_PER_S = 1_000_000_000
NO_MARKS = WorkerMarks()


@dataclass(frozen=True, slots=True)
class RouterMarks:
    """Moments at the router, nanoseconds since the epoch; 0 where it did not happen."""

    received: int
    admitted: int
    """Admitted and tokenised."""
    planned: int
    """The first plan was made; what later tries cost belongs to the wait for prefill."""
    first_token: int
    """The first token went to the client."""
    end: int
    """The last event went to the client."""


def timings(router: RouterMarks, prefill: WorkerMarks | None, decode: WorkerMarks | None) -> Timings:
    """`prefill` is None when the request ran on one worker, `decode` when prefill's first token ended the answer."""
    first = prefill or decode or NO_MARKS
    second = decode or NO_MARKS
    prefill_end = first.prefill_end or router.first_token
    moments = [
        router.received,
        router.admitted,
        router.planned,
        first.prefill_start,
        prefill_end,
        second.kv_ready if prefill is not None else prefill_end,
        second.decode_start,
        router.end,
    ]
    ordered = [moments[0]]
    for moment in moments[1:-1]:
        ordered.append(min(max(moment, ordered[-1]), max(router.end, ordered[0])))
    ordered.append(max(router.end, ordered[0]))
    admission, route, prefill_queue, computing, transfer, decode_queue, decoding = (
        (later - earlier) / NS_PER_S for earlier, later in itertools.pairwise(ordered)
    )
    total = (ordered[-1] - ordered[0]) / NS_PER_S
    ttft = (router.first_token - router.received) / NS_PER_S if router.first_token else 0.0
    return Timings(
        admission_s=admission,
        route_s=route,
        prefill_queue_s=prefill_queue,
        prefill_s=computing,
        exposed_transfer_s=transfer,
        decode_queue_s=decode_queue,
        decode_s=decoding,
        total_s=total,
        ttft_s=max(0.0, min(ttft, total)),
    )
