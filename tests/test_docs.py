"""Tables in the documents say what the code says. A failure prints the table that belongs there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvrelay import errors
from services.launcher.settings import SuiteSettings
from services.runtime.telemetry import names

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PROTOCOL = ROOT / "docs" / "protocol.md"
ARCHITECTURE = ROOT / "docs" / "architecture.md"


def marked(document: Path, name: str) -> str:
    """What stands between `<!-- name -->` and `<!-- /name -->`."""
    found = re.search(rf"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", document.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"{document.name} has no part marked {name}"
    return found.group(1)


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tree(root: type[errors.KvRelayError]) -> Iterator[type[errors.KvRelayError]]:
    yield root
    for child in root.__subclasses__():
        yield from tree(child)


def error_table() -> str:
    rows = []
    for cls in tree(errors.KvRelayError):
        if cls.__module__ == errors.__name__ and cls is not errors.KvRelayError:
            meaning = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
            rows.append([f"`{cls.reason}`", f"`{cls.__name__}`", cls.code, "yes" if cls.retryable else "", meaning])
    return table(["reason", "class", "gRPC code", "retryable", "meaning"], rows)


def settings_table() -> str:
    rows = []
    for field in dataclasses.fields(SuiteSettings):
        meta = field.metadata["setting"]
        default = str(field.default).lower() if isinstance(field.default, bool) else str(field.default)
        choices = f" ({', '.join(meta.choices)})" if meta.choices else ""
        rows.append([f"`--{field.name.replace('_', '-')}`", f"`{default}`" if default else "", meta.unit, meta.doc + choices])
    return table(["flag", "default", "unit", "meaning"], rows)


@pytest.mark.parametrize(
    ("document", "name", "expected"),
    [(PROTOCOL, "errors", error_table()), (README, "settings", settings_table())],
    ids=["errors", "settings"],
)
def test_a_table_says_what_the_code_says(document: Path, name: str, expected: str) -> None:
    assert marked(document, name) == expected, f"\n{expected}\n"


def test_exactly_the_spans_that_services_record_are_described() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "services").rglob("*.py") if "launcher" not in path.parts)
    recorded = {getattr(names, name) for name in re.findall(r"names\.(SPAN_[A-Z_]+)", code)}
    described = re.findall(r"^\| `([\w.]+)` \|", marked(PROTOCOL, "spans"), re.MULTILINE)
    assert sorted(described) == sorted(recorded)


@pytest.mark.parametrize("document", [README, PROTOCOL, ARCHITECTURE], ids=lambda path: path.name)
def test_files_that_documents_name_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    quoted = re.findall(r"`((?:kvrelay|services|proto|tests|deploy|docs)/[\w./-]*\w)`", text)
    missing = [name for name in linked if not (document.parent / name).exists()]
    missing += [name for name in quoted if not (ROOT / name).exists()]
    assert missing == []


def test_the_readme_names_only_targets_that_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", README.read_text(encoding="utf-8"), re.MULTILINE)) <= targets
