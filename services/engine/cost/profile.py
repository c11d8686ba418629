"""What a profile is: a model's step cost on one machine, measured by `kvrelay profile` and kept as JSON (docs/profile.md). Pure."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvrelay.errors import ConfigError
from kvrelay.handle import ModelIdentity
from services.engine.cost.coefficients import Floors, StepCoefficients
from services.engine.scheduling.step_cost import StepShape
from services.runtime.processes.machine import Machine

FORMAT, VERSION = "kvrelay-step-cost", 1
MAX_BYTES = 4 << 20
"""A larger file is no profile."""


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """Which model was measured: the parts of its identity that decide its speed."""

    name: str
    weights_digest: str
    dtype: str
    kv_dtype: str
    quantization: str
    """'none', or the scheme's full name."""

    @classmethod
    def of(cls, identity: ModelIdentity) -> ProfiledModel:
        return cls(identity.model, identity.weights_digest, identity.dtype, identity.kv_dtype, identity.quantization)


@dataclass(frozen=True, slots=True)
class Setup:
    """What computed."""

    kernels: str
    """The decoder's name: 'torch', 'native avx512-vnni'."""
    device: str
    threads: int
    block_size: int
    """Tokens a page."""
    torch: str
    """Its version."""


@dataclass(frozen=True, slots=True)
class MeasuredPoint:
    """What steps of one shape took."""

    shape: StepShape
    seconds: float
    """Median."""
    seconds_p90: float
    steps: int
    """Times it was measured."""
    held_out: bool
    """Not used for the fit."""


@dataclass(frozen=True, slots=True)
class FitError:
    """How far predictions are from the medians of the points held out, as a share of these."""

    points: int
    median: float
    p90: float


@dataclass(frozen=True, slots=True)
class Profile:
    """One model on one machine."""

    kvrelay: str
    """The version that measured."""
    measured_at: str
    """UTC, as ISO 8601."""
    model: ProfiledModel
    setup: Setup
    machine: Machine
    floors: Floors
    coefficients: StepCoefficients
    error: FitError
    points: tuple[MeasuredPoint, ...]

    def check_sizes(self, floors: Floors) -> None:
        """`ConfigError` unless these are the floors that were measured against: another model, or other dtypes."""
        for field in dataclasses.fields(Floors):
            mine, other = getattr(self.floors, field.name), getattr(floors, field.name)
            if mine != other:
                raise _error(f"it is of {self.model.name} in {self.model.dtype}, with {field.name} {mine}; this model has {other}")

    def differences(self, model: ProfiledModel, setup: Setup, machine: Machine) -> list[str]:
        """What is not as it was measured, and may change the speed: 'threads 1, now 2'."""
        pairs = {
            "weights": (self.model.weights_digest, model.weights_digest),
            "quantization": (self.model.quantization, model.quantization),
            "kernels": (self.setup.kernels, setup.kernels),
            "device": (self.setup.device, setup.device),
            "threads": (self.setup.threads, setup.threads),
            "CPU": (self.machine.cpu, machine.cpu),
        }
        return [f"{name} {then}, now {now}" for name, (then, now) in pairs.items() if then != now]

    def dump(self) -> str:
        """The file's text."""
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"


def parse_profile(text: str) -> Profile:
    """The inverse of `Profile.dump`; `ConfigError` says what is wrong with the text, and where."""
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise _error(f"not JSON: {error}") from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise _error(f"not a profile: its format is not {FORMAT!r}")
    if raw.get("version") != VERSION:
        raise _error(f"version {raw.get('version')!r} is not {VERSION}, which this release reads; measure again with `kvrelay profile`")
    profile: Profile = _decode(Profile, raw, "")
    knots = profile.coefficients.row_knots
    if len(knots) != len(profile.coefficients.row_s) or not knots or any(a >= b for a, b in zip((0, *knots), knots, strict=False)):
        raise _error("coefficients.row_knots must be ascending, from 1, and as many as row_s")
    if not any(profile.coefficients.values):
        raise _error("every coefficient is 0")
    return profile


def read_profile(path: Path, floors: Floors | None = None) -> Profile:
    """The profile in a file; `ConfigError` if it is missing, no profile, of another version, or of a model with other floors. Blocks."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise _error(f"over {MAX_BYTES} bytes")
        profile = parse_profile(path.read_text(encoding="utf-8"))
        if floors is not None:
            profile.check_sizes(floors)
        return profile
    except OSError as error:
        raise ConfigError(f"profile {path}: {error.strerror}", setting="profile") from None
    except UnicodeDecodeError:
        raise ConfigError(f"profile {path}: not text", setting="profile") from None
    except ConfigError as error:
        raise ConfigError(f"profile {path}: {error.message.removeprefix('profile: ')}", setting="profile") from None


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` as `kind`: a dataclass, a tuple of one kind, a string, a truth value, or a number that is finite and not negative."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, Mapping):
            raise _error(f"{where or 'it'} must be an object")
        hints = typing.get_type_hints(kind)
        missing = [field.name for field in dataclasses.fields(kind) if field.name not in value]
        if missing:
            raise _error(f"{'.'.join(filter(None, (where, missing[0])))} is missing")
        return kind(**{name: _decode(hints[name], value[name], f"{where}.{name}".lstrip(".")) for name in hints})
    if isinstance(kind, types.GenericAlias):
        if not isinstance(value, list):
            raise _error(f"{where} must be a list")
        return tuple(_decode(typing.get_args(kind)[0], each, f"{where}[{index}]") for index, each in enumerate(value))
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise _error(f"{where} must be a number of 0 or more")
        return float(value)
    if type(value) is not kind or (kind is int and value < 0):
        raise _error(f"{where} must be {'a whole number of 0 or more' if kind is int else 'text' if kind is str else 'true or false'}")
    return value


def _error(message: str) -> ConfigError:
    return ConfigError(f"profile: {message}", setting="profile")
