"""Reservations, sharing and eviction, case by case; `tests/property/test_block_manager_model.py` does it at random."""

from __future__ import annotations

import pytest

from kvrelay import hashing
from services.engine.scheduling.block_manager import BlockManager, BlockTable
from tests.unit.engine_core.fakes import FINGERPRINT


def manager(num_pages: int = 8, **kwargs: object) -> BlockManager:
    return BlockManager(num_pages, 4, FINGERPRINT, **kwargs)  # type: ignore[arg-type]


def held(blocks: BlockManager, prompt: list[int], total: int | None = None, salt: str = "", computed: int | None = None) -> BlockTable:
    """A reserved table whose KV is computed and published up to `computed` tokens (all, unless told)."""
    table = blocks.open(prompt, salt)
    assert blocks.reserve(table) and blocks.grow(table, total or len(prompt))
    blocks.publish(table, prompt, len(prompt) if computed is None else computed)
    return table


def shared_tokens(blocks: BlockManager, prompt: list[int], salt: str = "") -> int:
    return len(blocks.match(blocks.open(prompt, salt))) * blocks.block_size


def test_a_published_prefix_is_found_by_the_next_prompt_and_its_pages_are_shared() -> None:
    blocks = manager()
    first = held(blocks, [*range(10)])
    second = blocks.open([*range(8), 90, 91])
    assert blocks.reserve(second)
    assert second.shared == 2 and second.pages[:2] == first.pages[:2] and second.pages[2] != first.pages[2]
    blocks.check_integrity([first, second])


def test_hashes_are_the_chain_of_the_protocol() -> None:
    blocks = manager()
    held(blocks, [*range(10)], salt="tenant")
    root = hashing.root_hash(FINGERPRINT, "tenant")
    assert list(blocks.changes.take().stored) == hashing.block_hashes(root, [*range(10)], 4)


def test_the_whole_prompt_is_never_a_hit() -> None:
    blocks = manager()
    held(blocks, [*range(8)])
    assert shared_tokens(blocks, [*range(8)]) == 4
    assert shared_tokens(blocks, [*range(9)]) == 8


def test_salts_keep_caches_apart() -> None:
    blocks = manager()
    held(blocks, [*range(8)], salt="a")
    assert shared_tokens(blocks, [*range(9)], "a") == 8
    assert shared_tokens(blocks, [*range(9)], "b") == shared_tokens(blocks, [*range(9)]) == 0


def test_only_computed_blocks_are_published() -> None:
    blocks = manager()
    table = held(blocks, [*range(12)], computed=7)
    assert shared_tokens(blocks, [*range(12)]) == 4
    blocks.publish(table, [*range(12)], 8)
    assert shared_tokens(blocks, [*range(12)]) == 8


def test_blocks_of_the_answer_are_published_too() -> None:
    blocks = manager()
    table = held(blocks, [0, 1, 2], total=9)
    blocks.publish(table, [0, 1, 2, 3, 4, 5, 6, 7, 8], 8)
    assert shared_tokens(blocks, [*range(9)]) == 8


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    blocks = manager(num_pages=4)
    first = held(blocks, [*range(8)])
    blocks.free(first)
    free, cached = blocks.free_pages, blocks.cached_pages
    table = blocks.open([*range(17)])
    assert not blocks.reserve(table)
    assert (blocks.free_pages, blocks.cached_pages, table.pages) == (free, cached, [])
    table = blocks.open([*range(16)])
    assert blocks.reserve(table) and table.shared == 2
    blocks.check_integrity([table])


def test_a_table_grows_by_free_pages_then_by_evicting_and_then_not_at_all() -> None:
    blocks = manager(num_pages=4)
    blocks.free(held(blocks, [90, 91, 92, 93]))
    table = held(blocks, [*range(8)])
    assert blocks.grow(table, 8) and len(table.pages) == 2, "it has pages for these"
    assert blocks.grow(table, 9) and (blocks.free_pages, blocks.cached_pages) == (0, 1)
    assert not blocks.grow(table, 17) and len(table.pages) == 3, "all or nothing"
    assert blocks.grow(table, 13) and blocks.cached_pages == 0
    assert not blocks.grow(table, 17)
    blocks.check_integrity([table])


def test_a_table_that_finds_no_page_gives_up_its_copies_of_published_blocks() -> None:
    blocks = manager(num_pages=4)
    first, second = blocks.open([*range(8)]), blocks.open([*range(8)])
    assert blocks.reserve(first) and blocks.reserve(second)
    for table in (first, second):
        blocks.publish(table, [*range(8)], 8)
    blocks.free(first)
    assert (blocks.free_pages, blocks.cached_pages) == (0, 0), "two blocks in four pages, all of them the second one's"
    assert blocks.grow(second, 16) and len(set(second.pages)) == 4
    blocks.check_integrity([second])
    blocks.free(second)
    assert (blocks.free_pages, blocks.cached_pages) == (2, 2)


def test_pages_that_are_to_stay_for_others_are_not_given_away() -> None:
    blocks = manager(num_pages=4)
    blocks.free(held(blocks, [*range(8)]))
    table = blocks.open([*range(12)])
    assert not blocks.reserve(table, spare_pages=2)
    assert blocks.reserve(table, spare_pages=1) and table.shared == 2


def test_a_sequence_that_lost_its_pages_finds_its_answer_in_the_cache_too() -> None:
    blocks = manager()
    table = held(blocks, [0, 1, 2], total=11)
    tokens = [*range(11)]
    blocks.publish(table, tokens, 10)
    blocks.free(table)
    again = blocks.open(tokens)
    assert blocks.reserve(again) and again.shared == 2 and len(again.pages) == 3


def test_matched_pages_are_not_counted_as_room_for_the_rest() -> None:
    blocks = manager(num_pages=4)
    blocks.free(held(blocks, [*range(16)]))
    # All four pages are evictable; three are matched, so only one is left to take: five blocks cannot fit.
    assert not blocks.reserve(blocks.open([*range(12), *range(50, 58)]))
    table = blocks.open([*range(13)])
    assert blocks.reserve(table) and table.shared == 3


def test_eviction_takes_tails_before_heads_and_the_least_recently_used_first() -> None:
    blocks = manager(num_pages=4)
    blocks.free(held(blocks, [*range(8)]))
    blocks.free(held(blocks, [50, 51, 52, 53, 54, 55, 56, 57]))
    other = held(blocks, [90, 91])
    assert shared_tokens(blocks, [*range(9)]) == 4
    assert shared_tokens(blocks, [50, 51, 52, 53, 54, 55, 56, 57, 58]) == 8
    blocks.check_integrity([other])


def test_a_block_computed_twice_is_cached_once_and_lives_while_either_needs_it() -> None:
    blocks = manager()
    prompt = [*range(8)]
    first, second = blocks.open([*prompt, 80]), blocks.open([*prompt, 90])
    assert blocks.reserve(first) and blocks.reserve(second)
    blocks.publish(first, [*prompt, 80], 9)
    blocks.publish(second, [*prompt, 90], 9)
    assert len(blocks.changes.take().stored) == 2 and not {*first.pages} & {*second.pages}
    blocks.free(first)
    blocks.check_integrity([second])
    assert blocks.cached_pages == 0, "the second request's chain still holds the first one's blocks"
    blocks.free(second)
    assert blocks.cached_pages == 2 and blocks.free_pages == 6


@pytest.mark.parametrize("levels", [1, 2])
def test_a_colliding_hash_costs_a_miss_and_never_gives_other_kv(levels: int) -> None:
    blocks = manager(hasher=lambda parent, ids: b"same" if levels == 1 else (b"1" if len(parent) == 32 else b"2"))
    first = held(blocks, [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert shared_tokens(blocks, [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 0
    assert shared_tokens(blocks, [1, 1, 1, 1, 7, 7, 7, 7, 3]) == 4
    other = held(blocks, [9, 9, 9, 9, 2, 2, 2, 2, 3])
    blocks.check_integrity([first, other])
    assert shared_tokens(blocks, [9, 9, 9, 9, 2, 2, 2, 2, 3]) == 0


def test_changes_are_net_and_lose_nothing() -> None:
    blocks = manager(num_pages=2)
    blocks.free(held(blocks, [*range(8)]))
    reported = blocks.changes.take()
    assert len(reported.stored) == 2 and not reported.removed
    blocks.free(held(blocks, [90, 91, 92, 93]))  # evicts the tail
    blocks.free(held(blocks, [80, 81, 82, 83, 84, 85, 86, 87]))  # evicts the rest, and the block no one heard of
    changes = blocks.changes.take()
    assert set(changes.removed) == set(reported.stored) and len(changes.stored) == 2
    assert blocks.changes.take() == type(changes)()


def test_integrity_notices_a_page_that_nobody_explains() -> None:
    blocks = manager()
    table = held(blocks, [*range(6)])
    with pytest.raises(AssertionError):
        blocks.check_integrity([])
    table.pages.append(table.pages[0])
    with pytest.raises(AssertionError):
        blocks.check_integrity([table])
