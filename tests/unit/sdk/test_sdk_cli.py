"""The command line as a process, against a scripted router."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from kvrelay import cli, errors, report, wire
from kvrelay.handle import ModelIdentity
from kvrelay.inference.v1 import router_service_pb2 as pb
from kvrelay.inference.v1 import worker_pb2
from kvrelay.values import Timings
from tests.unit.sdk.scripted_router import ScriptedRouter, done, failing, one_token_then_silence, playing, started, token

ROOT = Path(__file__).parents[3]
IDENTITY = ModelIdentity("tiny", "sha256:aa", "sha256:bb", "bfloat16", "bfloat16", "default:10000", "native-1")


@asynccontextmanager
async def kvrelay(*args: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvrelay", *args, stdin=PIPE, stdout=PIPE, stderr=PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def run(*args: str, stdin: bytes = b"") -> tuple[int | None, str, str]:
    async with kvrelay(*args) as process:
        stdout, stderr = await asyncio.wait_for(process.communicate(stdin), 60)
        return process.returncode, stdout.decode(), stderr.decode()


async def test_generate_streams_text_and_shows_stats_on_stderr(router: ScriptedRouter) -> None:
    status, out, err = await run("generate", "hello", "--target", router.target, "--max-tokens", "3", "--stats")
    assert (status, out) == (0, "w0 w1 w2 \n")
    assert router.requests[0].text == "hello" and router.requests[0].stop.max_tokens == 3
    for name, _ in report.PHASES:
        assert name in err
    assert "3 prompt tokens (0 cached), 3 generated" in err and "split (long prompt)" in err and "4.0 KiB in 2 blocks over grpc" in err


async def test_generate_reads_stdin_and_passes_every_option(router: ScriptedRouter) -> None:
    await run(
        "generate", "-", "--target", router.target, "--chat", "--system", "be brief", "--model", "tiny", "--temperature", "0.5",
        "--top-k", "3", "--top-p", "0.9", "--min-p", "0.1", "--seed", "7", "--repetition-penalty", "1.1", "--presence-penalty", "0.2",
        "--frequency-penalty", "0.3", "--logit-bias", "5=-1.5", "--min-tokens", "2", "--logprobs", "5", "--stop", "A", "--stop", "B",
        "--stop-token-id", "4", "--ignore-eos", "--request-id", "mine", "--cache-salt", "pepper", "--timeout", "9",
        stdin="grüße".encode(),
    )  # fmt: skip
    (request,) = router.requests
    assert [(m.role, m.content) for m in request.chat.messages] == [("system", "be brief"), ("user", "grüße")]
    sampling, stop = wire.sampling_from_proto(request.sampling), wire.stop_from_proto(request.stop)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0.5, 3, 0.9, 0.1, 7)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (sampling.logit_bias, sampling.min_tokens, sampling.logprobs) == ({5: -1.5}, 2, 5)
    assert (stop.strings, stop.token_ids, stop.ignore_eos) == (("A", "B"), (4,), True)
    assert (request.model, request.request_id, request.cache_salt) == ("tiny", "mine", "pepper")
    assert router.time_remaining[0] <= 9.5  # gRPC rounds up


async def test_generate_json_is_one_object_a_line(router: ScriptedRouter) -> None:
    status, out, _ = await run("generate", "--token-ids", "1,2,3", "--target", router.target, "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [e["event"] for e in events] == ["started", "token", "token", "token", "done"]
    assert list(router.requests[0].token_ids.ids) == [1, 2, 3]
    assert events[-1]["text"] == "w0 w1 w2 " and events[-1]["finish_reason"] == "length" and events[-1]["usage"]["completion_tokens"] == 3
    assert events[-1]["timings"]["prefill_s"] == 0.004


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("generate", "x", "--temperature", "nan"), "error: INVALID_SAMPLING: temperature must be"),
        (("generate", "x", "--token-ids", "1"), "error: INVALID_PROMPT: exactly one of"),
        (("generate", ""), "error: EMPTY_PROMPT: "),
        (("generate", "x"), "error: PROMPT_TOO_LONG: 9000 tokens"),
    ],
    ids=["local", "two-prompts", "empty", "server"],
)
async def test_errors_are_one_line_and_status_1(router: ScriptedRouter, args: tuple[str, ...], expected: str) -> None:
    router.script = failing(errors.PromptTooLongError("9000 tokens"))
    status, out, err = await run(*args, "--target", router.target)
    assert (status, out) == (1, "") and err.startswith(expected) and err.count("\n") == 1


async def test_an_unreachable_router_is_one_line_and_status_1() -> None:
    status, _, err = await run("status", "--target", "127.0.0.1:1")
    assert status == 1 and err.startswith("error: UNAVAILABLE: the router at 127.0.0.1:1 cannot be reached")


async def test_bytes_that_are_no_text_are_a_typed_error(router: ScriptedRouter) -> None:
    status, _, err = await run("generate", "--target", router.target, stdin=b"\xff\xfe")
    assert status == 1 and err.startswith("error: INVALID_PROMPT") and router.requests == []


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nonsense",),
        ("generate", "--top-k", "x"),
        ("generate", "--logit-bias", "5"),
        ("generate", "--timeout", "nan"),
        ("generate", "--token-ids", "1,2", "--chat"),
        ("generate", "--token-ids", "1,2", "--system", "s"),
    ],
)
async def test_wrong_usage_is_status_2(args: tuple[str, ...]) -> None:
    status, out, err = await run(*args)
    assert status == 2 and out == "" and "usage:" in err


@pytest.mark.parametrize(
    ("command", "closed", "expected"),
    [
        ("generate", "<&-", "error: INVALID_PROMPT: standard input is closed\n"),
        ("chat", "<&-", "error: INVALID_PROMPT: standard input is closed\n"),
        ("generate x", ">&-", "error: standard output is closed\n"),
    ],
)
async def test_a_closed_standard_stream_is_one_line(router: ScriptedRouter, command: str, closed: str, expected: str) -> None:
    shell = f'exec "{sys.executable}" -m kvrelay {command} --target {router.target} {closed}'
    process = await asyncio.create_subprocess_exec("sh", "-c", shell, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    _, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, err.decode()) == (1, expected) and router.requests == []


async def test_no_end_is_a_timeout(router: ScriptedRouter) -> None:
    assert (await run("generate", "x", "--timeout", "inf", "--target", router.target))[:2] == (0, "w0 w1 w2 \n")


@pytest.mark.parametrize("document", ["README.md", "deploy/compose.yaml"])
def test_the_commands_that_documents_show_parse(document: str) -> None:
    lines = (ROOT / document).read_text(encoding="utf-8").splitlines()
    commands = [line.lstrip("# ") for line in lines if line.lstrip("# ").startswith("kvrelay ")]
    assert commands
    for command in commands:
        cli._parser().parse_args(shlex.split(command, comments=True)[1:])


async def test_version_and_help() -> None:
    assert (await run("--version"))[1].startswith("kvrelay ")
    status, out, _ = await run("generate", "--help")
    assert status == 0 and "--repetition-penalty" in out


async def test_ctrl_c_cancels_the_request_and_leaves_quietly(router: ScriptedRouter) -> None:
    router.script = one_token_then_silence
    async with kvrelay("generate", "x", "--target", router.target) as process:
        assert process.stdout is not None and process.stderr is not None
        assert await asyncio.wait_for(process.stdout.read(3), 30) == b"w0 "
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(router.cancelled.wait(), 20)
        assert await asyncio.wait_for(process.wait(), 20) == 130
        assert await process.stderr.read() == b""


async def test_a_reader_that_goes_away_ends_the_request_quietly(router: ScriptedRouter) -> None:
    async def endless(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        yield started()
        for index in range(1_000_000):
            yield token(index)
            await asyncio.sleep(0.001)

    router.script = endless
    async with kvrelay("generate", "x", "--target", router.target) as process:
        assert process.stdout is not None and process.stderr is not None
        await asyncio.wait_for(process.stdout.read(3), 30)
        process._transport.get_pipe_transport(1).close()  # type: ignore[attr-defined]
        assert await asyncio.wait_for(process.wait(), 20) == 141
        assert await process.stderr.read() == b""
        await asyncio.wait_for(router.cancelled.wait(), 20)


async def test_chat_keeps_the_history_and_forgets_a_failed_turn(router: ScriptedRouter) -> None:
    good = router.script

    async def second_fails(request: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[pb.GenerateResponse]:
        script = failing(errors.OverloadedError("full", retry_after_s=60)) if len(router.requests) == 2 else good
        async for response in script(request, context):
            yield response

    router.script = second_fails
    status, out, err = await run("chat", "--target", router.target, "--system", "s", stdin=b"one\n\ntwo\nthree\n")
    assert status == 0 and out == "w0 w1 w2 \n" * 2 and err == "error: OVERLOADED: full\n"
    assert [m.content for m in router.requests[-1].chat.messages] == ["s", "one", "w0 w1 w2 ", "three"]
    assert [m.role for m in router.requests[-1].chat.messages] == ["system", "user", "assistant", "user"]


async def test_ctrl_c_in_a_chat_cancels_the_answer_and_the_next_question_works(router: ScriptedRouter) -> None:
    answers = router.script
    router.script = one_token_then_silence
    async with kvrelay("chat", "--target", router.target) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"one\n")
        assert await asyncio.wait_for(process.stdout.read(3), 30) == b"w0 "
        router.script = answers
        process.send_signal(signal.SIGINT)
        await asyncio.wait_for(router.cancelled.wait(), 20)
        out, err = await asyncio.wait_for(process.communicate(b"two\n"), 30)
    assert process.returncode == 0 and out.endswith(b"w0 w1 w2 \n") and b"(cancelled)" in err
    assert [m.content for m in router.requests[-1].chat.messages] == ["two"]


async def test_status_shows_workers_by_role_and_why_a_pair_is_not_formed(router: ScriptedRouter) -> None:
    workers = [
        worker_pb2.Worker(worker_id=f"{role}-0", role=role, address=f"127.0.0.1:{port}", state="ready",
                          identity=wire.identity_to_proto(IDENTITY), load=worker_pb2.WorkerLoad(available_pages=60, total_pages=64))
        for port, role in ((1, "prefill"), (2, "decode"))
    ]  # fmt: skip
    difference = pb.FieldDifference(field="block_size", prefill_value="16", decode_value="32")
    router.fleet = pb.GetFleetResponse(
        workers=workers, mode="hybrid", registry_connected=False, view_age=wire.duration_to_proto(12),
        incompatibilities=[pb.Incompatibility(prefill_worker="prefill-0", decode_worker="decode-0", differences=[difference])],
    )  # fmt: skip
    status, out, _ = await run("status", "--target", router.target)
    assert status == 0 and "registry lost (last word 12.0 s ago)" in out and "kvstore: none" in out
    assert "prefill-0 -> decode-0" in out and "60/64" in out and "tiny (bfloat16)" in out
    assert [line.split()[-1] for line in out.splitlines() if "127.0.0.1" in line] == ["native-1"] * 2 and out.count(" numerics\n") == 2
    assert [line.split() for line in out.splitlines() if "block_size" in line] == [["block_size", "16", "32"]]
    _, out, _ = await run("status", "--json", "--target", router.target)
    assert json.loads(out)["incompatibilities"][0]["differences"] == [{"field": "block_size", "prefill_value": "16", "decode_value": "32"}]


async def test_models_says_what_lacks(router: ScriptedRouter) -> None:
    model = pb.Model(
        name="tiny", identity=wire.identity_to_proto(IDENTITY), max_context_tokens=64, missing_role="decode", prefill_workers=2
    )
    router.model_pages = [pb.ListModelsResponse(models=[model])]
    status, out, _ = await run("models", "--target", router.target)
    assert status == 0 and "no decode worker" in out and "64" in out
    _, out, _ = await run("models", "--json", "--target", router.target)
    assert json.loads(out)[0]["identity"]["dtype"] == "bfloat16"


def test_phase_shares_and_percentiles() -> None:
    rows = report.phase_rows(Timings(prefill_s=0.25, decode_s=0.75, total_s=1.0))
    assert [(name, share.strip()) for name, _, share in rows if share.strip() != "0 %"] == [
        ("prefill", "25 %"),
        ("decode", "75 %"),
        ("total", ""),
    ]
    assert report.phase_rows(Timings())[0][2].strip() == "-"
    assert report.percentile([3.0, 1.0, 2.0], 0.5) == 2.0 and report.percentile(range(1, 101), 0.99) == 99
    assert [report.size(n) for n in (5, 2048, 3 << 20, 5 << 30)] == ["5 B", "2.0 KiB", "3.0 MiB", "5.0 GiB"]


async def test_a_one_word_answer_ends_with_one_newline(router: ScriptedRouter) -> None:
    router.script = playing(started(), token(0, "yes\n"), done(1, path="local"))
    assert (await run("generate", "x", "--target", router.target))[1] == "yes\n"
