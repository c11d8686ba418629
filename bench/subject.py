"""One engine under measurement, in a process of its own: it answers one line of JSON on stdout for each line on stdin.

Runs under the interpreter of the engine's own virtual environment, so this file needs nothing but the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bench.cells import Cell


class NotMeasured(Exception):
    """This engine has no such cell; the text says why."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How an engine is to be loaded."""

    model: str
    """Hugging Face folder, or GGUF file, as the engine wants it."""
    kind: str
    """'float32', 'bfloat16' or 'int8': the class of arithmetic, see bench/README.md."""
    threads: int
    room: int
    """Tokens of KV cache to have room for."""
    binaries: str
    """Folder of the engine's programs, for one that is no Python package."""
    kernels: str
    """What kvrelay computes with; peers do not heed it."""


class Subject(Protocol):
    """An engine, loaded and ready. Weights stay loaded and caches stay allocated from run to run."""

    def versions(self) -> Mapping[str, str]:
        """What was measured: package versions, and settings that matter."""
        ...

    def run(self, cell: Cell) -> float:
        """Does the work of a cell once; returns its seconds, set-up (such as the prompts of sequences that decode) left out.

        `NotMeasured` for a cell the engine can't do.
        """
        ...

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """The likeliest `count` next tokens, end tokens not heeded: shows that the same model is measured."""
        ...


def serve(make: Callable[[Setup], Subject]) -> None:
    """Loads the engine and answers until stdin ends. What the engine prints goes to stderr."""
    parser = argparse.ArgumentParser()
    for name, kind in (("model", str), ("kind", str), ("threads", int), ("room", int), ("binaries", str), ("kernels", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--cpus", required=True)
    arguments = vars(parser.parse_args())
    os.sched_setaffinity(0, {int(cpu) for cpu in arguments.pop("cpus").split(",")})
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(**values: object) -> None:
        print(json.dumps(values), file=answers, flush=True)

    try:
        subject = make(Setup(**arguments))
        answer(versions=dict(subject.versions()))
    except Exception as error:
        answer(error=f"{type(error).__name__}: {error}")
        raise
    for line in sys.stdin:
        before = _cpu_seconds()
        try:
            values = _handle(subject, json.loads(line))
        except NotMeasured as reason:
            answer(not_measured=str(reason))
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}")
            raise
        else:
            answer(cpu_seconds=_cpu_seconds() - before, **values)


def _handle(subject: Subject, request: dict[str, Any]) -> dict[str, object]:
    if "greedy" in request:
        return {"token_ids": subject.greedy(request["greedy"], request["count"])}
    return {"seconds": subject.run(Cell(**request["cell"]))}


def _cpu_seconds() -> float:
    """CPU time of this process and of programs it ran."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    """Reproducible token ids, none of the first hundred: those are often special."""
    ids = []
    state = seed * 2 + 1
    for _ in range(length):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append(100 + (state >> 33) % (vocab_size - 100))
    return ids
