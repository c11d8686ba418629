"""The prefix cache under published traffic, hit for hit. `tests/data/traces/README.md` says whose requests these are.

Driven with the blocks' ids, each a prompt of its own, the cache is one LRU over blocks, and so are its hits. Driven with the
requests as prompts, leaves go before what they stand on: of the oldest request's blocks the first survive, not the last, which
nobody could reach without the first. So it hits at least as often as an LRU that does not know of chains.
"""

from __future__ import annotations

import csv
import gzip
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from services.engine.scheduling.block_manager import BlockManager, BlockTable
from tests.unit.engine_core.fakes import FINGERPRINT

FOLDER = Path(__file__).resolve().parents[2] / "data" / "traces"
BLOCK = 2


@cache
def requests_of(trace: str) -> list[list[int]]:
    """Block ids of each request."""
    requests = []
    with gzip.open(FOLDER / f"mooncake_{trace}.txt.gz", "rt") as lines:
        for line in lines:
            runs = [run.split("-") for run in line.split()]
            requests.append([block for first, last in runs for block in range(int(first), int(last) + 1)])
    return requests


def golden() -> list[tuple[str, int, int]]:
    """(trace, capacity in blocks, blocks hit)."""
    with (FOLDER / "mooncake_lru_hit_rate.csv").open() as file:
        return [(row["trace"], int(row["capacity_blocks"]), int(row["block_hits"])) for row in csv.DictReader(file)]


@cache
def distinct_blocks(trace: str) -> list[int]:
    return sorted({block for request in requests_of(trace) for block in request})


def pool_for(trace: str, capacity: int) -> BlockManager:
    """Caches `capacity` blocks, or all of the trace's. A prompt's last token, computed in any case, takes one page more."""
    return BlockManager(min(capacity, len(distinct_blocks(trace))) + 1, BLOCK, FINGERPRINT)


def opened(blocks: Sequence[int]) -> BlockTable:
    """A table for a prompt of these blocks and one token more. Empty, it may be reserved in any pool, again and again."""
    return BlockManager(1, BLOCK, FINGERPRINT).open([*(block for block in blocks for _ in range(BLOCK)), 0])


@cache
def tables_of_blocks(trace: str) -> dict[int, BlockTable]:
    return {block: opened([block]) for block in distinct_blocks(trace)}


@pytest.fixture(scope="module", autouse=True)
def forget_traces() -> Iterator[None]:
    yield
    for kept in (requests_of, distinct_blocks, tables_of_blocks):
        kept.cache_clear()


def ask(pool: BlockManager, table: BlockTable) -> int:
    """One request's life as far as pages go; returns its blocks hit."""
    assert pool.reserve(table)
    hits = table.shared
    pool.publish(table, table.token_ids, len(table.token_ids) - 1)
    pool.free(table)
    return hits


@pytest.mark.parametrize(("trace", "capacity", "hits"), golden())
def test_driven_with_block_ids_the_hits_are_those_of_one_lru(trace: str, capacity: int, hits: int) -> None:
    pool, tables = pool_for(trace, capacity), tables_of_blocks(trace)
    got = 0
    for request in requests_of(trace):
        leading = True
        for block in request:
            leading = ask(pool, tables[block]) > 0 and leading
            got += leading
    assert got == hits
    pool.check_integrity([])


@pytest.mark.parametrize(("trace", "capacity", "hits"), [row for row in golden() if row[1] in (500, 2000, 10_000, 10**9)])
def test_driven_with_prompts_leaves_go_first_and_the_hits_are_no_fewer(trace: str, capacity: int, hits: int) -> None:
    pool = pool_for(trace, capacity)
    got = [ask(pool, opened(request)) for request in requests_of(trace)]
    assert got == leaf_lru(requests_of(trace), capacity)
    assert sum(got) >= hits
    pool.check_integrity([])


def leaf_lru(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Blocks hit by each request in one LRU over blocks that touches a request's blocks from the last to the first."""
    cached: OrderedDict[int, None] = OrderedDict()
    hits = []
    for request in requests:
        hits.append(next((at for at, block in enumerate(request) if block not in cached), len(request)))
        for block in reversed(request):
            cached[block] = None
            cached.move_to_end(block)
            if len(cached) > capacity:
                cached.popitem(last=False)
    return hits
