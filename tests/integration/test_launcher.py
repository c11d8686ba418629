"""`python -m services` as a person runs it: real processes, real signals, a tiny model."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import kvrelay
from services.launcher.child import ROOT, child_environ
from services.runtime.addresses import LOOPBACK
from services.runtime.registry.embedded_redis import EmbeddedRedis
from tests.demo_model import skip_without_demo_model
from tests.tiny_models import write_tiny_model

SMALL = ("--port=0", "--dtype=float32", "--kv-cache-mib=8", "--store-mib=16", "--no-pin", "--start-timeout-s=90")
START_S, STOP_S = 100, 40


class Launched:
    """A launcher under test: its output so far, and every process below it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def says(self, pattern: str, timeout_s: float = START_S) -> re.Match[str]:
        """Reads on until a line matches."""
        assert self.process.stdout is not None
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                self.lines.append(line.decode())
                if found := re.search(pattern, line.decode()):
                    return found
        errors = await self.process.stderr.read() if self.process.stderr is not None else b""
        pytest.fail(f"the launcher ended without saying {pattern!r}: {self.lines} {errors.decode()}")

    async def ended(self) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        async with asyncio.timeout(STOP_S):
            output, errors = await self.process.communicate()
        self.lines += output.decode().splitlines()
        return self.process.returncode or 0, errors.decode()


@asynccontextmanager
async def launched(*args: str) -> AsyncIterator[Launched]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services", *args, cwd=ROOT, env=child_environ(os.environ), start_new_session=True,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield Launched(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def descendants(pid: int) -> set[int]:
    """Every process below `pid`."""
    found: set[int] = set()
    for listing in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            found |= {child, *descendants(child)}
    return found


def running(pids: set[int], module: str) -> int:
    """The process of `pids` that runs `module`."""
    return next(pid for pid in pids if module.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())


def alive(pids: set[int]) -> Iterator[int]:
    for pid in pids:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                yield pid
        except OSError:
            continue


async def all_gone(pids: set[int], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while any(alive(pids)):  # noqa: ASYNC110 - other processes change it
            await asyncio.sleep(0.05)


async def ask(address: str, max_tokens: int = 4) -> int:
    async with kvrelay.AsyncClient(address) as client:
        return len(
            [token async for token in client.generate(token_ids=[5 + i % 290 for i in range(300)], max_tokens=max_tokens, ignore_eos=True)]
        )


async def test_it_serves_mends_itself_and_drains_at_ctrl_c(tiny_model: Path) -> None:
    async with launched(f"--model={tiny_model}", *SMALL) as launcher:
        address = (await launcher.says(r"kvrelay serves \S+ at (\S+) ")).group(1)
        assert await ask(address) == 4
        pids = descendants(launcher.process.pid)
        os.kill(running(pids, "services.decode"), signal.SIGKILL)
        await launcher.says("decode-0 was killed by SIGKILL; starting it again")
        await launcher.says("decode-0 is back at")
        assert await ask(address) == 4
        pids |= descendants(launcher.process.pid)
        launcher.process.send_signal(signal.SIGINT)
        code, errors = await launcher.ended()
        assert (code, errors) == (0, "")
        assert launcher.lines[-1] == "stopped"
        assert not list(alive(pids))


async def test_a_second_ctrl_c_stops_at_once(tiny_model: Path) -> None:
    async with launched(f"--model={tiny_model}", "--prefill=0", "--no-store", "--drain-grace-s=60", *SMALL) as launcher:
        address = (await launcher.says(r"kvrelay serves \S+ at (\S+) ")).group(1)
        pids = descendants(launcher.process.pid)
        async with (
            kvrelay.AsyncClient(address, retry=None) as client,
            client.generate("on and on", max_tokens=400, ignore_eos=True) as stream,
        ):
            await anext(stream)
            launcher.process.send_signal(signal.SIGINT)
            await launcher.says("stopping")
            launcher.process.send_signal(signal.SIGINT)
            code, errors = await launcher.ended()
        assert code == 130
        assert "stopped at once" in errors
        assert not list(alive(pids))


async def test_nothing_outlives_a_launcher_that_is_killed(tiny_model: Path) -> None:
    async with launched(f"--model={tiny_model}", "--drain-grace-s=1", *SMALL) as launcher:
        await launcher.says("kvrelay serves")
        pids = descendants(launcher.process.pid)
        assert len(pids) >= 5
        launcher.process.kill()
        await launcher.process.wait()
        await all_gone(pids, 30)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_start_that_is_given_up_while_the_demo_model_is_converted_leaves_nothing_of_it(
    tmp_path: Path, number: signal.Signals
) -> None:
    skip_without_demo_model()
    async with launched("--model=smollm2", f"--cache-dir={tmp_path}", "--kernels=torch", *SMALL) as launcher:
        async with asyncio.timeout(START_S):
            while not any(name.startswith(".smollm2-") for name in os.listdir(tmp_path)):  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        pids = descendants(launcher.process.pid)
        launcher.process.send_signal(number)
        code, errors = await launcher.ended()
        assert (code, errors) == (130, "kvrelay: stopped at once\n")
        assert not list(alive(pids))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--model=/no/such/folder",), 1, "no such folder: '/no/such/folder'"),
        (("--prefill=-1",), 2, "--prefill (processes) must be 0 or more"),
        (("--mode=sideways",), 2, "--mode must be one of hybrid, split, colocated"),
        (("--mode=split", "--prefill=0"), 2, "--mode split needs --prefill"),
        (("--redis-url=foo://x",), 2, "redis://, rediss://, unix://"),
        (("--log-dir=/proc/x", "--port=0"), 2, "--log-dir /proc/x cannot be written to"),
        (("--explain-schedule=/proc/x",), 2, "--explain-schedule /proc/x cannot be written to"),
        (("--profile=/no/such/file",), 2, "profile /no/such/file: No such file"),
        (("--threads=100000",), 2, "--threads (threads) must be at most the"),
        (("--host=999.1.1.1",), 2, "--host must be an address"),
        (("--host=a b",), 2, "--host: a host is a name or an IP address"),
        (("--otlp-endpoint=not a url",), 2, "--otlp-endpoint: an OTLP endpoint is host:port"),
        (("--namespace=a b:c*{",), 2, "--namespace: a namespace has"),
        (("--drain-grace-s=inf",), 2, "--drain-grace-s (s) must be a finite number"),
        (("--kv-cache-mib=1000000000", "--port=0"), 2, "--kv-cache-mib of 2 workers and --store-mib would take"),
        (("--no-such-option",), 2, "unrecognized arguments: --no-such-option"),
    ],
)
async def test_what_cannot_be_started_is_said_in_one_line(args: tuple[str, ...], code: int, message: str) -> None:
    async with launched(*args) as launcher:
        ended, errors = await launcher.ended()
    assert ended == code
    assert message in errors
    assert len(errors.strip().splitlines()) == 1
    assert code == 1 or not launcher.lines, "nothing was begun"


@pytest.mark.parametrize("role", ["router", "kvstore"])
async def test_a_service_says_in_one_line_that_its_redis_url_is_none(role: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", f"services.{role}", "--port=0", "--redis-url=foo://x", cwd=ROOT, env=child_environ(os.environ),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(START_S):
        _, errors = await process.communicate()
    lines = [line for line in errors.decode().splitlines() if not line.startswith("{")]
    assert process.returncode == 2
    assert len(lines) == 1
    assert "--redis-url: not the address of a Redis" in lines[0]


async def test_a_taken_port_is_said_in_one_line(tiny_model: Path) -> None:
    async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with launched(f"--model={tiny_model}", *SMALL, f"--port={port}") as launcher:
            ended, errors = await launcher.ended()
    assert ended == 2
    assert f"cannot listen on 127.0.0.1:{port}" in errors
    assert len(errors.strip().splitlines()) == 1


@pytest.mark.parametrize("silent", [False, True])
async def test_a_redis_that_does_not_answer_is_said_and_then_given_up(tiny_model: Path, silent: bool) -> None:
    async with await asyncio.start_server(lambda reader, writer: None, LOOPBACK, 0) as server:
        port = server.sockets[0].getsockname()[1]
        if not silent:
            server.close()
            await server.wait_closed()
        flags = (*SMALL, f"--redis-url=redis://:secret@{LOOPBACK}:{port}/0", "--start-timeout-s=2.5")
        async with launched(f"--model={tiny_model}", *flags) as launcher:
            await launcher.says(rf"{LOOPBACK}:{port}: Redis.*; trying on for 2.5 s \(--start-timeout-s\)")
            ended, errors = await launcher.ended()
    assert ended == 1
    assert f"no Redis answered at {LOOPBACK}:{port} within 2.5 s" in errors
    assert "secret" not in errors + "".join(launcher.lines)


async def test_a_redis_that_refuses_ends_the_start_at_once(tiny_model: Path, redis_server: EmbeddedRedis) -> None:
    url = f"redis://someone:wrong@{LOOPBACK}:{redis_server.port}/0"
    async with launched(f"--model={tiny_model}", *SMALL, f"--redis-url={url}") as launcher:
        ended, errors = await launcher.ended()
    assert ended == 1
    assert "Redis refuses this client" in errors and "wrong@" not in errors


async def test_a_model_that_does_not_load_is_an_error_with_its_log(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    async with launched(f"--model={tmp_path}", *SMALL) as launcher:
        ended, errors = await launcher.ended()
    assert ended == 1
    kept = next(line.removeprefix("logs are kept in ") for line in launcher.lines if line.startswith("logs are kept in "))
    assert "decode-0.log" in os.listdir(kept)
    shutil.rmtree(kept)
    assert "before it was ready" in errors
    assert f"{tmp_path} has no" in errors


async def test_help_names_every_setting_with_unit_and_default() -> None:
    async with launched("--help") as launcher:
        code, _ = await launcher.ended()
    text = " ".join(" ".join(launcher.lines).split())
    assert code == 0
    for expected in (
        "--prefill",
        "--decode",
        "--store",
        "--mode",
        "KV cache of each worker [MiB; 1 or more; default: 256; KVRELAY_KV_CACHE_MIB]",
    ):
        assert expected in text
