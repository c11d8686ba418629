"""`tests.suite.Suite`, the ground that the end-to-end tests stand on; and the demo, as `make demo` runs it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import pytest

from kvrelay.errors import ModelLoadError
from services.launcher.child import ROOT, child_environ
from services.runtime.telemetry import names
from tests.suite import Suite

PROMPT = [5 + i % 290 for i in range(300)]


async def test_a_suite_gives_a_client_traces_and_hold_of_every_process(tiny_model: Path) -> None:
    async with Suite(tiny_model, traces=True, store=False) as suite:
        assert suite.names == ["prefill-0", "decode-0", "router-0"]
        stream = suite.client.generate(token_ids=PROMPT, max_tokens=4, ignore_eos=True)
        assert len([token async for token in stream]) == 4
        assert stream.completion is not None
        assert suite.otlp is not None
        expected = {
            ("kvrelay-router", names.SPAN_GENERATE),
            ("kvrelay-prefill", names.SPAN_PREFILL_COMPUTE),
            ("kvrelay-decode", names.SPAN_DECODE_COMPUTE),
        }
        await suite.otlp.wait_for_trace(stream.completion.trace_id, lambda spans: expected <= {(span.service, span.name) for span in spans})

        assert await run_readme_example(suite.address) == 0

        suite.kill("prefill-0")
        stream = suite.client.generate(token_ids=PROMPT[::-1], max_tokens=4, ignore_eos=True)
        assert len([token async for token in stream]) == 4

        await suite.restart("prefill-0")
        name = await suite.start_worker("decode", 1, kv_cache_mib=4)
        assert suite.address_of(name) != suite.address_of("decode-0")
        await suite.stop(name)
        assert suite.supervisor.child(name).returncode == 0
        assert '"message"' in suite.log("router-0") or suite.log("router-0") == ""
        pids = [suite.pid(name) for name in suite.names]
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


async def test_a_suite_whose_model_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json cannot be read"):
        async with Suite(tmp_path, store=False):
            pass


async def run_readme_example(address: str) -> int:
    """The exit code of the README's Python example, sent to `address`."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    code = blocks[0].replace("127.0.0.1:50051", address)
    assert address in code
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL)
    async with asyncio.timeout(60):
        return await process.wait()


async def run_demo(*args: str) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.launcher.demo", *args, cwd=ROOT, env=child_environ(os.environ),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(110):
        output, errors = await process.communicate()
    return process.returncode or 0, output.decode(), errors.decode()


async def test_the_demo_answers_draws_waterfalls_and_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    document = tmp_path / "long.txt"
    document.write_text("the sea and the harbour and the light over the stones. " * 100_000)
    code, output, errors = await run_demo(
        f"--model={tiny_model}", "--dtype=float32", f"--document={document}", "--document-chars=22000", "--max-tokens=8"
    )
    assert (code, errors) == (0, "")
    assert "of the document's 5,500,000 bytes the questions are about the first 21,9" in output
    assert output.count("too long for the model's context") == 1
    assert output.count("the phases add up") == 3
    assert "path split" in output
    assert "bytes arrived before prefill ended" in output
    assert "everything has stopped" in output


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (("--document=/no/such/file.txt",), 2, "cannot read the document /no/such/file.txt"),
        ((f"--document={sys.executable}",), 2, "not UTF-8 text"),
        (("--model=/no/such/model",), 1, "/no/such/model"),
        (("--max-tokens=0",), 2, "--max-tokens"),
    ],
)
async def test_a_demo_that_cannot_run_says_why_and_fails(args: tuple[str, ...], code: int, message: str) -> None:
    ended, _, errors = await run_demo(*args)
    assert ended == code
    assert message in errors
