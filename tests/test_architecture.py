"""The house rules, read off the source: who may import whom, and what stands only where it belongs.

`docs/architecture.md` explains them. A rule that fails names the file and the line.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATED = ("kvrelay/kv/v1", "kvrelay/inference/v1")
MAX_LINES = 400

HEAVY = ("torch", "numpy", "safetensors", "transformers", "gguf", "redis", "opentelemetry", "tokenizers", "jinja2")
ROLES = ("router", "prefill", "decode", "kvstore")
ROOMS = ("runtime", "engine", "relay", "worker", "launcher", *ROLES)

MAY_IMPORT = {
    "runtime": (),
    "engine": ("runtime",),
    "relay": ("runtime", "engine"),
    "worker": ("runtime", "engine", "relay"),
    "router": ("runtime",),
    "kvstore": ("runtime", "relay"),
    "prefill": ("runtime", "engine", "relay", "worker"),
    "decode": ("runtime", "engine", "relay", "worker"),
    "launcher": ("runtime", "engine"),
}
"""Downward only, and no service another service."""

INNER_ROOMS = {
    "engine": {
        "demo": (),
        "model": ("demo",),
        "sampling": (),
        "scheduling": ("api", "sampling"),
        "cost": ("api", "model", "scheduling"),
        "checks": ("cost", "demo", "model"),
    },
    "runtime": {
        "telemetry": (),
        "registry": ("addresses", "clock", "ports"),
        "rpc": ("addresses", "offloop", "ports", "telemetry"),
        "processes": ("addresses", "offloop", "rpc", "telemetry"),
    },
}
"""What the rooms of a larger one may import of it, files at its entrance included. Only the entrance sees them all."""


@dataclass(frozen=True, slots=True)
class Source:
    """One file of ours, parsed."""

    path: str
    """From the root, with slashes: 'services/router/fleet.py'."""
    tree: ast.Module
    lines: int

    @property
    def room(self) -> str:
        """'engine' for services/engine/..., 'kvrelay' for the SDK, '' for services/__main__.py."""
        parts = self.path.split("/")
        return "kvrelay" if parts[0] == "kvrelay" else parts[1] if len(parts) > 2 else ""

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def calls(self) -> Iterator[tuple[int, str]]:
        """(line, dotted name) of every call whose callee is a plain dotted name."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call):
                yield node.lineno, _dotted(node.func)

    def imports(self) -> Iterator[tuple[int, str, bool]]:
        """(line, module, whether it runs when the file is imported) of every import outside TYPE_CHECKING blocks."""
        yield from _imports(self.tree.body, at_import=True)


def _imports(body: list[ast.stmt], *, at_import: bool) -> Iterator[tuple[int, str, bool]]:
    for node in body:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, at_import) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"relative import in line {node.lineno}"
            yield node.lineno, node.module, at_import
            yield from ((node.lineno, f"{node.module}.{alias.name}", at_import) for alias in node.names)
        elif isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            yield from _imports(node.orelse, at_import=at_import)
        else:
            inside = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for field in ("body", "orelse", "finalbody"):
                yield from _imports([child for child in getattr(node, field, []) if isinstance(child, ast.stmt)], at_import=inside)
            for handler in getattr(node, "handlers", []):
                yield from _imports(handler.body, at_import=inside)
            for case in getattr(node, "cases", []):
                yield from _imports(case.body, at_import=inside)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


@cache
def sources() -> tuple[Source, ...]:
    found = []
    for folder in ("kvrelay", "services"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT).as_posix()
            if not relative.startswith(GENERATED):
                text = path.read_text(encoding="utf-8")
                found.append(Source(relative, ast.parse(text, relative), text.count("\n")))
    return tuple(found)


def violations(rule: Callable[[Source], Iterator[str]]) -> list[str]:
    return [text for source in sources() for text in rule(source)]


def is_under(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_every_room_is_known() -> None:
    folders = {path.name for path in (ROOT / "services").iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders <= set(ROOMS), "a new room needs its place in MAY_IMPORT"


def test_rooms_import_only_downward() -> None:
    def rule(source: Source) -> Iterator[str]:
        for line, module, _ in source.imports():
            parts = module.split(".")
            if parts[0] != "services" or len(parts) < 2 or parts[1] == source.room:
                continue
            if source.room == "kvrelay":
                yield f"{source.path}:{line}: the SDK imports {module}"
            elif source.room in MAY_IMPORT and parts[1] in ROOMS and parts[1] not in MAY_IMPORT[source.room]:
                yield f"{source.path}:{line}: {source.room} imports {module}"

    assert not violations(rule)


@pytest.mark.parametrize("house", sorted(INNER_ROOMS))
def test_rooms_within_a_room_import_only_downward(house: str) -> None:
    rooms = INNER_ROOMS[house]

    def rule(source: Source) -> Iterator[str]:
        if source.room != house or source.path.count("/") == 2:
            return
        inner = source.path.split("/")[2]
        for line, module, _ in source.imports():
            parts = module.split(".")
            if is_under(module, f"services.{house}") and len(parts) > 2 and parts[2] != inner and parts[2] not in rooms[inner]:
                yield f"{source.path}:{line}: {inner} imports {module}"

    folders = {path.name for path in (ROOT / "services" / house).iterdir() if path.is_dir() and any(path.glob("*.py"))}
    assert folders == set(rooms)
    assert not violations(rule)


def test_the_entrances_stay_few() -> None:
    """What one meets first: the values, the facade and its threads, the ports; the rest has a room."""
    entrances = {house: {path.stem for path in (ROOT / "services" / house).glob("[a-z]*.py")} for house in INNER_ROOMS}
    assert entrances == {
        "engine": {"api", "device_model", "engine", "measure", "runner", "settings", "stream"},
        "runtime": {"addresses", "clock", "offloop", "ports"},
    }


def test_torch_is_imported_by_the_engine_alone() -> None:
    def rule(source: Source) -> Iterator[str]:
        for line, module, _ in source.imports():
            if is_under(module, "torch", "safetensors", "transformers", "numpy", "gguf") and source.room != "engine":
                yield f"{source.path}:{line}: {module}"

    assert not violations(rule)


def test_rooms_without_torch_reach_no_part_of_the_engine_that_has_it() -> None:
    """`api` is values only, `checks.early` what the launcher asks before it starts the rest of the engine in processes of its own."""
    free = {"relay": ("services.engine.api",), "launcher": ("services.engine.api", "services.engine.checks.early")}

    def rule(source: Source) -> Iterator[str]:
        if source.room not in free:
            return
        for line, module, _ in source.imports():
            beyond = is_under(module, "services.engine") and module != "services.engine" and not is_under(module, *free[source.room])
            if beyond and source.path != "services/launcher/prepare_model.py":
                yield f"{source.path}:{line}: {module}"

    assert not violations(rule)


@pytest.mark.parametrize("module", ["api", "checks.early"])
def test_what_the_engine_has_for_others_is_free_of_torch(module: str) -> None:
    assert not loaded_by(f"services.engine.{module}") & {"torch", "numpy"}


def test_domain_code_and_engine_never_see_grpc_or_messages() -> None:
    def allowed(source: Source) -> bool:
        return (
            source.name in ("service.py", "__main__.py")
            or source.room == "runtime"
            or source.path in ("kvrelay/client.py", "kvrelay/wire.py", "kvrelay/status.py", "kvrelay/stream.py", "kvrelay/sync.py")
            or source.path.startswith("services/relay/transports/")
            or source.path in EXTRA_GRPC
        )

    def rule(source: Source) -> Iterator[str]:
        for line, module, _ in source.imports():
            if (is_under(module, "grpc", "google", "kvrelay.kv", "kvrelay.inference") or module.endswith("_pb2")) and not allowed(source):
                yield f"{source.path}:{line}: {module}"

    assert not violations(rule)


EXTRA_GRPC = {"services/worker/host.py": "what the `__main__`s of prefill and decode share: it adds servicers to the server"}
"""File: why it may."""


def test_the_environment_is_read_only_where_a_process_begins() -> None:
    allowed = {
        "kvrelay/cli.py": "command line",
        "kvrelay/client.py": "default target",
        "services/runtime/processes/entry.py": "for every `__main__`",
    }

    def rule(source: Source) -> Iterator[str]:
        if source.name == "__main__.py" or source.path in allowed or is_entry_point(source):
            return
        for node in ast.walk(source.tree):
            if _dotted(node) in ("os.environ", "os.getenv"):
                yield f"{source.path}:{getattr(node, 'lineno', 0)}: {_dotted(node)}"

    assert not violations(rule)


def is_entry_point(source: Source) -> bool:
    """A module run by `python -m`, such as the demo."""
    return any(
        isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and _dotted(node.test.left) == "__name__"
        for node in source.tree.body
    )


def test_no_task_is_started_outside_a_task_group() -> None:
    """`asyncio.create_task` makes orphans: nothing waits for them. A task group's own `create_task` is fine."""

    def rule(source: Source) -> Iterator[str]:
        for line, call in source.calls():
            if call in ("asyncio.create_task", "loop.create_task") and source.path not in TASK_EXCEPTIONS:
                yield f"{source.path}:{line}: {call}"

    assert not violations(rule)


TASK_EXCEPTIONS: dict[str, str] = {}
"""File: why it cannot use a task group."""


def test_nothing_is_unpickled() -> None:
    def rule(source: Source) -> Iterator[str]:
        for line, module, _ in source.imports():
            if is_under(module, "pickle", "cloudpickle", "marshal", "shelve"):
                yield f"{source.path}:{line}: {module}"
        for line, call in source.calls():
            if call in ("torch.load", "eval", "exec"):
                yield f"{source.path}:{line}: {call}"

    assert not violations(rule)


def test_nobody_catches_everything_in_silence() -> None:
    def rule(source: Source) -> Iterator[str]:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                yield f"{source.path}:{node.lineno}: bare except"

    assert not violations(rule)


def test_domain_code_has_no_clock_of_its_own() -> None:
    """Pure cores are told what time it is."""
    pure = (
        "services/router/placement.py", "services/router/fleet.py", "services/kvstore/store.py", "services/relay/leases.py",
        "services/engine/scheduling/scheduler.py", "services/engine/scheduling/block_manager.py", "services/launcher/plan.py",
    )  # fmt: skip

    def rule(source: Source) -> Iterator[str]:
        if source.path in pure:
            for line, module, _ in source.imports():
                if is_under(module, "time", "asyncio", "random", "socket", "threading"):
                    yield f"{source.path}:{line}: {module}"

    assert not violations(rule)


def test_files_stay_small() -> None:
    assert not [
        f"{source.path}: {source.lines} lines" for source in sources() if source.lines > MAX_LINES and source.path not in LONG_FILES
    ]


LONG_FILES: dict[str, str] = {}
"""File: why it is one thing all the same."""


def test_public_modules_say_what_they_are() -> None:
    assert not [source.path for source in sources() if source.lines > 1 and not ast.get_docstring(source.tree)]


def test_generated_packages_can_be_imported() -> None:
    for folder in ("kvrelay", "kvrelay/kv", "kvrelay/kv/v1", "kvrelay/inference", "kvrelay/inference/v1"):
        assert (ROOT / folder / "__init__.py").is_file(), folder


def test_the_wheel_holds_the_sdk_and_nothing_else() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["kvrelay"]
    needed = {requirement.split(">")[0] for requirement in project["project"]["dependencies"]}
    assert needed == {"grpcio", "protobuf", "googleapis-common-protos"}


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Top-level packages in a fresh interpreter after `import module`."""
    code = f"import sys, {module}; print(' '.join({{name.partition('.')[0] for name in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return frozenset(done.stdout.split())


def test_importing_the_sdk_costs_nothing() -> None:
    assert not loaded_by("kvrelay") & {*HEAVY, "grpc", "google", "asyncio"}


@pytest.mark.parametrize("module", ["kvrelay.client", "kvrelay.cli"])
def test_the_sdk_needs_only_grpc_and_protobuf(module: str) -> None:
    assert not loaded_by(module) & {*HEAVY, "services"}


@pytest.mark.parametrize("role", ["router", "kvstore"])
def test_a_service_without_a_model_runs_without_torch(role: str) -> None:
    assert not loaded_by(f"services.{role}.__main__") & {"torch", "transformers", "safetensors", "gguf"}


def test_the_launcher_runs_without_torch() -> None:
    assert not loaded_by("services.launcher.serve") & {"torch", "transformers", "safetensors", "gguf"}
