"""What the benchmark reports is computed rightly from what it measured; no engine and no clock is involved."""

from __future__ import annotations

import pytest

from bench.cells import Cell, standard_cells
from bench.chunk_budget import Objectives, Setting, recommend, settings_to_try
from bench.engine import parse
from bench.floors import Work, floor_s
from bench.interference import Suffered, gaps_within, percentile
from bench.machine import Disturbance
from bench.peers import PEERS
from bench.probe import Peaks
from bench.process import Run
from bench.report import Group, Results, as_json, markdown
from bench.sitting import NOISY, Pairing, Series

DECODE = Cell("decode", batch=2, context=100, steps=10)
WORK = Work(layer_weights=1000, head_weights=500, kv_token=8)
PEAKS = Peaks({1500: 1e6, 6000: 1e5}, {"float32": 1e9, "bfloat16": 2e9, "int8": 4e9})


def series(*seconds: float, disturbed: float = 0.0) -> Series:
    return Series(DECODE, [Run(each, Disturbance(disturbed, 0.0)) for each in seconds])


def suffered(ttft: float, itl: float) -> Suffered:
    return Suffered([1.0], [itl], [ttft], Disturbance(0.0, 0.0))


def test_ratios_are_taken_pair_by_pair() -> None:
    """A machine that slows down between pairs must not show: the pooled medians would say 1."""
    pairing = Pairing(series(1.0, 2.0, 8.0), series(2.0, 4.0, 16.0))
    assert pairing.ratios == [2.0, 2.0, 2.0]


def test_rates_count_every_token_of_the_batch() -> None:
    assert series(2.0).rates == [10.0]
    assert series(2.0).call_ms == 200.0
    assert Series(Cell("prefill", prompt=128, prompts=4), [Run(2.0, Disturbance(0.0, 0.0))]).rates == [256.0]
    assert Series(Cell("mixed", prompt=30, batch=10, steps=2), [Run(2.0, Disturbance(0.0, 0.0))]).rates == [40.0]


def test_noise_of_either_side_marks_a_pair() -> None:
    assert not Pairing(series(1.0), series(1.0, disturbed=NOISY)).noisy
    assert Pairing(series(1.0), series(1.0, disturbed=2 * NOISY)).noisy
    assert Pairing(series(1.0, disturbed=2 * NOISY), series(1.0)).noisy


def test_standard_cells_are_the_asked_ones() -> None:
    cells = standard_cells([128, 512], [1, 16], context=512, chunk=0, steps=8)
    assert [cell.name for cell in cells] == ["prefill 128", "prefill 512", "decode B=1", "decode B=16"]
    assert [cell.tokens for cell in cells[:2]] == [512, 512]
    assert [cell.steps for cell in cells[2:]] == [32, 8]
    assert standard_cells([], [], context=512, chunk=256, steps=8)[0].name == "mixed 256+8"


def test_floor_is_the_longer_of_memory_and_arithmetic() -> None:
    by_memory = floor_s(DECODE, WORK, "int8", PEAKS)
    assert by_memory == pytest.approx(10 * (1500 + 2 * 100 * 8 * 2) / 1e6)
    by_arithmetic = floor_s(Cell("prefill", prompt=10**6), WORK, "int8", PEAKS)
    assert by_arithmetic == pytest.approx((2 * 1000 * 10**6 + 2 * 500) / 4e9)


def test_floor_reads_at_the_rate_of_its_own_working_set() -> None:
    once = Cell("decode", batch=1, context=0)
    assert floor_s(once, WORK, "float32", PEAKS) == pytest.approx(6000 / 1e5)


def test_floor_multiplies_in_the_fastest_type_that_holds_the_weights() -> None:
    prefill = Cell("prefill", prompt=10**6)
    slow_integers = Peaks({1: 1e12}, {"float32": 4e9, "bfloat16": 1e9, "int8": 1e6})
    assert floor_s(prefill, WORK, "int8", slow_integers) == floor_s(prefill, WORK, "bfloat16", slow_integers)
    fast_integers = Peaks({1: 1e12}, {"float32": 1e9, "bfloat16": 2e9, "int8": 4e9})
    assert floor_s(prefill, WORK, "float32", fast_integers) == 4 * floor_s(prefill, WORK, "int8", fast_integers)


def test_report_shows_ratio_spread_noise_and_what_is_missing() -> None:
    group = Group("bfloat16", 2, PEAKS, {DECODE.name: series(1.0)}, {DECODE.name: Pairing(series(1.0), series(1.25))})
    group.peers = {"openvino": {DECODE.name: Pairing(series(1.0, 1.0, 1.0), series(1.5, 2.0, 3.0, disturbed=0.5))}}
    group.whole_peers = frozenset({"openvino"})
    results = Results({"cpu": "one"}, {"openvino bfloat16": {"openvino": "1.2"}}, [DECODE], WORK, [group], ["vllm: not there"])
    text = markdown(results)
    assert "## bfloat16, 2 threads" in text
    assert "- **not measured**: vllm: not there" in text
    row = next(line for line in text.splitlines() if "openvino (whole)" in line)
    assert "2.00 (1.50 to 3.00)" in row
    assert [part.strip() for part in row.strip("| ").split("|")][-2:] == ["3", "~"]
    assert '"seconds": 1.25' in as_json(results)


def test_gaps_count_only_where_a_window_overlaps() -> None:
    times = [0, 10_000_000, 20_000_000, 30_000_000]
    assert gaps_within(times, [(12_000_000, 15_000_000)]) == [10.0]
    assert gaps_within(times, [(12_000_000, 21_000_000)]) == [10.0, 10.0]
    assert gaps_within(times, []) == []


def test_percentile_is_one_of_the_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([float(value) for value in range(1, 101)], 0.99) == 99.0
    assert percentile([5.0], 0.99) == 5.0


def test_recommended_is_the_shortest_ttft_that_keeps_both_objectives() -> None:
    small, middle, large = (Setting("chunked", budget) for budget in (64, 256, 1024))
    results = {small: suffered(900.0, 20.0), middle: suffered(500.0, 40.0), large: suffered(300.0, 200.0)}
    assert recommend(results, Objectives(ttft_ms=1000.0, itl_ms=50.0)) == (middle, True)
    assert recommend(results, Objectives(ttft_ms=1000.0, itl_ms=500.0)) == (large, True)
    assert recommend(results, Objectives(ttft_ms=1000.0, itl_ms=10.0)) == (small, False)


def test_whole_is_tried_once_whatever_the_budgets() -> None:
    tried = settings_to_try(["whole", "chunked"], [64, 256], prompt=2048)
    assert [setting.name for setting in tried] == ["whole 2048", "chunked 64", "chunked 256"]


def test_peers_have_names_of_their_own_and_cover_every_class() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)
    assert {kind for peer in PEERS for kind in peer.models} == {"float32", "bfloat16", "int8"}


def test_nothing_to_measure_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--prompts", "--batches", "--chunk", "0"])
    assert "nothing to measure" in capsys.readouterr().err
