"""Speed of the engine, alone and against its peers: `python -m bench.engine --help`, and bench/README.md."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from bench import machine, probe
from bench.arguments import positive
from bench.cells import standard_cells
from bench.floors import BYTES, Work
from bench.gguf_file import ensure_gguf
from bench.peers import PEERS, Peer
from bench.process import SubjectFailed, SubjectProcess
from bench.report import Group, Results, as_json, markdown
from bench.sitting import alone, in_turn, measured
from bench.subject import NotMeasured, Setup
from kvrelay.errors import KvRelayError
from services.engine.demo.model import DEMO_NAMES, default_cache_dir, ensure_demo_model, resolve_model
from services.engine.model.config import ModelConfig

QUESTION = (1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198)
"""'What is the capital of France?' as a chat, in the demo model's tokens."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default=DEMO_NAMES[0], help="model folder; peers are measured with the demo model only")
    parser.add_argument("--kinds", default=list(BYTES), choices=list(BYTES), nargs="+", help="classes of arithmetic")
    parser.add_argument("--threads", default=[1, 2], nargs="+", type=positive)
    allowed = sorted(os.sched_getaffinity(0))
    parser.add_argument("--cpus", default=allowed, nargs="+", type=int, help="cores to pin to, the first as many as threads")
    parser.add_argument("--peers", default=["all"], choices=["all", "none", *(peer.name for peer in PEERS)], nargs="+")
    parser.add_argument("--peers-dir", type=Path, default=default_cache_dir() / "peers", help="where their environments are")
    parser.add_argument("--kernels", default="auto", choices=["auto", "native", "torch"], help="what kvrelay computes with")
    parser.add_argument("--prompts", default=[128, 512, 2048], nargs="*", type=positive, help="lengths of the prompts of prefill")
    parser.add_argument("--batches", default=[1, 4, 8, 16], nargs="*", type=positive, help="sequences that decode")
    parser.add_argument("--context", type=positive, default=512, help="tokens in the cache of each decoding sequence")
    parser.add_argument("--chunk", type=int, default=256, help="prompt tokens of a mixed step; 0 for none")
    parser.add_argument("--steps", type=positive, default=16, help="decode steps a run; up to four times that with fewer than 4 sequences")
    parser.add_argument("--rounds", type=positive, default=5, help="counted runs of each engine at each cell")
    parser.add_argument(
        "--quick", action="store_true", help="a smoke run of about a minute: no peers, no float32, one thread, short contexts, few runs"
    )
    parser.add_argument("--json", type=Path, help="write every run to this file")
    parser.add_argument("--markdown", type=Path, help="write the report to this file, or into this folder as engine-<cpu>.md")
    options = parser.parse_args(arguments)
    if options.quick:
        options.peers, options.threads, options.rounds, options.steps = ["none"], [1], 2, 4
        options.prompts, options.batches, options.context, options.chunk = [128], [1, 8], 128, 0
        options.kinds = ["bfloat16", "int8"]
    if not (options.prompts or options.batches or options.chunk):
        parser.error("nothing to measure: no prompts, no batches and no chunk")
    return options


def run(options: argparse.Namespace) -> Results:
    """The whole sitting, or what there is of it at the first Ctrl-C. `ModelLoadError` if the model cannot be had."""
    config = ModelConfig.from_folder(_folder(options.model, "bfloat16"))
    cells = standard_cells(options.prompts, options.batches, context=options.context, chunk=options.chunk, steps=options.steps)
    about = machine.describe()
    about["date"] = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    about["command"] = shlex.join(["python", "-m", "bench.engine", *sys.argv[1:]])
    about["model"] = f"{options.model}, decode at context {options.context}, {options.rounds} rounds, {options.steps} steps a run"
    results = Results(about, {}, cells, Work.of(config))
    peers = [] if "none" in options.peers else [peer for peer in PEERS if {"all", peer.name} & set(options.peers)]
    if options.model != DEMO_NAMES[0] and peers:
        results.skipped.append("peers: they are measured with the demo model only")
        peers = []
    for peer in list(peers):
        if missing := peer.missing(options.peers_dir):
            results.skipped.append(f"{peer.name}: {missing} is not there; bench/README.md says how to install it")
            peers.remove(peer)
    try:
        _measure_all(options, results, peers)
    except KeyboardInterrupt:
        results.skipped.append("the rest: stopped by hand")
    return results


def _measure_all(options: argparse.Namespace, results: Results, peers: Sequence[Peer]) -> None:
    for threads in options.threads:
        if threads > len(options.cpus):
            results.skipped.append(f"{threads} threads: only {len(options.cpus)} cores to pin to")
            continue
        cpus = options.cpus[:threads]
        say(f"{threads} thread(s) on core(s) {cpus}: probing the machine")
        sizes = sorted({results.work.weight_bytes(kind) for kind in options.kinds})
        peaks = probe.measure(threads, cpus, sizes)
        for kind in options.kinds:
            say(f"{kind}, {threads} thread(s)")
            group = Group(kind, threads, peaks)
            results.groups.append(group)
            try:
                _measure(options, results, group, cpus, [peer for peer in peers if kind in peer.models])
            except SubjectFailed as failure:
                results.skipped.append(f"{kind} with {threads} thread(s): {failure}")
                say(f"  failed: {failure}")


def _measure(options: argparse.Namespace, results: Results, group: Group, cpus: Sequence[int], peers: Sequence[Peer]) -> None:
    room = max(cell.batch * (cell.context + cell.steps + 32) + 2 * max(cell.prompt, cell.context) for cell in results.cells)

    def setup(model: Path, binaries: str = "-") -> Setup:
        return Setup(str(model), group.kind, group.threads, room, binaries, options.kernels)

    def start(name: str, python: str, module: str, each: Setup) -> SubjectProcess:
        subject = stack.enter_context(SubjectProcess(python, module, each, cpus))
        results.versions[f"{name} {group.kind}"] = subject.versions
        return subject

    group.whole_peers = frozenset(peer.name for peer in peers if peer.whole)
    with ExitStack() as stack:
        folder = _folder(options.model, "float32" if group.kind == "float32" else "bfloat16")
        model = start("kvrelay model", sys.executable, "bench.ours", setup(folder))
        engine = start("kvrelay engine", sys.executable, "bench.ours_engine", setup(folder))
        answer = model.greedy(QUESTION, 8) if options.model == DEMO_NAMES[0] else None
        for cell in results.cells:
            say(f"  {cell.name}")
            try:
                group.engine[cell.name] = in_turn(model, engine, cell, options.rounds)
                group.model[cell.name] = group.engine[cell.name].ours
            except NotMeasured:
                group.model[cell.name] = alone(model, cell, options.rounds)
        for peer in peers:
            say(f"  against {peer.name}")
            python = str(options.peers_dir / peer.python) if peer.python else sys.executable
            note = partial(_note, results, f"{peer.name}, {group.kind}, {group.threads} thread(s)")
            try:
                source = _source(options, peer.models[group.kind])
                theirs = start(peer.name, python, peer.module, setup(source, str(options.peers_dir / peer.binaries)))
                _check_answer(theirs, answer)
                ours = engine if peer.whole else model
                found = group.peers.setdefault(peer.name, {})
                for pairing in measured(ours, theirs, results.cells, options.rounds, say, note):
                    found[pairing.cell.name] = pairing
                theirs.close()
            except (SubjectFailed, KvRelayError, OSError) as failure:
                note(f"failed: {failure}")


def _note(results: Results, what: str, text: str) -> None:
    """Into the report, and to whoever waits for it."""
    results.skipped.append(f"{what}: {text}")
    say(f"    {text}")


def _check_answer(theirs: SubjectProcess, ours: list[int] | None) -> None:
    """Says so if a peer answers otherwise; rounding may do that, a wrongly converted model does."""
    try:
        answer = theirs.greedy(QUESTION, 8)
    except NotMeasured:
        return
    if answer != ours:
        say(f"    another answer to the check's question: {answer}, ours {ours}")


def _folder(model: str, dtype: str) -> Path:
    return ensure_demo_model(dtype=dtype) if model == DEMO_NAMES[0] else resolve_model(model)


def _source(options: argparse.Namespace, wanted: str) -> Path:
    form, _, name = wanted.partition(":")
    return _folder(options.model, name) if form == "hf" else ensure_gguf(name)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    options = parse()
    results = run(options)
    report = markdown(results)
    print(report)
    if options.json:
        options.json.write_text(as_json(results) + "\n", encoding="utf-8")
    if options.markdown:
        target = options.markdown / f"engine-{machine.slug()}.md" if options.markdown.is_dir() else options.markdown
        target.write_text(report, encoding="utf-8")


if __name__ == "__main__":
    main()
