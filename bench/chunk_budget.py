"""How many tokens a step should take: `python -m bench.chunk_budget --help`.

A small budget keeps the time between tokens steady and makes long prompts wait; a large one does the reverse. This drives the
real engine with sequences that decode while long prompts arrive, once for each scheduling policy and budget, prints both sides
beside each other and names the setting that suits given objectives.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import machine
from bench.arguments import positive
from bench.interference import Load, Suffered, percentile, suffer
from bench.report import table
from bench.sitting import NOISY
from kvrelay.errors import ConfigError
from services.engine.demo.model import DEMO_NAMES, ensure_demo_model, resolve_model
from services.engine.settings import EngineSettings

POLICIES = ("whole", "chunked", "dynamic")


@dataclass(frozen=True, slots=True)
class Setting:
    """One configuration of the sweep."""

    policy: str
    budget: int
    """`max_num_batched_tokens`."""

    @property
    def name(self) -> str:
        return f"{self.policy} {self.budget}"


@dataclass(frozen=True, slots=True)
class Objectives:
    """What the service promises, milliseconds."""

    ttft_ms: float
    """Median time to first token of the long prompts."""
    itl_ms: float
    """99th percentile of the time between tokens while such a prompt is computed."""

    def excess(self, suffered: Suffered) -> float:
        """How far the worse of the two lies over its objective: up to 1 both hold."""
        return max(percentile(suffered.ttft, 0.5) / self.ttft_ms, percentile(suffered.itl, 0.99) / self.itl_ms)


def recommend(results: dict[Setting, Suffered], objectives: Objectives) -> tuple[Setting, bool]:
    """Of the settings that keep both objectives the one with the shortest TTFT; if none does, the one that misses them least.

    The second value says whether the objectives hold.
    """
    kept = [setting for setting, suffered in results.items() if objectives.excess(suffered) <= 1]
    if kept:
        return min(kept, key=lambda setting: percentile(results[setting].ttft, 0.5)), True
    return min(results, key=lambda setting: objectives.excess(results[setting])), False


def settings_to_try(policies: Sequence[str], budgets: Sequence[int], prompt: int) -> list[Setting]:
    """`whole` takes a prompt in one step whatever the budget, so it is tried once."""
    found = [Setting("whole", max(prompt, *budgets))] if "whole" in policies else []
    return found + [Setting(policy, budget) for policy in policies if policy != "whole" for budget in budgets]


def sweep(options: argparse.Namespace) -> dict[Setting, Suffered]:
    """Runs every setting, one engine after the other, on the pinned cores."""
    os.sched_setaffinity(0, options.cpus)
    load = Load(options.decodes, options.context, options.prompt, options.prompts)
    pages = 2 * options.decodes * (options.context + 512) // 16 + 4 * options.prompt // 16
    results = {}
    for setting in settings_to_try(options.policies, options.budgets, options.prompt):
        if setting.budget < options.decodes + 1:
            print(f"{setting.name}: no room beside {options.decodes} decodes", file=sys.stderr)
            continue
        others: dict[str, Any] = {"tbt_objective_ms": options.itl_ms} if setting.policy == "dynamic" else {}
        engine = EngineSettings(
            _folder(options.model, options.dtype), dtype=options.dtype, quantization=options.quantization, kernels=options.kernels,
            num_pages=pages, max_num_batched_tokens=setting.budget, policy=setting.policy, threads=options.threads, **others,
        )  # fmt: skip
        print(setting.name, file=sys.stderr, flush=True)
        try:
            results[setting] = asyncio.run(suffer(engine, load, options.cpus))
        except ConfigError as error:
            print(f"{setting.name}: {error}", file=sys.stderr)
    return results


def report(options: argparse.Namespace, results: dict[Setting, Suffered]) -> str:
    """Markdown: the machine, the sweep, the recommendation."""
    about = machine.describe() | {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "command": shlex.join(["python", "-m", "bench.chunk_budget", *sys.argv[1:]]),
        "load": f"{options.decodes} sequences decode from context {options.context}; {options.prompts} prompts of {options.prompt} tokens",
        "engine": f"{options.model}, {options.dtype}, quantization {options.quantization}, {options.threads} thread(s)",
    }
    heads = ["policy", "budget", "TTFT p50 ms", "TTFT max", "ITL p50 ms", "ITL p99", "ITL max", "max / quiet p50", "noise"]
    rows = [[setting.policy, str(setting.budget), *_figures(suffered)] for setting, suffered in results.items()]
    quiet = percentile([gap for suffered in results.values() for gap in suffered.quiet_itl], 0.5)
    objectives = Objectives(options.ttft_ms, options.itl_ms)
    best, holds = recommend(results, objectives)
    wanted = f"TTFT p50 up to {options.ttft_ms:g} ms and ITL p99 up to {options.itl_ms:g} ms"
    advice = f"Recommended for {wanted}: `--policy {best.policy} --max-num-batched-tokens {best.budget}`."
    if not holds:
        excess = objectives.excess(results[best])
        advice = (
            f"No setting keeps {wanted}. Nearest, {excess:.1f} times over: `--policy {best.policy} --max-num-batched-tokens {best.budget}`."
        )
    parts = [
        "# Budget of a step: time to first token against time between tokens",
        "\n".join(f"- **{name}**: {value}" for name, value in about.items()),
        f"ITL: gaps between a decoding sequence's tokens while a prompt is computed; without prompts their median is {quiet:.1f} ms.\n"
        f"~ marks a row during which others took more than {NOISY:.0%} of the cores.",
        table(heads, rows),
        advice,
    ]
    return "\n\n".join(parts) + "\n"


def _figures(suffered: Suffered) -> list[str]:
    ttft = [percentile(suffered.ttft, 0.5), max(suffered.ttft)]
    itl = [percentile(suffered.itl, 0.5), percentile(suffered.itl, 0.99), max(suffered.itl)]
    times = max(suffered.itl) / percentile(suffered.quiet_itl, 0.5)
    return [*(f"{value:.0f}" for value in (*ttft, *itl)), f"{times:.1f}", "~" if suffered.disturbance.total > NOISY else ""]


def _folder(model: str, dtype: str) -> Path:
    return ensure_demo_model(dtype=dtype) if model == DEMO_NAMES[0] else resolve_model(model)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.chunk_budget", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEMO_NAMES[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"])
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--cpus", nargs="+", type=int, help="cores to pin to; default: the first allowed ones, as many as threads")
    parser.add_argument("--policies", default=list(POLICIES), choices=POLICIES, nargs="+")
    parser.add_argument("--budgets", default=[64, 128, 256, 512, 1024, 2048], nargs="+", type=positive, help="tokens a step")
    parser.add_argument("--decodes", type=positive, default=8, help="sequences that decode all the time")
    parser.add_argument("--context", type=positive, default=512, help="tokens of their prompts")
    parser.add_argument("--prompt", type=positive, default=2048, help="tokens of each arriving prompt")
    parser.add_argument("--prompts", type=positive, default=3, help="prompts that arrive, one after the other")
    parser.add_argument("--ttft-ms", type=float, default=5000.0, help="objective: median TTFT of the long prompts")
    parser.add_argument("--itl-ms", type=float, default=500.0, help="objective: p99 of the time between tokens, also of policy dynamic")
    parser.add_argument("--markdown", type=Path, help="write the report to this file, or into this folder as chunk-budget-<cpu>.md")
    options = parser.parse_args(arguments)
    options.cpus = options.cpus or sorted(os.sched_getaffinity(0))[: options.threads]
    return options


def main() -> None:
    options = parse()
    results = sweep(options)
    if not results:
        sys.exit("no setting could be run")
    text = report(options, results)
    print(text)
    if options.markdown:
        target = options.markdown / f"chunk-budget-{machine.slug()}.md" if options.markdown.is_dir() else options.markdown
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
