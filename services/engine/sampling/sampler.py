"""The next token of one sequence, from its logits. One row at a time: what is drawn never depends on the batch.

Order of operations: logit bias, blocked ids, repetition penalty, presence and frequency penalties; then the likeliest token
if `temperature` is 0, else temperature, top-k, top-p, min-p and a draw.

Draw `index` of a request with `seed` uses one number, a pure function of the two, so that a stream resumed elsewhere goes on
as it would have: Philox4x64-10 (Salmon et al. 2011) with key words `(seed, 0)` and counter words `(index + 1, 0, 0, 0)`; the
first output word, shifted right by 11, times 2**-53. It is compared with the running float64 sum of the float32 probabilities in the
order of token ids. numpy's `Philox(key=seed, counter=index)` yields exactly this word first, in every process and on every platform.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvrelay.errors import InternalError
from kvrelay.values import SamplingParams

_Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_RUN = 128
"""Tokens whose probabilities are added up together before a draw looks among them."""
_COLDEST = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A drawn token."""

    token_id: int
    logprob: float | None = None
    """Natural log of its probability under the model itself, before any sampling parameter; None unless asked for."""
    top: tuple[tuple[int, float], ...] = ()
    """(id, logprob) of the likeliest tokens, best first, ties by id; as many as `params.logprobs`."""


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that draw `index` of a request uses (see the module's text)."""
    word = int(np.random.Philox(key=seed, counter=index).random_raw())
    return (word >> 11) * 2.0**-53


def sample(
    logits: torch.Tensor,
    params: SamplingParams,
    *,
    index: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    blocked_ids: Collection[int] = (),
) -> SampledToken:
    """Draws token `index` (0 is the first of the answer) from float32 logits `[vocab]`, which are left as they are.

    `blocked_ids` (end tokens and stop ids) cannot be drawn while `index < params.min_tokens`. Ids outside the vocabulary are
    ignored. `InternalError` if no finite logit is left, or one is NaN.
    """
    raw: _Floats = logits.detach().cpu().numpy()
    adjusted = _adjust(raw, params, index, prompt_ids, output_ids, blocked_ids)
    best = int(adjusted.argmax())
    if not np.isfinite(adjusted[best]):
        raise InternalError("the model gave no finite logit to choose from")
    token_id = best if params.temperature == 0 else _draw(adjusted, params, uniform(params.seed, index))
    if params.logprobs is None:
        return SampledToken(token_id)
    log_total = _log_sum_exp(raw)
    top = tuple((item, float(raw[item]) - log_total) for item in _likeliest(raw, params.logprobs))
    return SampledToken(token_id, float(raw[token_id]) - log_total, top)


def _adjust(
    raw: _Floats,
    params: SamplingParams,
    index: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    blocked_ids: Collection[int],
) -> _Floats:
    """The logits after bias, block and penalties; `raw` itself when none applies."""
    blocked = blocked_ids if index < params.min_tokens else ()
    repetition = params.repetition_penalty != 1.0
    counted = (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0) and len(output_ids) > 0
    if not (params.logit_bias or blocked or repetition or counted):
        return raw
    logits = raw.copy()
    size = logits.shape[0]
    for token_id, bias in params.logit_bias.items():
        if 0 <= token_id < size:
            logits[token_id] += np.float32(bias)
    for token_id in blocked:
        if 0 <= token_id < size:
            logits[token_id] = -np.inf
    if repetition:
        seen = _within(np.unique(np.asarray([*prompt_ids, *output_ids], dtype=np.int64)), size)
        penalty = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
    if counted:
        ids, counts = np.unique(_within(np.asarray(output_ids, dtype=np.int64), size), return_counts=True)
        penalties = params.presence_penalty + params.frequency_penalty * counts
        logits[ids] -= penalties.astype(np.float32)
    return logits


def _within(ids: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.int64]:
    return ids[(ids >= 0) & (ids < size)]


def _draw(logits: _Floats, params: SamplingParams, number: float) -> int:
    ids: npt.NDArray[np.intp] | None = None
    if 0 < params.top_k < logits.shape[0]:
        ids = np.flatnonzero(logits >= np.partition(logits, -params.top_k)[-params.top_k])
        logits = logits[ids]
    with np.errstate(over="ignore"):
        weights: _Floats = np.exp((logits - logits.max()) / np.float32(max(params.temperature, _COLDEST)))
    if params.top_p < 1.0:
        weights[weights < _nucleus_floor(weights, params.top_p)] = 0.0
    if params.min_p > 0.0:
        weights[weights < params.min_p] = 0.0
    chosen = _invert(weights, number)
    return chosen if ids is None else int(ids[chosen])


def _invert(weights: _Floats, number: float) -> int:
    """The index at which the running sum of `weights`, in float64, passes `number` of the whole. In two levels: a running sum over all
    of a vocabulary takes longer than everything else about a draw."""
    count = weights.shape[0]
    padded = np.zeros(-(-count // _RUN) * _RUN, dtype=np.float32)
    padded[:count] = weights
    runs = padded.reshape(-1, _RUN)
    ends: _Doubles = np.cumsum(runs.sum(axis=1, dtype=np.float64))
    target = number * ends[-1]
    run = min(int(np.searchsorted(ends, target, side="right")), ends.shape[0] - 1)
    within: _Doubles = np.cumsum(runs[run], dtype=np.float64)
    chosen: int = run * _RUN + int(np.searchsorted(within, target - (ends[run - 1] if run else 0.0), side="right"))
    if chosen < count and weights[chosen] > 0.0:
        return chosen
    # Rounding led past the end of a run: the last token before it that can be drawn.
    possible = np.flatnonzero(weights[: chosen + 1])
    return int(possible[-1]) if possible.shape[0] else int(np.flatnonzero(weights)[0])


def _nucleus_floor(weights: _Floats, top_p: float) -> np.float32:
    """The smallest weight of the smallest set of likeliest tokens whose share reaches `top_p`; tokens that tie with it count in."""
    descending = np.sort(weights)[::-1]
    cumulative = np.cumsum(descending, dtype=np.float64)
    last = int(np.searchsorted(cumulative, top_p * cumulative[-1], side="left"))
    return np.float32(descending[min(last, descending.shape[0] - 1)])


def _log_sum_exp(logits: _Floats) -> float:
    wide = logits.astype(np.float64)
    peak = wide.max()
    return float(peak + np.log(np.exp(wide - peak).sum()))


def _likeliest(logits: _Floats, count: int) -> list[int]:
    count = min(count, logits.shape[0])
    if count == 0:
        return []
    floor = np.partition(logits, -count)[-count]
    candidates = np.flatnonzero(logits >= floor)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(item) for item in candidates[order][:count]]
