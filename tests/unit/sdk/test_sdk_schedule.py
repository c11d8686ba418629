"""`kvrelay schedule`: the picture of a file, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay import cli
from kvrelay.errors import InvalidRequestError
from kvrelay.schedule_report import draw

START = {
    "kvrelay_schedule": 1, "policy": "chunked", "max_num_batched_tokens": 40, "max_num_seqs": 4, "tbt_objective_ms": 0,
    "prefill_order": "fcfs", "block_size": 16, "pages": 100,
}  # fmt: skip


def step(number: int, *chunks: dict[str, Any], **changes: Any) -> dict[str, Any]:
    line = {
        "t_ns": 5_000_000_000 + number * 20_000_000, "seconds": 0.02, "step": number, "expected_s": None, "prefill_budget": 40,
        "budget_why": "token budget", "chunks": list(chunks), "left_out": [], "waiting": 0, "waiting_for": [], "admitted": [],
        "preempted": [], "held": 0, "free_pages": 90, "cached_pages": 2, "held_pages": 8,
    }  # fmt: skip
    return line | changes


def decode(name: str, at: int) -> dict[str, Any]:
    return {"id": name, "start": at, "end": at + 1, "kind": "decode", "why": "decodes first"}


def prefill(name: str, start: int, end: int, recomputed: int = 0) -> dict[str, Any]:
    return {"id": name, "start": start, "end": end, "kind": "prefill", "of": 99, "recomputed": recomputed, "why": "fills the budget"}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    lines = [
        START,
        step(1, prefill("one", 0, 20), admitted=[["one", 16]], waiting=2, waiting_for=[["two", "pages"], ["three", "its turn"]]),
        step(2, decode("one", 20), prefill("two", 0, 10), expected_s=0.03, left_out=[["three", "no pages"]]),
        step(3, decode("one", 21), preempted=[["two", 10]], waiting=1, waiting_for=[["two", "preempted"]]),
        step(4, prefill("two", 0, 20, 10), seconds=0.04),
    ]
    path = tmp_path / "decode-0.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rows(path: Path, last: int | None = None) -> list[str]:
    return [" ".join(row.split()) for row in "\n".join(draw(path, last)).splitlines() if row]


def test_a_line_a_step_with_a_bar_by_request(file: Path) -> None:
    text = rows(file)
    assert text[0].startswith("policy chunked, prompts by fcfs: at most 40 tokens and 4 sequences a step, 100 pages of 16 tokens")
    assert text[2] == f"1 0.000 s 20.0 ms 90+2 {'A' * 20} a is one; A 0-20; +a with 16 cached; 2 waiting for pages"
    assert text[3] == f"2 0.020 s 20.0 ms 90+2 a{'B' * 10} b is two; B 0-10; c is three; c left out: no pages"
    assert text[4] == "3 0.040 s 20.0 ms 90+2 a !b preempted with 10 computed; 1 waiting"
    assert text[5] == f"4 0.060 s 40.0 ms 90+2 {'B' * 20} B 0-20 again"


def test_the_summary_counts_the_whole_file(file: Path) -> None:
    for last in (None, 1):
        text = rows(file, last)
        assert "steps 4 in 100.0 ms" in text
        assert "step time 20.0 ms median, 40.0 ms longest" in text
        assert "tokens 50 of prompts, 2 of answers" in text
        assert "tokens a step 13.0 on average, 20 at most" in text
        assert "budget used 32 % on average" in text
        assert "budget set by token budget (3)" in text
        assert "preemptions 1" in text
        assert "recomputed 10 tokens, about 20.0 ms or 20.0 % of the time" in text
        assert "predictions 50 % off at the median" in text


def test_a_policy_without_a_budget_has_no_share_of_one(tmp_path: Path, file: Path) -> None:
    whole = tmp_path / "whole.jsonl"
    start = START | {"policy": "whole"}
    whole.write_text("".join(json.dumps(line) + "\n" for line in (start, step(1, prefill("one", 0, 100)), step(2, decode("one", 100)))))
    text = rows(whole)
    assert text[0].startswith("policy whole, prompts by fcfs: at most 40 tokens, or a longer prompt, and 4 sequences a step")
    assert "tokens a step 50.5 on average, 100 at most" in text
    assert not [row for row in text if row.startswith("budget")]
    file.write_text(whole.read_text() + file.read_text())
    assert "budget used 32 % on average" in rows(file), "of the steps that keep one"


def test_only_the_last_steps(file: Path) -> None:
    text = rows(file, last=2)
    assert text[0].startswith("policy chunked") and [row.split()[0] for row in text[2:4]] == ["3", "4"]
    assert "a is one" in text[2], "letters are introduced where they are first shown"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("hello", "line 1: no JSON"),
        ("[1]", "line 1"),
        ("7", "line 1"),
        ("{}", "line 1: KeyError: 't_ns'|line 1: KeyError: 'step'"),
        (json.dumps(START | {"kvrelay_schedule": 2}), "line 1: ValueError: format 2 instead of 1"),
        (json.dumps(START | {"max_num_batched_tokens": 0}), "line 1: ValueError: 0 is not a number"),
        (json.dumps(step(1)), "line 1: a step before the first start"),
        (json.dumps(START) + "\n" + json.dumps(step(1, {"id": "x"})), "line 2: KeyError"),
        (json.dumps(START) + "\n" + json.dumps(step(1, prefill("x", 5, 5))), "line 2: ValueError: a chunk from 5 to 5"),
        (json.dumps(START) + "\n" + json.dumps(step(1, decode("x", 5), seconds=-1)), "line 2: ValueError: -1 is not a duration"),
        (json.dumps(START) + "\n" + json.dumps(step(1, decode("x", 5), left_out=[["a"]])), "line 2: ValueError"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_the_line(tmp_path: Path, content: str, why: str) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(InvalidRequestError, match=why):
        list(draw(path))


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)))
    with pytest.raises(InvalidRequestError, match="no JSON"):
        list(draw(tmp_path / "file"))


def test_lines_that_were_cut_off_are_left_out_with_a_note(file: Path) -> None:
    whole = file.read_text()
    file.write_text(whole + whole[:50] + "\n" + whole + whole[:50])
    assert rows(file)[-1] == "note: 2 lines cut off, as by the end of a process, and left out"
    assert "steps 8 in 200.0 ms" in rows(file)


def test_a_worker_that_has_done_nothing_yet(tmp_path: Path) -> None:
    (tmp_path / "file").write_text(json.dumps(START) + "\n")
    assert rows(tmp_path / "file")[-1] == "no step computed anything"


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schedule", str(file)]) == 0
    assert "a is one" in capsys.readouterr().out
    assert cli.main(["schedule", str(file), "--last", "1"]) == 0
    assert "A 0-20 again" in capsys.readouterr().out
    assert cli.main(["schedule", str(file.with_name("none"))]) == 1
    assert capsys.readouterr().err.startswith("error: INVALID_REQUEST: ")
    with pytest.raises(SystemExit) as wrong:
        cli.main(["schedule", str(file), "--last", "0"])
    assert wrong.value.code == 2
