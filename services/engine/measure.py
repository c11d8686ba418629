"""`kvrelay profile`: measures what a model's steps cost on this machine and writes a profile.

python -m services.engine.measure --model smollm2 --quantization int8 --cpus 0 --out smollm2-int8.json
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from kvrelay.errors import ConfigError, KvRelayError
from services.engine.checks.version import engine_version_text
from services.engine.cost.coefficients import Floors
from services.engine.cost.profile import Profile, ProfiledModel, Setup
from services.engine.cost.profiling import fit_points, measure, plans
from services.engine.demo.model import resolve_model, served_name
from services.engine.device_model import DeviceModel
from services.engine.model.identity import identity_of, read_tokenizer_files
from services.engine.model.kv_pool import KvPool
from services.engine.model.llama import load_model
from services.engine.model.quantization import SCHEMES
from services.engine.model.torch_decoder import TorchDecoder
from services.engine.settings import BLOCK_SIZES, EngineSettings
from services.runtime.processes.machine import this_machine
from services.runtime.processes.settings import load_settings, setting
from services.runtime.processes.version import installed

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class MeasureSettings:
    """Measures what a model's steps cost on this machine and writes a profile."""

    model: str = setting("smollm2", "model folder (Hugging Face style), hub name, or 'smollm2' for the demo model")
    cache_dir: str = setting("~/.cache/kvrelay", "where converted models and compiled kernels are kept", env="KVRELAY_CACHE")
    dtype: str = setting("bfloat16", "dtype of the weights", choices=("bfloat16", "float32"))
    kv_dtype: str = setting("bfloat16", "dtype of the KV cache", choices=("bfloat16", "float32"))
    quantization: str = setting("none", "int8: 8-bit weights and activations in the linears", choices=("none", "int8"))
    kernels: str = setting("auto", "what computes on CPUs; auto: native where a compiler is at hand", choices=("auto", "native", "torch"))
    device: str = setting("cpu", "torch device")
    threads: int = setting(1, "computing threads", unit="threads", minimum=1)
    cpus: tuple[str, ...] = setting((), "cores to pin the computing threads to, such as 0 or 0,1; empty: none")
    block_size: int = setting(16, "tokens a KV block; a power of two", unit="tokens")
    max_num_batched_tokens: int = setting(256, "tokens a step computes at most", unit="tokens", minimum=1)
    quick: bool = setting(False, "fewer kinds of steps, for a first idea")
    seconds: float = setting(0.0, "about how long to measure, at least three rounds; 0: 60, or 8 with --quick", unit="s", minimum=0)
    seed: int = setting(0, "of the order, and of the steps held out to test the fit")
    out: str = setting("", "file to write; empty: only show")


def run(settings: MeasureSettings, say: Say) -> Profile:
    """Measures; blocks for as long as it is to take, and the time to load. Raises `ModelLoadError` and `ConfigError`."""
    machine = this_machine()
    if settings.cpus:
        try:
            os.sched_setaffinity(0, map(int, settings.cpus))
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(f"--cpus must be cores this process may run on, got {','.join(settings.cpus)}", setting="cpus") from error
    cache_dir = Path(settings.cache_dir).expanduser()
    folder = resolve_model(settings.model, cache_dir, settings.dtype)
    options = EngineSettings(
        folder,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        quantization=settings.quantization,
        kernels=settings.kernels,
        device=settings.device,
        block_size=settings.block_size,
        threads=settings.threads,
        cache_dir=cache_dir,
    ).check()
    torch.set_num_threads(1)
    model = load_model(folder, options)
    if model.decoder.name == TorchDecoder.name:
        torch.set_num_threads(settings.threads)
    identity = identity_of(
        folder,
        model.config,
        read_tokenizer_files(folder),
        model=served_name(settings.model, folder),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        numerics=model.decoder.numerics,
        quantization=SCHEMES[settings.quantization],
    )
    floors = Floors.of(model.config, dtype=settings.dtype, kv_dtype=settings.kv_dtype, quantization=settings.quantization)
    steps = plans(context=model.config.max_positions, rows=settings.max_num_batched_tokens, quick=settings.quick, seed=settings.seed)
    pool = KvPool(
        model.config, max(step.pages(settings.block_size) for step in steps), settings.block_size, options.kv_dtype, options.device
    )
    # Memory that was never written is one page of zeros to the system, and read faster than any real cache.
    pool.data.normal_()
    budget_s = settings.seconds or (8.0 if settings.quick else 60.0)
    say(f"measuring {len(steps)} kinds of steps of {identity.model} with {model.decoder.name} for about {budget_s:g} s")
    points = measure(
        DeviceModel(model, pool),
        steps,
        block_size=settings.block_size,
        budget_s=budget_s,
        clock=time.perf_counter,
        busy_clock=time.thread_time,
        seed=settings.seed,
    )
    coefficients, fit_error = fit_points(floors.guess(), points)
    return Profile(
        kvrelay=installed("kvrelay"),
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
        model=ProfiledModel.of(identity),
        setup=Setup(model.decoder.name, settings.device, settings.threads, settings.block_size, torch.__version__),
        machine=machine,
        floors=floors,
        coefficients=coefficients,
        error=fit_error,
        points=tuple(points),
    )


def render(profile: Profile) -> str:
    """The points beside what the fit says of them, and how far it is off those it has not seen."""
    lines = [f"{'prefill':>8} {'pairs':>8} {'decodes':>8} {'positions':>9} {'median ms':>10} {'p90':>8} {'predicted':>10} {'off':>6}"]
    for point in profile.points:
        shape, predicted = point.shape, profile.coefficients.predict_s(point.shape)
        lines.append(
            f"{shape.prefill_tokens:>8} {shape.prefill_context:>8} {shape.decode_seqs:>8} {shape.decode_context:>9} "
            f"{point.seconds * 1e3:>10.2f} {point.seconds_p90 * 1e3:>8.2f} {predicted * 1e3:>10.2f} {predicted / point.seconds - 1:>+6.0%}"
            + (" held out" if point.held_out else "")
        )
    error, floors = profile.error, profile.floors
    lines += [
        f"held-out steps: {error.median:.1%} off at the median, {error.p90:.1%} at the 90th percentile, of {error.points} kinds",
        f"floors: a decode step reads {floors.decode_step_bytes / 1e6:.1f} MB and {floors.kv_position_bytes / 1e3:.1f} kB a position, "
        f"a prompt token takes {floors.token_flops / 1e9:.3f} GFLOP and {floors.pair_flops / 1e6:.3f} MFLOP a position it sees",
    ]
    return "\n".join(lines)


def write(profile: Profile, path: Path) -> None:
    """Puts the whole file in place at once; `ConfigError` if it cannot."""
    made = ""
    try:
        handle, made = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(profile.dump())
        os.chmod(made, 0o644)
        os.replace(made, path)
    except OSError as error:
        with suppress(OSError):
            os.unlink(made)
        raise ConfigError(f"--out: {path} cannot be written: {error.strerror}", setting="out") from None


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Exit status 0, or 1 after one line on stderr."""
    settings = load_settings(MeasureSettings, argv, environ, "kvrelay profile", engine_version_text)
    out = Path(settings.out).expanduser()

    def say(text: str) -> None:
        sys.stderr.write(text + "\n")

    try:
        if settings.block_size not in BLOCK_SIZES:
            raise ConfigError(f"--block-size (tokens) must be one of {', '.join(map(str, BLOCK_SIZES))}, got {settings.block_size}")
        if settings.out and not out.parent.is_dir():
            raise ConfigError(f"--out: there is no folder {out.parent}", setting="out")
        profile = run(settings, say)
        sys.stdout.write(render(profile) + "\n")
        if settings.out:
            write(profile, out)
            say(f"written to {out}")
    except KvRelayError as error:
        sys.stderr.write(f"error: {error.reason}: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
