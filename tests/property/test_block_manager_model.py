"""The block manager against a plain model of what each page holds, under any sequence of operations."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvrelay import hashing
from services.engine.scheduling.block_manager import BlockManager, BlockTable

PAGES, BLOCK = 12, 2
FINGERPRINT = b"p" * 32
Content = tuple[str, tuple[int, ...]]
"""What KV depends on: the salt and every token up to the end of the block."""


def weak_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Collides all the time."""
    return bytes([hashing.child_hash(parent, token_ids)[0] % 5])


class Live:
    """One sequence of the model."""

    def __init__(self, table: BlockTable, tokens: list[int], salt: str) -> None:
        self.table = table
        self.tokens = tokens
        self.salt = salt
        self.computed = table.shared * BLOCK

    def content(self, index: int) -> Content:
        return self.salt, tuple(self.tokens[: (index + 1) * BLOCK])


class BlockManagerMachine(RuleBasedStateMachine):
    """`pages` says what was really written into each page; the manager must never give a page to a prompt it is wrong for."""

    hasher = staticmethod(hashing.child_hash)
    exact = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(PAGES, BLOCK, FINGERPRINT, self.hasher)
        self.pages: dict[int, Content | None] = {}
        self.live: list[Live] = []
        self.known: set[bytes] = set()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        salt=st.sampled_from(["", "x"]),
        spare=st.integers(0, 3),
    )
    def reserve(self, prompt: list[int], salt: str, spare: int) -> None:
        table = self.blocks.open(prompt, salt)
        wanted = self.blocks.blocks_for(len(prompt))
        matched = self.blocks.match(table)
        idle = sum(1 for block in matched if block.refs == 0)
        fits = wanted - len(matched) + spare <= self.blocks.free_pages + self.blocks.cached_pages - idle
        before = (self.blocks.free_pages, self.blocks.cached_pages)
        assert self.blocks.reserve(table, spare) == fits
        if not fits:
            assert before == (self.blocks.free_pages, self.blocks.cached_pages)
            return
        assert len(table.pages) == wanted and len(set(table.pages)) == wanted
        assert table.shared * BLOCK < len(prompt)
        self._begin(Live(table, list(prompt), salt))

    def _begin(self, sequence: Live) -> None:
        table = sequence.table
        for index in range(table.shared):
            assert self.pages[table.pages[index]] == sequence.content(index), "a hit on another prompt's KV"
        if self.exact:
            self._check_longest(sequence)
        self._take(table, table.shared)
        self.live.append(sequence)

    def _take(self, table: BlockTable, first: int) -> None:
        """Pages that one sequence is to write: nobody else's, and whatever was in them is worth nothing from now on."""
        others = {page for each in self.live if each.table is not table for page in each.table.pages}
        assert not others & set(table.pages[first:]), "a page for two writers"
        for page in table.pages[first:]:
            self.pages[page] = None

    def _check_longest(self, sequence: Live) -> None:
        self._take_changes()
        chain = hashing.block_hashes(hashing.root_hash(FINGERPRINT, sequence.salt), sequence.tokens, BLOCK)
        limit = (len(sequence.tokens) - 1) // BLOCK
        hits = next((at for at, digest in enumerate(chain[:limit]) if digest not in self.known), limit)
        # The reservation may have evicted what it did not match, never what it did.
        assert sequence.table.shared >= hits

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 5))
    def compute(self, data: st.DataObject, count: int) -> None:
        """A step: the table grows if it must, tokens are fed, blocks are written, then published."""
        sequence = data.draw(st.sampled_from(self.live))
        end = sequence.computed + count
        had, available = list(sequence.table.pages), self.blocks.available_pages
        more = max(0, self.blocks.blocks_for(end) - len(had))
        shared = [block.page for block in sequence.table.chain]
        copies = sum(1 for page, other in zip(had, shared, strict=False) if page != other) if more > available else 0
        assert self.blocks.grow(sequence.table, end) == (more <= available + copies)
        # Where pages ran out, published blocks stand in for the copies of them.
        kept = [*shared, *had[len(shared) :]] if copies else had
        if more > available + copies:
            assert sequence.table.pages == kept and self.blocks.available_pages == available + copies
            return
        assert sequence.table.pages[: len(had)] == kept and len(sequence.table.pages) == len(had) + more
        self._take(sequence.table, len(had))
        while len(sequence.tokens) < end:
            sequence.tokens.append(data.draw(st.integers(0, 1)))
        for index in range(sequence.computed // BLOCK, end // BLOCK):
            self.pages[sequence.table.pages[index]] = sequence.content(index)
        sequence.computed = end
        self.blocks.publish(sequence.table, sequence.tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.blocks.free(sequence.table)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """Pages are taken away; with all its tokens, the answer's among them, the sequence begins again, if there is room."""
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.blocks.free(sequence.table)
        table = self.blocks.open(sequence.tokens, sequence.salt)
        if self.blocks.reserve(table):
            self._begin(Live(table, sequence.tokens, sequence.salt))

    @rule()
    def _take_changes(self) -> None:
        changes = self.blocks.changes.take()
        assert set(changes.removed) <= self.known and not set(changes.stored) & self.known
        self.known = (self.known - set(changes.removed)) | set(changes.stored)

    @invariant()
    def sound(self) -> None:
        self.blocks.check_integrity(sequence.table for sequence in self.live)
        for sequence in self.live:
            for index in range(sequence.computed // BLOCK):
                assert self.pages[sequence.table.pages[index]] == sequence.content(index), "a live sequence lost its KV"

    def teardown(self) -> None:
        for sequence in self.live:
            self.blocks.free(sequence.table)
        self.blocks.check_integrity([])
        assert self.blocks.held_pages == 0


class CollidingMachine(BlockManagerMachine):
    """The same with a hash that nearly always collides."""

    hasher = staticmethod(weak_hash)
    exact = False


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
CollidingMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBlockManager = BlockManagerMachine.TestCase
TestBlockManagerWithCollisions = CollidingMachine.TestCase
