"""`tests/conftest.py` does what it says: a test that leaves something behind fails, however well it went otherwise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

LEAKY = """
import asyncio, subprocess, sys, threading
import tests.conftest

tests.conftest.SETTLE_S = 0.2
kept = []

async def test_clean():
    await asyncio.gather(asyncio.sleep(0), asyncio.to_thread(int))

async def test_task():
    kept.append(asyncio.get_running_loop().create_task(asyncio.Event().wait(), name="orphan"))

async def test_lost_exception():
    asyncio.get_running_loop().call_soon(lambda: 1 / 0)
    await asyncio.sleep(0.01)

def test_thread():
    stop = threading.Event()
    kept.append(stop)
    threading.Thread(target=stop.wait, name="orphan").start()

def test_process():
    kept.append(subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE))

async def test_blocking():
    from services.launcher.demo import read_document
    read_document(__file__)

def test_release():
    kept[-1].kill(); kept[-1].wait(); kept[-2].set()
"""


def test_leaks_of_every_kind_fail_the_test_that_left_them(tmp_path: Path) -> None:
    (tmp_path / "test_leaky.py").write_text(LEAKY)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), "-q", "-rA"]
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
    outcomes = {name: word for word, name in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", done.stdout, re.MULTILINE)}
    assert outcomes == {
        "test_clean": "PASSED",
        "test_task": "FAILED",
        "test_lost_exception": "FAILED",
        "test_thread": "ERROR",
        "test_process": "ERROR",
        "test_blocking": "FAILED",
        "test_release": "PASSED",
    }, done.stdout
    for expected in (
        "tasks left running",
        "the event loop reported",
        "threads left running",
        "child processes left running",
        "BlockingError",
    ):
        assert expected in done.stdout
