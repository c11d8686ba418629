"""Run as a process of its own: turns what a model was called into a folder, and prints that folder as one line of JSON.

On a new machine it also compiles the native kernels, so that the workers, which start together, find them made.

It is a process because a conversion needs torch, which the launcher has no other use for.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path

from kvrelay.errors import ModelLoadError
from services.runtime.processes.signals import unwound_by_sigterm


def main(name: str, cache_dir: str, dtype: str, kernels: str) -> int:
    """Prints {"path": folder, "name": what requests call it} and returns 0, or {"error": message} and returns 1."""
    from services.engine.demo.model import resolve_model, served_name
    from services.engine.model.native.build import NativeKernelsUnavailable, library_path

    cache = Path(cache_dir).expanduser()
    if kernels != "torch":
        # A worker says in its log what computes instead, or refuses to start.
        with contextlib.suppress(NativeKernelsUnavailable):
            library_path(cache)
    try:
        folder = resolve_model(name, cache, dtype)
        answer = {"path": str(folder.resolve()), "name": served_name(name, folder)}
    except ModelLoadError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    with unwound_by_sigterm():
        sys.exit(main(*sys.argv[1:]))
