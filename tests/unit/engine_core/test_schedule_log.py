"""What `--explain-schedule` writes: who computed what in each step, who did not, and why; and that `kvrelay schedule` can read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvrelay.errors import ConfigError
from kvrelay.schedule_report import draw
from kvrelay.values import StopConditions
from services.engine.api import EngineRequest, Finished
from services.engine.scheduling import schedule_log
from tests.unit.engine_core.fakes import Bench, LinearCost


def request(name: str, first: int, tokens: int, max_tokens: int = 4, **kwargs: bool) -> EngineRequest:
    return EngineRequest(name, [first] * tokens, stop=StopConditions(max_tokens=max_tokens, ignore_eos=True), **kwargs)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def explained(path: Path, *requests: EngineRequest, **settings: Any) -> list[dict[str, Any]]:
    """The lines of the steps that serve these requests."""
    bench = Bench(explain_schedule=path, **settings)
    for one in requests:
        bench.add(one)
    while bench.core.has_work:
        bench.step()
        for name in list(bench.core._live):
            if isinstance(bench.events.get(name, [None])[-1], Finished):
                bench.core.release(name)
    assert len(lines(path)) == 1 + len([plan for plan in bench.plans if plan.chunks]), "each line is there when its step is over"
    bench.core.close()
    return lines(path)[1:]


def test_the_first_line_says_what_kind_of_engine_it_is(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "prefill-0.jsonl"
    Bench(explain_schedule=path, policy="dynamic", tbt_objective_ms=20).core.close()
    (header,) = lines(path)
    assert header == {
        "kvrelay_schedule": 1, "policy": "dynamic", "max_num_batched_tokens": 32, "max_num_seqs": 8, "tbt_objective_ms": 20,
        "prefill_order": "fcfs", "block_size": 4, "pages": 128,
    }  # fmt: skip


def test_a_step_names_every_chunk_and_why(tmp_path: Path) -> None:
    steps = explained(tmp_path / "s", request("a", 1, 8), request("b", 2, 40), max_num_batched_tokens=16, cost=LinearCost())
    first, second = steps[:2]
    assert first["chunks"] == [
        {"id": "a", "start": 0, "end": 8, "kind": "prefill", "of": 8, "recomputed": 0, "why": "completes its tokens"},
        {"id": "b", "start": 0, "end": 8, "kind": "prefill", "of": 40, "recomputed": 0, "why": "fills the budget"},
    ]
    assert second["chunks"][0] == {"id": "a", "start": 8, "end": 9, "kind": "decode", "why": "decodes first"}
    assert (first["admitted"], second["admitted"]) == ([["a", 0], ["b", 0]], [])
    assert (second["prefill_budget"], second["budget_why"]) == (15, "token budget")
    assert first["expected_s"] == pytest.approx((16 + 0.05 * 72) / 1e3) and first["seconds"] > 0 and first["t_ns"] < second["t_ns"]
    assert [step["step"] for step in steps] == [*range(1, len(steps) + 1)]


def test_cached_tokens_are_told_at_admission(tmp_path: Path) -> None:
    bench = Bench(explain_schedule=tmp_path / "s")
    for name in ("a", "b"):
        bench.add(request(name, 1, 9))
        bench.run()
        bench.core.release(name)
    assert [line["admitted"] for line in lines(tmp_path / "s") if line.get("admitted")] == [[["a", 0]], [["b", 8]]]
    bench.core.close()


def test_who_waits_and_what_for(tmp_path: Path) -> None:
    def waiting(name: str, *requests: EngineRequest, **settings: Any) -> list[Any]:
        return explained(tmp_path / name, *requests, **settings)[0]["waiting_for"]

    prompts = [request(name, index, 8) for index, name in enumerate("abc", 1)]
    assert waiting("budget", *prompts, max_num_batched_tokens=8) == [["b", "budget"], ["c", "its turn"]]
    assert waiting("seqs", *prompts, max_num_seqs=2) == [["c", "max_num_seqs"]]
    assert waiting("pages", *prompts, num_pages=7) == [["c", "pages"]]


def test_who_runs_and_is_left_out_and_why(tmp_path: Path) -> None:
    steps = explained(tmp_path / "turns", request("a", 1, 4, 9), request("b", 2, 32), policy="decode-only", max_num_batched_tokens=8)
    assert [step["left_out"] for step in steps[1:3]] == [[["b", "a step of decodes"]], [["a", "a step of prompts"]]]
    bench = Bench(explain_schedule=tmp_path / "pages", num_pages=8)
    bench.add(request("old", 1, 8, 25))
    bench.add(request("read", 2, 16, prefill_only=True))
    bench.run()
    last = lines(tmp_path / "pages")[-1]
    assert last["left_out"] == [["old", "no pages"]] and not last["chunks"] and last["free_pages"] == last["cached_pages"] == 0
    bench.core.close()


def test_a_preemption_and_what_it_costs(tmp_path: Path) -> None:
    steps = explained(tmp_path / "s", request("old", 1, 8, 17), request("new", 2, 8, 17), num_pages=8)
    at = next(index for index, step in enumerate(steps) if step["preempted"])
    assert steps[at]["preempted"] == [["new", 16]] and steps[at]["waiting_for"] == [["new", "preempted"]]
    again = next(step for step in steps[at:] if step["admitted"])
    (chunk,) = [chunk for chunk in again["chunks"] if chunk["id"] == "new"]
    assert chunk["why"] == "recompute after preemption" and chunk["recomputed"] == 16 - chunk["start"] == 16 - again["admitted"][0][1]


def test_the_picture_of_what_was_written(tmp_path: Path) -> None:
    explained(tmp_path / "s", request("old", 1, 8, 17), request("new", 2, 8, 17), num_pages=8, cost=LinearCost())
    text = "\n".join(draw(tmp_path / "s"))
    assert "!b preempted with 16 computed" in text and "B 8-17 again" in text and "predictions" in text


def test_a_new_life_goes_on_in_the_same_file_after_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "s"
    explained(path, request("a", 1, 8, 1))
    with path.open("a") as file:
        file.write('{"t_ns":1,"sec')
    bench = Bench(explain_schedule=path)
    bench.add(request("b", 1, 8, 1))
    bench.run()
    bench.core.close()
    text = "\n".join(draw(path))
    assert "note: 1 line cut off" in text and "a is a" in text and "b is b" in text


def test_a_file_that_cannot_be_written_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"explain_schedule: .* cannot be written"):
        Bench(explain_schedule=tmp_path)


def test_a_full_disk_ends_the_file_and_not_the_engine() -> None:
    bench = Bench(explain_schedule=Path("/dev/full"))
    bench.add(request("a", 1, 8))
    bench.run()
    assert isinstance(bench.events["a"][-1], Finished)


def test_the_file_stops_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule_log, "MAX_BYTES", 2000)
    bench = Bench(explain_schedule=tmp_path / "s")
    bench.add(request("a", 1, 8, 60))
    bench.run()
    assert isinstance(bench.events["a"][-1], Finished) and 2000 <= (tmp_path / "s").stat().st_size < 3000
