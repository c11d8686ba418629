"""`kvrelay schedule FILE`: what a worker started with `--explain-schedule` has written, as text. Pure but for reading the file.

A line a step. Its bar shows who took part: a small letter for each sequence that draws a token, then capitals for the prompts, as
long as their share of the token budget. A request keeps its letter; after 26 requests the letters come again.
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from string import ascii_lowercase
from typing import Any, TypeVar

from kvrelay.errors import InvalidRequestError
from kvrelay.report import milliseconds, percentile, table

T = TypeVar("T")

FORMAT = 1
"""Version of the file's lines."""
BAR = 40
"""Characters of a full token budget."""
WITHOUT_BUDGET = ("whole",)
"""Policies that take a prompt in one step, however long."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one request computed in a step."""

    request_id: str
    decode: bool
    start: int
    end: int
    recomputed: int
    """Tokens that had been computed before a preemption."""

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the file."""

    number: int
    t_ns: int
    seconds: float
    expected_s: float | None
    budget_why: str
    chunks: tuple[Chunk, ...]
    left_out: tuple[tuple[str, str], ...]
    waiting: int
    waiting_for: tuple[tuple[str, str], ...]
    admitted: tuple[tuple[str, int], ...]
    """With the tokens found in the cache."""
    preempted: tuple[tuple[str, int], ...]
    """With the tokens that have to be computed again."""
    free_pages: int
    cached_pages: int

    @property
    def tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks)


@dataclass(slots=True)
class Summary:
    """Sums over a file."""

    steps: int = 0
    tokens: int = 0
    most_tokens: int = 0
    """Of one step."""
    decoded: int = 0
    recomputed: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    recompute_s: float = 0.0
    budget_use: list[float] = field(default_factory=list)
    """Of each step that kept a budget, as a share of it."""
    budgets: Counter[str] = field(default_factory=Counter)
    """What set that of steps with prompts."""
    durations_s: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    """How far off each expected duration was, as a share of the measured one."""

    def add(self, step: Step, budget: int | None) -> None:
        """`budget`: the tokens that a step keeps to; None where it does not."""
        self.preemptions += len(step.preempted)
        if not step.chunks:
            return
        recomputed = sum(chunk.recomputed for chunk in step.chunks)
        self.steps += 1
        self.tokens += step.tokens
        self.most_tokens = max(self.most_tokens, step.tokens)
        self.decoded += sum(1 for chunk in step.chunks if chunk.decode)
        self.recomputed += recomputed
        self.busy_s += step.seconds
        self.recompute_s += step.seconds * recomputed / step.tokens
        self.durations_s.append(step.seconds)
        if budget is not None:
            self.budget_use.append(step.tokens / budget)
            if not all(chunk.decode for chunk in step.chunks):
                self.budgets[step.budget_why] += 1
        if step.expected_s is not None and step.seconds > 0:
            self.errors.append(abs(step.expected_s - step.seconds) / step.seconds)

    def text(self) -> str:
        if not self.steps:
            return "no step computed anything"
        share = 100 * self.recompute_s / self.busy_s if self.busy_s else 0.0
        rows = [
            ("steps", f"{self.steps} in {milliseconds(self.busy_s)}"),
            ("step time", f"{milliseconds(percentile(self.durations_s, 0.5))} median, {milliseconds(max(self.durations_s))} longest"),
            ("tokens", f"{self.tokens - self.decoded} of prompts, {self.decoded} of answers"),
            ("tokens a step", f"{self.tokens / self.steps:.1f} on average, {self.most_tokens} at most"),
        ]
        if self.budget_use:
            set_by = ", ".join(f"{why} ({count})" for why, count in self.budgets.most_common())
            rows.append(("budget used", f"{100 * sum(self.budget_use) / len(self.budget_use):.0f} % on average"))
            rows.append(("budget set by", set_by or "nothing: no prompts"))
        rows.append(("preemptions", f"{self.preemptions}"))
        rows.append(("recomputed", f"{self.recomputed} tokens, about {milliseconds(self.recompute_s)} or {share:.1f} % of the time"))
        if self.errors:
            rows.append(("predictions", f"{100 * percentile(self.errors, 0.5):.0f} % off at the median"))
        return table(rows)


def draw(path: Path, last: int | None = None) -> Iterator[str]:
    """The picture, line by line; `last`: only so many steps, while the summary counts all of them.

    Raises `InvalidRequestError` for a file that cannot be read or is no schedule.
    """
    summary, picture, cut_off = Summary(), _Picture(), 0
    start: _Start | None = None
    kept: deque[tuple[_Start, Step]] = deque(maxlen=last)
    for line in _lines(path):
        if line is None:
            cut_off += 1
        elif isinstance(line, _Start):
            start = line
        elif start is not None:
            summary.add(line, start.budget if start.keeps_budget else None)
            if last is None:
                yield from picture.lines(start, line)
            else:
                kept.append((start, line))
    for begun, step in kept:
        yield from picture.lines(begun, step)
    yield "\n" + summary.text()
    if cut_off:
        yield f"note: {cut_off} line{'s' if cut_off > 1 else ''} cut off, as by the end of a process, and left out"


@dataclass(frozen=True, slots=True)
class _Start:
    """A worker's start."""

    budget: int
    keeps_budget: bool
    """Whether no step may exceed it."""
    text: str


def _lines(path: Path) -> Iterator[_Start | Step | None]:
    """What each line says; None for one that was cut off."""
    started = False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for number, text in enumerate(file, 1):
                if not text.strip():
                    continue
                try:
                    line = json.loads(text)
                except ValueError:
                    if not started:
                        raise _not_a_schedule(path, number, "no JSON") from None
                    yield None
                    continue
                try:
                    found = _start(line) if "kvrelay_schedule" in line else _parse(line)
                except (KeyError, TypeError, ValueError, AttributeError) as error:
                    raise _not_a_schedule(path, number, f"{type(error).__name__}: {error}") from None
                if not started and isinstance(found, Step):
                    raise _not_a_schedule(path, number, "a step before the first start")
                started = True
                yield found
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be read: {error.strerror}", field="file") from error
    if not started:
        raise InvalidRequestError(f"{path} is empty", field="file")


def _not_a_schedule(path: Path, number: int, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path} is not a schedule that this version can read: line {number}: {why}", field="file")


def _start(line: dict[str, Any]) -> _Start:
    if line["kvrelay_schedule"] != FORMAT:
        raise ValueError(f"format {line['kvrelay_schedule']} instead of {FORMAT}")
    budget, seqs, pages, block = (_positive(line[name]) for name in ("max_num_batched_tokens", "max_num_seqs", "pages", "block_size"))
    objective = f", steps of {float(line['tbt_objective_ms']):g} ms at most" if line["tbt_objective_ms"] else ""
    policy = str(line["policy"])
    keeps_budget = policy not in WITHOUT_BUDGET
    tokens = f"at most {budget} tokens" + ("" if keeps_budget else ", or a longer prompt,")
    bounds = f"{tokens} and {seqs} sequences a step, {pages} pages of {block} tokens"
    return _Start(budget, keeps_budget, f"policy {policy}, prompts by {line['prefill_order']}{objective}: {bounds}")


def _positive(value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{value!r} is not a number of 1 or more")
    return value


def _parse(line: dict[str, Any]) -> Step:
    return Step(
        number=int(line["step"]),
        t_ns=int(line["t_ns"]),
        seconds=_seconds(line["seconds"]),
        expected_s=None if line["expected_s"] is None else _seconds(line["expected_s"]),
        budget_why=str(line["budget_why"]),
        chunks=tuple(_chunk(chunk) for chunk in line["chunks"]),
        left_out=_pairs(line["left_out"], str),
        waiting=int(line["waiting"]),
        waiting_for=_pairs(line["waiting_for"], str),
        admitted=_pairs(line["admitted"], int),
        preempted=_pairs(line["preempted"], int),
        free_pages=int(line["free_pages"]),
        cached_pages=int(line["cached_pages"]),
    )


def _seconds(value: Any) -> float:
    seconds = float(value)
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{value!r} is not a duration")
    return seconds


def _chunk(line: dict[str, Any]) -> Chunk:
    chunk = Chunk(
        request_id=str(line["id"]),
        decode=line["kind"] == "decode",
        start=int(line["start"]),
        end=int(line["end"]),
        recomputed=int(line.get("recomputed", 0)),
    )
    if not 0 <= chunk.start < chunk.end:
        raise ValueError(f"a chunk from {chunk.start} to {chunk.end}")
    return chunk


def _pairs(rows: Iterable[Any], kind: Callable[[Any], T]) -> tuple[tuple[str, T], ...]:
    return tuple((str(name), kind(value)) for name, value in rows)


class _Picture:
    """Draws steps one after the other and remembers who has which letter."""

    def __init__(self) -> None:
        self._start: _Start | None = None
        self._letters: dict[str, str] = {}
        self._began_ns = 0

    def lines(self, start: _Start, step: Step) -> Iterator[str]:
        """The step's line, after what it is under where that is new."""
        self._began_ns = self._began_ns or step.t_ns
        if start is not self._start:
            self._start = start
            yield start.text
            yield f"{'step':>6} {'at':>11} {'took':>11}  {'free+cached':>11}  who"
        notes: list[str] = []
        bar = "".join(self._letter(chunk.request_id, notes) for chunk in step.chunks if chunk.decode)
        for chunk in step.chunks:
            if not chunk.decode:
                name = self._letter(chunk.request_id, notes).upper()
                bar += name * max(1, round(BAR * chunk.tokens / start.budget))
                notes.append(f"{name} {chunk.start}-{chunk.end}" + (" again" if chunk.recomputed else ""))
        for request_id, cached in step.admitted:
            notes.append(f"+{self._letter(request_id, notes)}" + (f" with {cached} cached" if cached else ""))
        for request_id, tokens in step.preempted:
            notes.append(f"!{self._letter(request_id, notes)} preempted with {tokens} computed")
        for request_id, why in step.left_out:
            notes.append(f"{self._letter(request_id, notes)} left out: {why}")
        if step.waiting:
            why = step.waiting_for[0][1] if step.waiting_for else "preempted"
            notes.append(f"{step.waiting} waiting" + ("" if why == "preempted" else f" for {why}"))
        pages = f"{step.free_pages}+{step.cached_pages}"
        at = f"{(step.t_ns - self._began_ns) / 1e9:.3f} s"
        yield f"{step.number:>6} {at:>11} {milliseconds(step.seconds):>11}  {pages:>11}  {bar:<{BAR}}  {'; '.join(notes)}".rstrip()

    def _letter(self, request_id: str, notes: list[str]) -> str:
        """The request's letter; at its first time it is introduced in the notes."""
        letter = self._letters.get(request_id)
        if letter is None:
            letter = self._letters[request_id] = ascii_lowercase[len(self._letters) % 26]
            notes.append(f"{letter} is {request_id}")
        return letter
