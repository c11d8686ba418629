"""Text for people: tables of the command line. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from kvrelay.fleet import FleetView, ModelView, WorkerView
from kvrelay.values import Completion, Timings

PHASES = (
    ("admission", "admission_s"),
    ("route", "route_s"),
    ("prefill queue", "prefill_queue_s"),
    ("prefill", "prefill_s"),
    ("exposed transfer", "exposed_transfer_s"),
    ("decode queue", "decode_queue_s"),
    ("decode", "decode_s"),
)
"""The phases that partition a request's time: name for people, field of `Timings`."""
ROLES = ("prefill", "decode", "kvstore")


def table(rows: Sequence[Sequence[str]], *, indent: str = "") -> str:
    """Columns as wide as their widest cell; numbers stay as they are given."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(indent + line for line in lines)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def size(size_bytes: float) -> str:
    """Binary units."""
    for unit in ("B", "KiB", "MiB"):
        if size_bytes < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} GiB"


def phase_rows(timings: Timings) -> list[tuple[str, str, str]]:
    """(phase, time, share of the total)."""
    rows = []
    for name, field in PHASES:
        seconds: float = getattr(timings, field)
        share = f"{100 * seconds / timings.total_s:.0f} %" if timings.total_s > 0 else "-"
        rows.append((name, milliseconds(seconds).rjust(12), share.rjust(5)))
    return [*rows, ("total", milliseconds(timings.total_s).rjust(12), "")]


def percentile(values: Iterable[float], fraction: float) -> float:
    """The smallest value that at least this fraction of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


def stats(completion: Completion, *, decision: str, ttft_s: float | None, itl_s: Sequence[float]) -> str:
    """Usage, path and times of one generation."""
    usage = completion.usage
    rows = [
        ("usage", f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} generated"),
        ("finish", completion.finish_reason.value),
        ("path", completion.path + (f" ({decision})" if decision else "")),
    ]
    moved = completion.transfer
    if moved is not None:
        early = f", {100 * moved.early_bytes / moved.kv_bytes:.0f} % before prefill ended" if moved.kv_bytes else ""
        rate = f" at {size(moved.bandwidth_bytes_per_s)}/s" if moved.transfer_s > 0 else ""
        rows.append(("KV", f"{size(moved.kv_bytes)} in {moved.blocks} blocks over {moved.transport or '?'}{rate}{early}"))
    ttft = f"{milliseconds(completion.timings.ttft_s)} at the router"
    rows.append(("TTFT", ttft if ttft_s is None else f"{ttft}, {milliseconds(ttft_s)} here"))
    if itl_s:
        rows.append(("ITL", f"{milliseconds(sum(itl_s) / len(itl_s))} mean, {milliseconds(percentile(itl_s, 0.99))} p99 here"))
    if completion.trace_id:
        rows.append(("trace", completion.trace_id))
    return table(rows) + "\n" + table(phase_rows(completion.timings))


def fleet(view: FleetView) -> str:
    """Workers by role, pairs that are not formed, registry."""
    registry = "connected" if view.registry_connected else "lost"
    age = f"last word {view.view_age_s:.1f} s ago"
    parts = [f"mode {view.mode or '?'}, {view.in_flight} in flight, registry {registry} ({age})"]
    roles = [*ROLES, *sorted({worker.role for worker in view.workers} - set(ROLES))]
    for role in roles:
        workers = sorted((worker for worker in view.workers if worker.role == role), key=lambda worker: worker.worker_id)
        parts.append(f"\n{role}: " + (f"{len(workers)}" if workers else "none"))
        if workers:
            parts.append(table([_WORKER_COLUMNS, *(_worker_row(worker) for worker in workers)], indent="  "))
    if view.incompatibilities:
        parts.append("\npairs that are not formed:")
        for pair in view.incompatibilities:
            parts.append(f"  {pair.prefill_worker} -> {pair.decode_worker}")
            head = ("field", f"at {pair.prefill_worker}", f"at {pair.decode_worker}")
            rows = [(d.field, d.prefill_value, d.decode_value) for d in pair.differences]
            parts.append(table([head, *rows], indent="    "))
    return "\n".join(parts)


_WORKER_COLUMNS = ("worker", "state", "address", "model", "running", "waiting", "backlog", "pages free", "handles", "numerics")


def _worker_row(worker: WorkerView) -> tuple[str, ...]:
    if worker.identity is None:  # a store: it computes nothing
        return (worker.worker_id, worker.state, worker.address, *("-" for _ in _WORKER_COLUMNS[3:]))
    load = worker.load
    model = f"{worker.identity.model} ({worker.identity.weights_kind})"
    return (
        worker.worker_id,
        worker.state,
        worker.address,
        model,
        str(load.running),
        str(load.waiting),
        f"{load.prefill_backlog_tokens}+{load.decode_backlog_tokens}",
        f"{load.available_pages}/{load.total_pages}",
        str(load.held_handles),
        worker.identity.numerics,
    )


def models(views: Sequence[ModelView]) -> str:
    head = ("model", "state", "context", "prefill", "decode", "kind", "weights")
    rows = [
        (
            view.name,
            "ready" if view.ready else f"no {view.missing_role} worker" if view.missing_role else "not ready",
            str(view.max_context_tokens),
            str(view.prefill_workers),
            str(view.decode_workers),
            view.identity.weights_kind,
            view.identity.weights_digest[:19],
        )
        for view in views
    ]
    return table([head, *rows]) if rows else "no models: no worker has registered"
