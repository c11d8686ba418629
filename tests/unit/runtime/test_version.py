"""`--version`: what each process says of itself, without loading a model or torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.checks.version import engine_version_text
from services.engine.model.native import build
from services.runtime.processes.version import installed

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("module", ["services", "services.router", "services.kvstore"])
def test_a_process_says_its_version_and_ends(module: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, "--version"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"kvrelay {installed('kvrelay') or 'from a source tree'}, Python ")
    assert ("torch" in done.stdout) == (module == "services")


def test_kernels_are_those_that_auto_would_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"KVRELAY_CACHE": str(tmp_path)}
    monkeypatch.setattr(build, "COMPILERS", ())
    assert "kernels torch (no C++ compiler" in engine_version_text(environ)
    monkeypatch.setattr(build, "COMPILERS", ("true",))
    assert engine_version_text(environ).endswith("kernels native (to be compiled at the first start)")
    assert f"torch {installed('torch')}" in engine_version_text(environ)
    assert not list(tmp_path.iterdir())
