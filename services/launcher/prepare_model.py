"""Run as a process of its own: turns what a model was called into a folder, and prints that folder as one line of JSON.

It is a process because this needs torch, which the launcher has no other use for.
"""

from __future__ import annotations

import json
import sys

from kvrelay.errors import ModelLoadError


def main(name: str) -> int:
    """Prints {"path": folder} and returns 0, or {"error": message} and returns 1."""
    from services.engine.demo_model import DEMO_NAMES, resolve_model

    try:
        answer = {"path": str(resolve_model(name).resolve()), "name": DEMO_NAMES[-1] if name.lower() in DEMO_NAMES else ""}
    except ModelLoadError as error:
        answer = {"error": error.message}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 1 if "error" in answer else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
