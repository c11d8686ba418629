"""Results as tables that read well in a terminal and in Markdown alike."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.cells import Cell
from bench.floors import Work, floor_s
from bench.probe import Peaks
from bench.sitting import NOISY, Pairing, Series


@dataclass(slots=True)
class Group:
    """All that was measured for one class of arithmetic with one number of threads."""

    kind: str
    threads: int
    peaks: Peaks
    model: dict[str, Series] = field(default_factory=dict)
    """Name of cell to our model path."""
    engine: dict[str, Pairing] = field(default_factory=dict)
    """Our model path and our whole engine."""
    peers: dict[str, dict[str, Pairing]] = field(default_factory=dict)
    """Name of peer to name of cell to our like and it."""
    whole_peers: frozenset[str] = frozenset()
    """Peers that were compared with the whole engine."""


@dataclass(slots=True)
class Results:
    """One sitting."""

    about: dict[str, str]
    """Machine, date, command."""
    versions: dict[str, Mapping[str, str]]
    cells: Sequence[Cell]
    work: Work
    groups: list[Group] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table with aligned columns."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)) + " |"

    return "\n".join([line(heads), line(["-" * width for width in widths]), *map(line, rows)])


def markdown(results: Results) -> str:
    """The whole report."""
    parts = ["# Engine: speed on one machine", _about(results)]
    for group in results.groups:
        parts.append(f"## {group.kind}, {group.threads} thread{'s' if group.threads > 1 else ''}")
        parts.append(_peaks(group))
        parts.append(_ours(results, group))
        if group.peers:
            parts.append(_peers(results, group))
    return "\n\n".join(parts) + "\n"


def _about(results: Results) -> str:
    lines = [f"- **{name}**: {value}" for name, value in results.about.items()]
    lines += [f"- **{name}**: " + ", ".join(f"{key} {value}" for key, value in each.items()) for name, each in results.versions.items()]
    lines += [f"- **not measured**: {reason}" for reason in results.skipped]
    notes = [
        "tok/s are medians; in brackets least and most of the runs. Prefill: one prompt computed whole; decode: B sequences at the",
        "context above, one token a step; mixed: a chunk of a fresh prompt in one step with decodes.",
        "*Floor*: weights and keys read once a step at the rate measured for a buffer of the weights' size, or the linears'",
        "arithmetic at the measured peak, whichever takes longer. *Engine*: the same step through runner, scheduler, sampler and text.",
        "*Ratio*: our tokens a second over the peer's, pair by pair in turn; over 1 kvrelay is faster. Peers marked (whole) step their",
        "own scheduler and sampler, and are compared with our whole engine; the others with our model path.",
        f"~ marks a cell during which others (processes or guests) took more than {NOISY:.0%} of the cores.",
    ]
    return "\n".join([*lines, "", *notes])


def _peaks(group: Group) -> str:
    read = ", ".join(f"{size / 1e6:.0f} MB {rate / 1e9:.1f}" for size, rate in group.peaks.read_bytes_per_s.items())
    products = ", ".join(f"{name} {rate / 1e9:.0f}" for name, rate in group.peaks.operations_per_s.items())
    return f"Measured peaks: reading, GB/s: {read}; matrix products, G(FL)OP/s: {products}."


def _ours(results: Results, group: Group) -> str:
    rows = []
    for cell in results.cells:
        series = group.model.get(cell.name)
        if series is None:
            continue
        floor = cell.tokens / floor_s(cell, results.work, group.kind, group.peaks)
        pairing = group.engine.get(cell.name)
        engine = ["-", "-"]
        if pairing is not None:
            engine = [_spread(pairing.theirs.rates), f"{pairing.theirs.call_ms - pairing.ours.call_ms:+.2f}"]
        noise = "~" if series.disturbance > NOISY or (pairing is not None and pairing.noisy) else ""
        ours = [_spread(series.rates), f"{series.call_ms:.1f}", f"{series.rate / floor:.2f}"]
        rows.append([cell.name, f"{floor:.0f}", *ours, *engine, str(len(series.runs)), noise])
    return table(["cell", "floor tok/s", "model tok/s", "ms a step", "of floor", "engine tok/s", "engine's own ms", "runs", "noise"], rows)


def _peers(results: Results, group: Group) -> str:
    rows = []
    for cell in results.cells:
        for name, cells in group.peers.items():
            pairing = cells.get(cell.name)
            if pairing is not None:
                ratios = pairing.ratios
                shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
                label = f"{name} (whole)" if name in group.whole_peers else name
                noise = "~" if pairing.noisy else ""
                rows.append([cell.name, label, _spread(pairing.theirs.rates), _spread(pairing.ours.rates), shown, str(len(ratios)), noise])
    return table(["cell", "peer", "peer tok/s", "kvrelay tok/s", "ratio", "runs", "noise"], rows)


def _spread(values: Sequence[float]) -> str:
    digits = 1 if max(values) < 100 else 0
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def as_json(results: Results) -> str:
    """Everything, every run."""

    def plain(value: Any) -> Any:
        return sorted(value) if isinstance(value, frozenset) else str(value)

    return json.dumps(asdict(results), indent=1, default=plain)
