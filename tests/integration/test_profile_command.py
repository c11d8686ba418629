"""`kvrelay profile` and `kvrelay doctor` from the SDK's command line down to real steps of a tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvrelay import cli, suite_command
from kvrelay.errors import ConfigError
from services.engine import measure
from services.engine.api import EngineRequest, Failed
from services.engine.cost.profile import read_profile
from services.engine.engine import Engine
from services.engine.settings import EngineSettings
from tests.tiny_models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "llama")


@pytest.fixture(scope="module")
def measured(model: Path) -> tuple[Path, str]:
    out = model.parent / "tiny.json"
    command = [sys.executable, "-m", "kvrelay", "profile", f"--model={model}", "--quick", "--seconds=0.5", "--quantization=int8"]
    done = subprocess.run([*command, f"--out={out}"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def test_a_profile_says_what_was_measured_and_how_good_the_fit_is(measured: tuple[Path, str]) -> None:
    profile = read_profile(measured[0])
    assert (profile.model.name, profile.model.dtype) == ("tiny", "bfloat16") and profile.model.quantization != "none"
    assert profile.setup.threads == 1 and profile.setup.kernels and profile.machine.cores >= 1
    assert all(point.steps >= 3 and 0 < point.seconds <= point.seconds_p90 for point in profile.points)
    assert profile.error.points == sum(point.held_out for point in profile.points) > 0
    assert f"{profile.error.median:.1%} off at the median" in measured[1] and "held out" in measured[1]


async def test_an_engine_begins_with_its_profile_and_refuses_that_of_other_sizes(model: Path, measured: tuple[Path, str]) -> None:
    settings = EngineSettings(model, quantization="int8", profile=str(measured[0]), num_pages=32, exactness_check="refuse")
    engine = await Engine.start(settings)
    try:
        async with engine.open(EngineRequest("r", list(range(3, 40)))) as stream:
            assert not [event async for event in stream if isinstance(event, Failed)]
    finally:
        await engine.stop()
    with pytest.raises(ConfigError, match="profile: it is of tiny"):
        await Engine.start(EngineSettings(model, profile=str(measured[0]), num_pages=32))
    with pytest.raises(ConfigError, match="no-such-file"):
        await Engine.start(EngineSettings(model, profile=str(model / "no-such-file"), num_pages=32))


@pytest.mark.parametrize(
    ("args", "status", "message"),
    [
        (("--model=/no/such/folder",), 1, "error: MODEL_LOAD_FAILED: "),
        (("--out=/no/such/folder/profile.json",), 1, "error: INVALID_CONFIG: --out: there is no folder"),
        (("--cpus=4095",), 1, "error: INVALID_CONFIG: --cpus must be cores"),
        (("--block-size=3",), 1, "error: INVALID_CONFIG: --block-size"),
        (("--dtype=float8",), 2, "--dtype must be one of"),
    ],
)
def test_what_cannot_be_measured_is_one_line(args: tuple[str, ...], status: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert measure.main(args, {}) == status
    except SystemExit as end:
        assert end.code == status
    told = capsys.readouterr()
    assert message in told.err and told.err.count("\n") == 1
    assert not told.out


def test_commands_of_the_suite_need_its_application_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "services").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [])
    for command in suite_command.MODULES:
        assert cli.main([command]) == 1
        assert "error: INVALID_CONFIG: this command needs the suite's application tree" in capsys.readouterr().err


def test_the_application_tree_is_found_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", [])
    for module in suite_command.MODULES.values():
        assert suite_command.suite_root(module) == ROOT


def test_help_names_the_commands_of_the_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(suite_command.HELP) == set(suite_command.MODULES)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert all(text in shown for text in suite_command.HELP.values())
