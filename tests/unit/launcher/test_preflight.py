"""What the launcher finds out about a worker's settings before it starts one, and that a worker would say the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError, ModelLoadError
from services.engine.cost.coefficients import Floors
from services.engine.engine import Engine
from services.engine.model.config import ModelConfig
from services.engine.model.native import build
from services.engine.settings import EngineSettings
from services.launcher.preflight import check_chosen_model, check_settings
from services.launcher.settings import SuiteSettings
from tests.tiny_models import tiny_config
from tests.unit.engine.test_profile import PROFILE

CORES = (0, 1)


def refused(settings: SuiteSettings) -> str:
    with pytest.raises(ConfigError) as caught:
        check_settings(settings, CORES)
    return caught.value.message


def test_what_a_worker_can_be_told_passes(tmp_path: Path, tiny_model: Path) -> None:
    check_settings(SuiteSettings(threads=2, explain_schedule=str(tmp_path / "new" / "folder")), CORES)
    check_chosen_model(SuiteSettings(model=str(tiny_model)))
    assert not list((tmp_path / "new" / "folder").iterdir())


def test_settings_that_this_machine_cannot_keep_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(SuiteSettings(threads=3)) == "--threads (threads) must be at most the 2 cores of this machine, got 3"
    file = tmp_path / "file"
    file.write_text("no profile")
    assert refused(SuiteSettings(explain_schedule=str(file))).startswith(f"--explain-schedule {file} cannot be written to")
    assert refused(SuiteSettings(profile=str(file))).startswith(f"profile {file}: not JSON")
    assert refused(SuiteSettings(profile=f"{file}s")) == f"profile {file}s: No such file or directory"
    monkeypatch.setattr(build, "COMPILERS", ())
    check_settings(SuiteSettings(kernels="auto"), CORES)
    assert refused(SuiteSettings(kernels="native")).startswith("--kernels native cannot be had here, only auto or torch: no C++ compiler")


async def test_a_kv_cache_without_room_for_a_page_is_refused_as_the_engine_would(tiny_model: Path) -> None:
    # A position takes 2 layers * 2 * 2 heads * 16 * 4 bytes.
    wanted = "--kv-cache-mib must be enough for one page, which takes 0.25 MiB, got 0.125"
    with pytest.raises(ConfigError, match=wanted):
        await Engine.start(EngineSettings(tiny_model, dtype="float32", kv_dtype="float32", block_size=512, kv_cache_bytes=1 << 17))


def test_settings_that_do_not_suit_the_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=f"{tmp_path / 'config.json'} cannot be read"):
        check_chosen_model(SuiteSettings(model=str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("llama", num_hidden_layers=64)))
    settings = SuiteSettings(model=str(tmp_path), kv_cache_mib=3, block_size=512, kv_dtype="bfloat16")
    with pytest.raises(ConfigError, match="--kv-cache-mib must be enough for one page, which takes 4 MiB, got 3"):
        check_chosen_model(settings)
    floors = Floors.of(ModelConfig.from_folder(tmp_path), dtype="bfloat16", kv_dtype="bfloat16", quantization="none")
    profile = tmp_path / "profile.json"
    settings = dataclasses.replace(settings, kv_cache_mib=4, profile=str(profile))
    profile.write_text(dataclasses.replace(PROFILE, floors=floors).dump())
    check_chosen_model(settings)
    profile.write_text(PROFILE.dump())
    with pytest.raises(ConfigError, match=f"profile {profile}: it is of tiny in bfloat16, with layer_bytes 1; this model has"):
        check_chosen_model(settings)
