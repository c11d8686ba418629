"""Whether answers depend on company: many random requests, crowded together on workers with too few pages, against each alone.

Crowded, they share steps, prefixes and pages under random policies and budgets, lose their pages and compute again; with
`--split` their KV is computed on one worker and copied to another. Every token, text and log probability must be what it is alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from tokenizers import Tokenizer

from bench.exact_runs import Exactness
from bench.random_requests import LONGEST_ANSWER, differences
from kvrelay.errors import KvRelayError
from services.engine.demo.model import DEMO_NAMES, ensure_demo_model, resolve_model
from services.engine.model.llama import DTYPES, KERNELS, ModelOptions, load_model
from services.engine.model.quantization import SCHEMES

SHOWN = 10
"""Mismatches told one by one."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.exactness", description=__doc__)
    parser.add_argument("--model", default=DEMO_NAMES[0], help="model folder, or the demo model")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--longest", type=int, default=1500, help="tokens of the longest prompt")
    parser.add_argument("--dtype", default="bfloat16", choices=list(DTYPES), help="of the weights")
    parser.add_argument("--kv-dtype", default="bfloat16", choices=list(DTYPES))
    parser.add_argument("--quantization", default="none", choices=list(SCHEMES))
    parser.add_argument("--kernels", default="auto", choices=list(KERNELS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--split", action="store_true", help="prefill and decode on different workers")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.requests < 1 or options.longest < 2 or options.threads < 1:
        parser.error("needs at least one request, prompts of up to at least 2 tokens, and a thread")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints what was done, as JSON; 1 if any answer was another than alone, 2 if the model could not be had."""
    options = parse(arguments)
    try:
        exactness = load(options)
    except KvRelayError as error:
        print(f"exactness: {error}", file=sys.stderr)
        return 2
    requests = exactness.requests(options.seed, options.requests)
    started = time.perf_counter()
    crowded = exactness.crowded(options.seed, requests, split=options.split, done=progress("crowded", len(requests)))
    between = time.perf_counter()
    alone = exactness.alone(requests, progress("alone", len(requests)))
    mismatches = differences(requests, alone, crowded)
    for line in mismatches[:SHOWN]:
        print(line, file=sys.stderr)
    report = {
        "model": options.model,
        "decoder": exactness.model.decoder.name,
        "weights": options.dtype,
        "kv": options.kv_dtype,
        "quantization": SCHEMES[options.quantization],
        "threads": options.threads,
        "split": options.split,
        "seed": options.seed,
        **asdict(exactness.counts),
        "crowded_s": round(between - started, 1),
        "alone_s": round(time.perf_counter() - between, 1),
        "mismatches": len(mismatches),
    }
    print(json.dumps(report, indent=2))
    return 1 if mismatches else 0


def load(options: argparse.Namespace) -> Exactness:
    torch.set_num_threads(options.threads)
    demo = options.model.lower() in DEMO_NAMES
    folder = ensure_demo_model(dtype=options.dtype) if demo else resolve_model(options.model)
    model = load_model(
        folder,
        ModelOptions(
            DTYPES[options.dtype], DTYPES[options.kv_dtype], options.quantization, kernels=options.kernels, threads=options.threads
        ),
    )
    longest = min(options.longest, model.config.max_positions - LONGEST_ANSWER)
    return Exactness(model, Tokenizer.from_file(str(folder / "tokenizer.json")), longest)


def progress(what: str, total: int) -> Callable[[], None]:
    """To be called once a request; tells how far it is, now and then."""
    count, told = 0, time.monotonic()

    def done() -> None:
        nonlocal count, told
        count += 1
        if time.monotonic() - told > 10:
            told = time.monotonic()
            print(f"{what}: {count} of {total}", file=sys.stderr)

    return done


if __name__ == "__main__":
    sys.exit(main())
