"""What a suite's processes would refuse, said before any of them is started, by their own checks as far as these need no torch."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

from kvrelay.errors import ConfigError
from services.engine.checks.early import check_kernels, check_model, check_profile
from services.launcher.plan import worker_processes
from services.launcher.settings import SuiteSettings
from services.runtime.addresses import check_listening
from services.runtime.processes.machine import check_memory


def check_settings(settings: SuiteSettings, cores: Sequence[int]) -> None:
    """Raises `ConfigError` for what shows without the model. `cores`: what this process may run on; empty: unknown."""
    workers = worker_processes(settings, "", "", cores)
    if settings.device == "cpu":
        kept_mib = len(workers) * settings.kv_cache_mib + (settings.store_mib if settings.store else 0)
        check_memory(kept_mib << 20, f"--kv-cache-mib of {len(workers)} workers{' and --store-mib' if settings.store else ''}")
    check_listening(settings.host, settings.port)
    check_kernels(settings.kernels, Path(settings.cache_dir).expanduser())
    check_profile(settings.profile)
    if settings.explain_schedule:
        check_writable("--explain-schedule", settings.explain_schedule)


def check_chosen_model(settings: SuiteSettings) -> None:
    """Raises `ModelLoadError` or `ConfigError` for what shows once `settings.model` is a folder."""
    check_model(
        Path(settings.model),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        quantization=settings.quantization,
        block_size=settings.block_size,
        kv_cache_bytes=settings.kv_cache_mib << 20,
        profile=settings.profile,
    )


def check_writable(flag: str, folder: str) -> None:
    """Makes the folder that was given by `flag`, if need be; `ConfigError` if nothing can be written there."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"{flag} {folder} cannot be written to: {error.strerror}") from None
