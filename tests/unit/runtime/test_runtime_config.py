"""Settings from flags and environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError
from services.runtime.processes.settings import REQUIRED, load_settings, parse_settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a test."""

    model: str = setting(REQUIRED, "model folder")
    port: int = setting(0, "port to listen on; 0 takes a free one", unit="port", minimum=0, maximum=65535)
    ttl_s: float = setting(6.0, "time to live", unit="seconds", minimum=0.1)
    mode: str = setting("hybrid", "how to serve", choices=("split", "hybrid"))
    warm: bool = setting(True, "warm up first, 100% of the time")
    folder: Path | None = setting(None, "a folder")  # noqa: RUF009
    stores: tuple[str, ...] = setting((), "addresses")
    otlp: str | None = setting(None, "collector", env="OTEL_EXPORTER_OTLP_ENDPOINT")


def parse(*argv: str, **environ: str) -> Settings:
    return parse_settings(Settings, argv, environ)


def test_defaults_environment_and_flags_in_rising_order() -> None:
    assert parse("--model", "m").port == 0
    assert parse("--model", "m", KVRELAY_PORT="7000").port == 7000
    assert parse("--model", "m", "--port", "7001", KVRELAY_PORT="7000").port == 7001
    assert parse(KVRELAY_MODEL="m").model == "m"


def test_an_empty_variable_is_no_value() -> None:
    assert parse("--model", "m", KVRELAY_PORT="").port == 0


def test_a_named_variable_replaces_the_derived_one() -> None:
    settings = parse("--model", "m", OTEL_EXPORTER_OTLP_ENDPOINT="http://c:4317", KVRELAY_OTLP="ignored")
    assert settings.otlp == "http://c:4317"


def test_each_type_is_parsed() -> None:
    settings = parse("--model", "m", "--ttl-s", "1.5", "--folder", "/tmp/x", "--stores", "a:1, b:2", "--no-warm")
    assert (settings.ttl_s, settings.folder, settings.stores, settings.warm) == (1.5, Path("/tmp/x"), ("a:1", "b:2"), False)
    assert parse("--model", "m", "--warm").warm and not parse("--model", "m", "--warm", "off").warm
    assert parse("--model", "m", KVRELAY_WARM="no").warm is False


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        ((), ["--model", "KVRELAY_MODEL", "model folder"]),
        (("--model", "m", "--port", "70000"), ["--port", "port", "from 0 to 65535", "70000"]),
        (("--model", "m", "--port", "x"), ["--port", "integer", "'x'"]),
        (("--model", "m", "--ttl-s", "0"), ["--ttl-s", "seconds", "0.1 or more"]),
        (("--model", "m", "--ttl-s", "nan"), ["--ttl-s"]),
        (("--model", "m", "--mode", "both"), ["--mode", "split, hybrid", "'both'"]),
        (("--model", "m", "--warm", "maybe"), ["--warm", "true or false"]),
        (("--model", "m", "--prot", "1"), ["--prot"]),
        (("--model", "m", "--port"), ["--port"]),
    ],
)
def test_a_wrong_setting_is_named_with_its_unit_and_range(argv: tuple[str, ...], names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*argv)
    assert all(name in caught.value.message for name in names), caught.value.message


def test_a_wrong_variable_is_named_as_the_variable() -> None:
    with pytest.raises(ConfigError, match="KVRELAY_PORT"):
        parse("--model", "m", KVRELAY_PORT="x")


def test_a_wrong_setting_ends_the_process_with_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(Settings, ["--model", "m", "--port", "x"], {}, "kvrelay-test")
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith("kvrelay-test: --port") and output.err.count("\n") == 1 and output.out == ""


def test_help_shows_every_setting_with_unit_default_range_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_settings(Settings, ["--help"], {}, "kvrelay-test")
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "Settings of a test.", "--ttl-s", "seconds", "0.1 or more", "default: 6.0", "KVRELAY_TTL_S", "required", "one of split, hybrid",
        "OTEL_EXPORTER_OTLP_ENDPOINT", "100% of the time", "default: true", "default: none",
    ):  # fmt: skip
        assert part in text, part


def test_flags_win_over_any_environment() -> None:
    flags = (
        "--model=-dash",
        "--port",
        "5",
        "--no-warm",
        "--stores",
        "a:1,b:2",
        "--folder",
        "/x y",
        "--mode",
        "split",
        "--otlp",
        "http://c",
    )
    settings = parse(*flags, KVRELAY_MODEL="m", KVRELAY_PORT="7", KVRELAY_WARM="true", KVRELAY_MODE="hybrid")
    assert settings == Settings(
        model="-dash", port=5, warm=False, stores=("a:1", "b:2"), folder=Path("/x y"), mode="split", otlp="http://c"
    )
