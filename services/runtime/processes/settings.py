"""Settings: frozen dataclasses whose fields say what they mean; read once, from flags and the environment, in `__main__`.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        port: int = setting(0, "port to listen on; 0 takes a free one", unit="port", minimum=0, maximum=65535)

`--port 7000` wins over `KVRELAY_PORT=7000`, which wins over the default.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from kvrelay.errors import ConfigError
from services.runtime.processes.version import version_text

S = TypeVar("S")

REQUIRED: Final[Any] = dataclasses.MISSING
"""As a default: the setting must be given."""

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True, slots=True)
class _Meta:
    doc: str
    unit: str
    env: str | None
    choices: tuple[str, ...]
    minimum: float
    maximum: float
    check: Callable[[str], None] | None


def setting(
    default: Any,
    doc: str,
    unit: str = "",
    env: str | None = None,
    choices: Sequence[str] | None = None,
    minimum: float = -math.inf,
    maximum: float = math.inf,
    check: Callable[[str], None] | None = None,
) -> Any:
    """A dataclass field that is a setting. `env` replaces `KVRELAY_<NAME>`; `minimum` and `maximum` are inclusive.

    `check` raises `ConfigError` for a text that will not do; its message is put behind the setting's name. Numbers are always finite.

    Types: str, int, float, bool, Path, tuple[str, ...] (comma-separated), and each of them `| None`.
    """
    meta = _Meta(doc, unit, env, tuple(choices or ()), minimum, maximum, check)
    if default is REQUIRED:
        return dataclasses.field(metadata={"setting": meta})
    return dataclasses.field(default=default, metadata={"setting": meta})


Version = Callable[[Mapping[str, str]], str]
"""What `--version` says, given the environment."""


def load_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str, version: Version = version_text) -> S:
    """The settings; a wrong one ends the process with one line on stderr and status 2, `--help` and `--version` with status 0."""
    if "--version" in argv:
        sys.stdout.write(version(environ) + "\n")
        raise SystemExit(0)
    try:
        return parse_settings(cls, argv, environ, prog)
    except ConfigError as error:
        sys.stderr.write(f"{prog}: {error.message}\n")
        raise SystemExit(2) from None


def parse_settings(cls: type[S], argv: Sequence[str], environ: Mapping[str, str], prog: str = "kvrelay") -> S:
    """The settings, or `ConfigError` naming the setting, its unit and its range."""
    parser = _Parser(prog=prog, description=(cls.__doc__ or "").split("\n")[0], allow_abbrev=False, formatter_class=_HelpFormatter)
    parser.add_argument("--version", action="store_true", help="show what this is, and end")
    for field, kind, meta in _settings(cls):
        option: dict[str, Any] = {"dest": field.name, "default": None, "help": _help(field, kind, meta)}
        if _base(kind) is bool:
            parser.add_argument(_flag(field.name), nargs="?", const="true", metavar="BOOL", **option)
            parser.add_argument(f"--no-{_kebab(field.name)}", dest=field.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            parser.add_argument(_flag(field.name), metavar=(meta.unit or _kind_name(kind)).upper().replace(" ", "_"), **option)
    given = vars(parser.parse_args(list(argv)))
    values: dict[str, Any] = {}
    for field, kind, meta in _settings(cls):
        env = _env_name(field.name, meta)
        text, source = given[field.name], _flag(field.name)
        if text is None and environ.get(env, "") != "":
            text, source = environ[env], env
        if text is not None:
            values[field.name] = _parse(text, kind, meta, source)
        elif field.default is dataclasses.MISSING:
            raise ConfigError(f"{_flag(field.name)} (or {env}) is required: {meta.doc}", setting=field.name)
    return cls(**values)


def _settings(cls: Any) -> list[tuple[dataclasses.Field[Any], Any, _Meta]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name], field.metadata["setting"]) for field in dataclasses.fields(cls) if "setting" in field.metadata]


def _parse(text: str, kind: Any, meta: _Meta, source: str) -> Any:
    base = _base(kind)
    what = f"{source} ({meta.unit})" if meta.unit else source
    value: Any
    try:
        if base is bool:
            if text.lower() not in _TRUE | _FALSE:
                raise ValueError
            return text.lower() in _TRUE
        if base is int:
            value = int(text.replace("_", ""))
        elif base is float:
            value = float(text)
        elif base is Path:
            value = Path(text).expanduser()
        elif typing.get_origin(base) is tuple:
            value = tuple(part.strip() for part in text.split(",") if part.strip())
        else:
            value = text
    except ValueError:
        raise ConfigError(f"{what} must be {_kind_name(kind)}, got {text!r}", setting=source) from None
    if meta.choices and value not in meta.choices:
        raise ConfigError(f"{what} must be one of {', '.join(meta.choices)}, got {text!r}", setting=source)
    if base is float and not math.isfinite(value):
        raise ConfigError(f"{what} must be a finite number, got {text}", setting=source)
    if base in (int, float) and not meta.minimum <= value <= meta.maximum:
        raise ConfigError(f"{what} must be {_range(meta)}, got {text}", setting=source)
    if meta.check is not None and text:
        try:
            meta.check(text)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error.message}", setting=source) from None
    return value


def _base(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind


def _kind_name(kind: Any) -> str:
    base = _base(kind)
    if typing.get_origin(base) is tuple:
        return "list"
    return {int: "integer", float: "number", bool: "true or false", Path: "path"}.get(base, "text")


def _range(meta: _Meta) -> str:
    if meta.minimum == -math.inf and meta.maximum == math.inf:
        return "a number"
    if meta.maximum == math.inf:
        return f"{meta.minimum:g} or more"
    return f"at most {meta.maximum:g}" if meta.minimum == -math.inf else f"from {meta.minimum:g} to {meta.maximum:g}"


def _help(field: dataclasses.Field[Any], kind: Any, meta: _Meta) -> str:
    notes = [meta.unit] if meta.unit else []
    if meta.choices:
        notes.append("one of " + ", ".join(meta.choices))
    elif _base(kind) in (int, float) and (meta.minimum > -math.inf or meta.maximum < math.inf):
        notes.append(_range(meta))
    if field.default is dataclasses.MISSING:
        notes.append("required")
    else:
        default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
        notes.append(
            "default: "
            + ("none" if default in (None, "") else str(default).lower() if default is True or default is False else str(default))
        )
    return f"{meta.doc} [{'; '.join([*notes, _env_name(field.name, meta)])}]".replace("%", "%%")


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _flag(name: str) -> str:
    return f"--{_kebab(name)}"


def _env_name(name: str, meta: _Meta) -> str:
    return meta.env or f"KVRELAY_{name.upper()}"


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
