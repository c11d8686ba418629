"""Commands of `kvrelay` that the suite itself carries out: they need its application tree, of which this package knows only names."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from kvrelay.errors import ConfigError

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "profile": "services.engine.measure",
        "doctor": "services.engine.checks.doctor",
        "kv-size": "services.engine.cost.kv_size",
    }
)
"""Command: the module that carries it out."""
HELP: Mapping[str, str] = MappingProxyType(
    {
        "profile": "measure what a model's steps cost on this machine, and write a profile",
        "doctor": "check whether this machine can serve, and what is missing",
        "kv-size": "say how large a prompt's KV is, and what moving it would cost",
    }
)


def run(command: str, argv: Sequence[str], environ: Mapping[str, str]) -> NoReturn:
    """Becomes the suite's process for `command`; raises `ConfigError` where there is no suite."""
    root = suite_root(MODULES[command])
    sys.stdout.flush()
    sys.stderr.flush()
    path = os.pathsep.join(filter(None, (str(root), environ.get("PYTHONPATH", ""))))
    os.execve(sys.executable, [sys.executable, "-m", MODULES[command], *argv], {**environ, "PYTHONPATH": path})


def suite_root(module: str) -> Path:
    """The folder that holds `services/`: one that Python imports from, or the current one. Raises `ConfigError`; imports nothing."""
    parts = module.split(".")
    for place in (*sys.path, os.getcwd()):
        spec = importlib.machinery.PathFinder.find_spec(parts[0], [place or os.getcwd()])
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            if Path(folder, *parts[1:]).with_suffix(".py").is_file():
                return Path(folder).parent.resolve()
    raise ConfigError(
        "this command needs the suite's application tree: run it in a checkout or image that has services/, with the Python of its workers"
    )
