"""The Dockerfile, read: what each target installs and holds. Building images needs a container engine, which tests cannot count on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("router", "kvstore", "prefill", "decode")


@dataclass(slots=True)
class Stage:
    """One FROM of the Dockerfile."""

    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)


def stages() -> dict[str, Stage]:
    text = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[str, Stage] = {}
    current = Stage("")
    for line in text.splitlines():
        word, _, rest = line.strip().partition(" ")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            current = found[name] = Stage(base)
        elif word and not word.startswith("#"):
            current.instructions.append((word, rest.strip()))
    return found


def chain(target: str) -> list[tuple[str, str]]:
    """All instructions that make `target`, those of its bases first."""
    every = stages()
    stage = every[target]
    return [*(chain(stage.base) if stage.base in every else []), *stage.instructions]


def all_of(target: str, word: str) -> list[str]:
    return [rest for instruction, rest in chain(target) if instruction == word]


def test_every_role_has_a_target() -> None:
    assert set(ROLES) <= set(stages())


@pytest.mark.parametrize("role", ["router", "kvstore"])
def test_router_and_store_carry_no_torch(role: str) -> None:
    installs = " ".join(all_of(role, "RUN"))
    assert f"--group {role}" in installs
    assert "torch" not in installs
    assert "--group worker" not in installs


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_workers_carry_torch_of_the_version_the_suite_is_tested_with(role: str) -> None:
    pinned = next(line for line in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines() if "torch==" in line)
    version = pinned.split("torch==")[1].split('"')[0]
    assert f"torch=={version}" in " ".join(all_of(role, "RUN"))


@pytest.mark.parametrize("role", ROLES)
def test_images_run_as_an_ordinary_user_with_a_health_check(role: str) -> None:
    assert all_of(role, "USER")[-1] not in ("root", "0")
    assert "services.runtime.rpc.probe" in all_of(role, "HEALTHCHECK")[-1]
    assert f"services.{role}" in all_of(role, "CMD")[-1]


@pytest.mark.parametrize("role", ROLES)
def test_an_image_holds_every_file_its_service_imports(role: str, tmp_path: Path) -> None:
    for copy in all_of(role, "COPY"):
        *origins, target = copy.split()
        for origin in origins:
            source, place = ROOT / origin, tmp_path / target
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"import services, services.{role}.__main__; print(services.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(tmp_path))
