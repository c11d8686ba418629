"""`kvrelay doctor`: what it finds, and what it makes of a machine that breaks a promise."""

from __future__ import annotations

import json
import socket
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvrelay.errors import ConfigError, UnavailableError
from services.engine.checks import doctor
from services.engine.checks import exactness as exactness_check
from services.engine.checks import start as start_check
from services.engine.checks.doctor import DoctorSettings, Finding, examine, main
from services.engine.checks.exactness import probe_model
from services.engine.checks.start import check_exactness
from services.engine.model.llama import LlamaModel, ModelOptions
from services.engine.model.native import build

ROOT = Path(__file__).resolve().parents[3]
TORCH = ModelOptions(kernels="torch")
BROKEN = ["torch: 33 tokens together, whole: other logits", "torch: 270 tokens alone, in chunks of 64: other KV"]


def _broken(model: LlamaModel, *, lengths: Sequence[int] = (), seed: int = 0) -> list[str]:
    return BROKEN


def found(check: str, findings: Sequence[Finding]) -> Finding:
    return next(finding for finding in findings if finding.check == check)


def test_torch_is_the_one_that_the_project_pins() -> None:
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["dependency-groups"]
    assert f"torch=={doctor.PINNED_TORCH}" in groups["worker"]


def test_a_violated_rule_fails_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exactness_check, "violations", _broken)
    monkeypatch.setattr(build, "COMPILERS", ())
    findings = list(doctor.check_kernels(DoctorSettings()))
    assert found("exact int8 torch", findings).status == "fail"
    assert BROKEN[0] in found("exact int8 torch", findings).detail
    assert found("native kernels", findings).status == "warn" and "no C++ compiler" in found("native kernels", findings).detail
    assert found("kernels", findings).detail == "--kernels auto takes torch"


def test_every_kind_of_weights_is_tried_with_every_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(exactness_check, "violations", lambda model: tried.append((model.options, model.decoder.name)) or [])
    statuses = {finding.check: finding.status for finding in doctor.check_kernels(DoctorSettings())}
    decoders = ["torch"] if statuses["native kernels"] == "warn" else ["native", "torch"]
    assert {check for check in statuses if check.startswith("exact")} == {
        f"exact {kind} {kernels}" for kind in ("float32", "bfloat16", "int8") for kernels in decoders
    }
    assert len({(options.dtype, options.quantization, name) for options, name in tried}) == 3 * len(decoders)


def test_one_failure_is_exit_status_1_and_does_not_hide_the_rest(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def known(settings: DoctorSettings) -> Iterator[Finding]:
        yield Finding("before", "ok", "fine")
        raise UnavailableError("no server")

    def unknown(settings: DoctorSettings) -> Iterator[Finding]:
        raise RuntimeError("odd")
        yield

    def last(settings: DoctorSettings) -> Iterator[Finding]:
        yield Finding("last", "warn", "slow")

    monkeypatch.setattr(doctor, "CHECKS", {"known": known, "unknown": unknown, "last": last})
    assert main(["--json"], {}) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert [(each["check"], each["status"]) for each in told["findings"]] == [
        ("before", "ok"), ("known", "fail"), ("unknown", "fail"), ("last", "warn"),
    ]  # fmt: skip
    assert main([], {}) == 1
    assert "not fit to serve: known, unknown" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "CHECKS", {"last": last})
    assert main([], {}) == 0


def test_this_machine_passes_what_costs_nothing_to_check(tmp_path: Path) -> None:
    cheap = {name: check for name, check in doctor.CHECKS.items() if name not in ("kernels", "redis")}
    findings = list(examine(DoctorSettings(cache_dir=str(tmp_path / "new")), cheap))
    assert {finding.check for finding in findings} >= {"python", "torch", "cpu", "cores", "memory", "cache", "loopback", "port"}
    assert not [finding for finding in findings if finding.status == "fail"]


def test_a_port_in_use_and_a_cache_that_cannot_be_written_are_found(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        findings = list(doctor.check_ports(DoctorSettings(port=taken.getsockname()[1])))
    assert found("port", findings).status == "warn"
    (tmp_path / "file").touch()
    assert [each.status for each in doctor.check_cache(DoctorSettings(cache_dir=str(tmp_path / "file" / "cache")))] == ["fail"]


def test_a_wrong_option_is_exit_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--port", "0"], {})
    assert caught.value.code == 2 and "--port" in capsys.readouterr().err


def test_a_worker_warns_refuses_or_serves_as_it_was_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    model = probe_model(TORCH)
    check_exactness(model, "refuse")
    monkeypatch.setattr(start_check, "violations", _broken)
    check_exactness(model, "off")
    assert not caplog.records
    check_exactness(model, "warn")
    assert [record.levelname for record in caplog.records] == ["WARNING"] and BROKEN[0] in caplog.text
    with pytest.raises(ConfigError, match="33 tokens together"):
        check_exactness(model, "refuse")
