"""The SDK's three faces against real services."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

import kvrelay
from kvrelay import errors
from tests.suite import Suite

DOCUMENT = "a long document " * 40
"""Over the split threshold with a tokenizer of bytes."""


async def command_line(*args: str) -> tuple[int | None, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay", *args, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 60)
    return process.returncode, out.decode(), err.decode()


def ask_synchronously(target: str) -> tuple[kvrelay.Completion, str]:
    with kvrelay.Client(target) as client:
        stream = client.generate(DOCUMENT, max_tokens=6)
        text = "".join(token.text for token in stream)
        assert stream.completion is not None
        return stream.completion, text


async def test_async_client_sync_client_and_command_line_agree(tiny_model: Path) -> None:
    async with Suite(tiny_model, prefill=1, decode=1) as suite:
        client = suite.client
        (model,) = await client.list_models()
        assert model.ready and (model.prefill_workers, model.decode_workers) == (1, 1)
        assert {worker.role for worker in (await client.fleet()).workers} >= {"prefill", "decode"}

        answer = await client.generate(DOCUMENT, max_tokens=6).collect()
        assert answer.completion.usage.completion_tokens == len(answer.token_ids) == 6 and answer.completion.path == "split"
        completion, text = await asyncio.to_thread(ask_synchronously, client.target)
        assert text == answer.text and completion.usage.prompt_tokens == answer.completion.usage.prompt_tokens

        status, out, err = await command_line("generate", DOCUMENT, "--max-tokens", "6", "--target", client.target, "--json")
        assert status == 0, err
        done = json.loads(out.splitlines()[-1])
        assert done["event"] == "done" and done["text"] == answer.text
        status, out, _ = await command_line("status", "--target", client.target)
        assert status == 0 and "prefill-0" in out and "decode-0" in out and "registry connected" in out

        with pytest.raises(errors.PromptTooLongError) as caught:
            await client.generate([1] * (model.max_context_tokens + 1)).collect()
        assert caught.value.fields["limit_tokens"] == str(model.max_context_tokens)
        with pytest.raises(errors.UnknownModelError):
            await client.generate("x", model="another").collect()
        with pytest.raises(errors.DeadlineExceededError):
            await client.generate(DOCUMENT, max_tokens=2000, ignore_eos=True, timeout=0.3).collect()

        async for _ in client.generate(DOCUMENT, max_tokens=2000, ignore_eos=True):
            break
        async with asyncio.timeout(10):
            while (await client.fleet()).in_flight:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)
        assert (await client.generate(DOCUMENT, max_tokens=6).collect()).text == answer.text
