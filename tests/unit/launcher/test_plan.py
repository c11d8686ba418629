"""Which processes a suite has, and with which flags."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvrelay.errors import ConfigError
from services.launcher.plan import assign_cores, router_processes, store_processes, worker_processes
from services.launcher.settings import SuiteSettings
from services.launcher.supervisor import RestartPolicy
from services.runtime.processes.settings import parse_settings
from services.worker.settings import WorkerSettings

REDIS = "redis://127.0.0.1:6400/0"


def names(settings: SuiteSettings) -> list[str]:
    specs = [*store_processes(settings, REDIS), *worker_processes(settings, REDIS, "", ()), *router_processes(settings, REDIS)]
    return [spec.name for spec in specs]


def test_the_default_suite_has_one_of_each() -> None:
    assert names(SuiteSettings()) == ["kvstore-0", "prefill-0", "decode-0", "router-0"]


def test_counts_and_store_are_as_asked() -> None:
    assert names(SuiteSettings(prefill=2, decode=3, store=False)) == [
        *("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2"),
        "router-0",
    ]


def test_a_colocated_suite_has_no_prefill_worker() -> None:
    settings = SuiteSettings(mode="colocated", prefill=2)
    assert names(settings) == ["kvstore-0", "decode-0", "router-0"]
    assert "--mode=colocated" in router_processes(settings, REDIS)[0].flags


def test_workers_are_told_model_redis_and_store() -> None:
    flags = worker_processes(SuiteSettings(model="/m", dtype="float32"), REDIS, "127.0.0.1:9", ())[0].flags
    expected = {"--model=/m", "--dtype=float32", f"--redis-url={REDIS}", "--store-address=127.0.0.1:9", "--worker-id=prefill-0", "--port=0"}
    assert expected <= set(flags)


def test_empty_and_false_settings_give_no_flag() -> None:
    flags = worker_processes(SuiteSettings(), REDIS, "", ())[0].flags
    assert not [flag for flag in flags if flag.startswith(("--store-address", "--otlp-endpoint", "--debug", "--model-name"))]
    assert "--debug" in worker_processes(SuiteSettings(debug=True), REDIS, "", ())[0].flags


def test_only_router_and_store_keep_their_port_over_a_restart() -> None:
    settings = SuiteSettings(port=0)
    assert "--port=7001" in router_processes(settings, REDIS)[0].flags_for(7001)
    assert "--port=7002" in store_processes(settings, REDIS)[0].flags_for(7002)
    worker = worker_processes(settings, REDIS, "", ())[0]
    assert worker.flags_for(7003) == worker.flags


def test_each_worker_has_a_core_of_its_own_while_there_are_enough() -> None:
    assert assign_cores(2, 1, [0, 1, 4]) == [(0,), (1,)]
    assert assign_cores(2, 2, [0, 1, 4, 5]) == [(0, 1), (4, 5)]
    assert assign_cores(3, 1, [0, 1]) == [(), (), ()]
    assert assign_cores(1, 1, []) == [()]


def test_the_cores_are_divided_among_the_workers() -> None:
    def flags(cores: int, **changes: object) -> list[str]:
        specs = worker_processes(SuiteSettings(**changes), REDIS, "", range(cores))
        return [flag for flag in specs[-1].flags if flag.startswith(("--threads", "--cpus"))]

    assert flags(8) == ["--threads=4", "--cpus=4,5,6,7"]
    assert flags(2) == ["--threads=1", "--cpus=1"]
    assert flags(1) == ["--threads=1"]
    assert flags(8, threads=2, pin=False) == ["--threads=2"]
    with pytest.raises(ConfigError, match="at most the 2 cores"):
        flags(2, threads=3)
    assert flags(8, kernels="torch") == ["--threads=1", "--cpus=1"], "torch's operators keep their bits with one thread"


def test_each_side_has_its_own_policy_and_only_a_dynamic_one_an_objective() -> None:
    settings = SuiteSettings(policy="decode-only", prefill_policy="dynamic", tbt_objective_ms=50, prefill_order="shortest")
    flags = {spec.role: set(spec.flags) for spec in worker_processes(settings, REDIS, "", ())}
    assert {"--policy=dynamic", "--tbt-objective-ms=50", "--prefill-order=shortest"} <= flags["prefill"]
    assert {"--policy=decode-only", "--tbt-objective-ms=0", "--prefill-order=shortest"} <= flags["decode"]


def test_each_worker_explains_its_schedule_in_a_file_of_its_own() -> None:
    flags = [set(spec.flags) for spec in worker_processes(SuiteSettings(explain_schedule="/s", decode=2), REDIS, "", ())]
    for name, found in zip(("prefill-0", "decode-0", "decode-1"), flags, strict=True):
        assert f"--explain-schedule=/s/{name}.jsonl" in found
    assert not [flag for spec in worker_processes(SuiteSettings(), REDIS, "", ()) for flag in spec.flags if "explain" in flag]


def test_suites_and_workers_know_the_same_policies() -> None:
    def choices(cls: type, name: str) -> set[str]:
        return set(next(field for field in dataclasses.fields(cls) if field.name == name).metadata["setting"].choices)

    assert choices(SuiteSettings, "policy") | choices(SuiteSettings, "prefill_policy") == choices(WorkerSettings, "policy")
    assert choices(SuiteSettings, "prefill_order") == choices(WorkerSettings, "prefill_order")
    for role, name in (("decode", "policy"), ("prefill", "prefill_policy")):
        for policy in choices(WorkerSettings, "policy"):
            worker = WorkerSettings(policy=policy)
            if policy in choices(SuiteSettings, name):
                worker.check_role(role)
            else:
                with pytest.raises(ConfigError, match=f"--policy {policy} is not for a {role} worker"):
                    worker.check_role(role)


@pytest.mark.parametrize(
    "settings",
    [{"policy": "dynamic"}, {"prefill_policy": "dynamic"}, {"tbt_objective_ms": 20.0}, {"policy": "whole", "tbt_objective_ms": 20.0}],
)
def test_an_objective_goes_with_policy_dynamic_and_with_no_other(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--tbt-objective-ms"):
        SuiteSettings(**settings)


def test_split_without_prefill_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match="--prefill"):
        SuiteSettings(mode="split", prefill=0)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--lease-ttl-s=0.01", "0.1 or more"),
        ("--lease-ttl-s=nan", "a finite number, got nan"),
        ("--threads=-1", "0 or more"),
        ("--max-waiting=0", "1 or more"),
        ("--block-size=24", "a power of two"),
        ("--block-size=1024", "from 1 to 512"),
        ("--redis-url=foo://user:secret@x", "redis://, rediss://, unix://"),
        ("--redis-url=redis://x:port/0", "not the address of a Redis"),
    ],
)
def test_what_a_service_would_refuse_is_refused_at_once(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(SuiteSettings, [flag], {})
    assert flag.partition("=")[0] in caught.value.message
    assert message in caught.value.message
    assert "secret" not in caught.value.message


def test_workers_keep_models_where_the_launcher_prepares_them() -> None:
    settings = parse_settings(SuiteSettings, [], {"KVRELAY_CACHE": "/c"})
    assert "--cache-dir=/c" in worker_processes(settings, REDIS, "", ())[0].flags


def test_restarts_back_off_and_end_within_the_window() -> None:
    policy = RestartPolicy(max_restarts=3, window_s=60, first_delay_s=0.25, max_delay_s=0.6)
    assert policy.delay_s([], 100.0) == 0.25
    assert policy.delay_s([99.0], 100.0) == 0.5
    assert policy.delay_s([98.0, 99.0], 100.0) == 0.6
    assert policy.delay_s([97.0, 98.0, 99.0], 100.0) is None
    assert policy.delay_s([10.0, 98.0, 99.0], 100.0) == 0.6


def test_zero_restarts_means_never() -> None:
    assert RestartPolicy(max_restarts=0).delay_s([], 0.0) is None


def test_kv_that_is_not_in_host_memory_stays_on_its_worker() -> None:
    assert worker_processes(SuiteSettings(device="cuda", mode="colocated", store=False), REDIS, "", ())
    WorkerSettings(device="cuda").check_role("decode")
    for suite in ({"mode": "hybrid", "store": False}, {"mode": "split", "store": False}, {"mode": "colocated", "store": True}):
        with pytest.raises(ConfigError, match="colocated"):
            SuiteSettings(device="cuda", **suite)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="KV on cuda"):
        WorkerSettings(device="cuda").check_role("prefill")
    with pytest.raises(ConfigError, match="KV on cuda"):
        WorkerSettings(device="cuda", store_address="127.0.0.1:1").check_role("decode")


@pytest.mark.parametrize("name", ["model", "cache_dir"])
def test_an_empty_folder_name_is_refused_and_not_taken_for_the_current_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must not be empty"):
        SuiteSettings(**{name: ""})
