"""Which page belongs to whom: reservations, growth, reference counts and the prefix cache. Pure; every operation is O(blocks it touches).

A page is in exactly one state: *free*, *held* (some live sequence's) or *cached* (a finished block that no live sequence uses,
evictable). Finished full blocks form a forest: a block's parent is the block before it in its prompt. Three rules keep the
cache sound:

- A sequence references every block of its chain, from the first on. So a parent is referenced whenever a child is, a child
  becomes evictable no later than its parent, and evicting in that order always takes leaves first: no block outlives its parent.
- A hit needs equal salt, equal token ids and the very parent that was matched before, not only an equal hash. A colliding hash
  therefore costs a miss, never another prompt's KV.
- Only `publish` enters blocks, and its caller vouches that their KV is written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from kvrelay import hashing
from services.engine.api import BlockChanges

Hasher = Callable[[bytes, Sequence[int]], bytes]
"""(hash of the parent block, token ids of the block) to the block's hash."""


class CachedBlock:
    """A finished full block and the page that holds its KV."""

    __slots__ = ("digest", "page", "parent", "refs", "salt", "token_ids")

    def __init__(self, page: int, digest: bytes, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...]) -> None:
        self.page = page
        self.digest = digest
        self.parent = parent
        self.salt = salt
        self.token_ids = token_ids
        self.refs = 1
        """Live sequences whose chain holds this block."""


class BlockTable:
    """One sequence's pages, in order of its blocks, and the chain of finished blocks they begin with."""

    __slots__ = ("chain", "digests", "pages", "publishing", "salt", "shared", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], salt: str, digests: list[bytes]) -> None:
        self.token_ids = token_ids
        """Those known when the table was opened: the prompt, and of a preempted sequence the answer so far."""
        self.salt = salt
        self.digests = digests
        """Hashes of the full blocks of `token_ids`."""
        self.pages: list[int] = []
        self.chain: list[CachedBlock] = []
        """Published blocks, each referenced by this table. `chain[i].page` differs from `pages[i]` where another sequence
        published the same block first: then both pages are held until this table is freed, or grows and finds no other page."""
        self.shared = 0
        """Leading pages taken from the cache: read-only."""
        self.publishing = True


class BlockChangeLog:
    """What entered and left the cache since the last `take`, net.

    It holds at most the blocks cached now and those reported before: bounded by twice the pool, and nothing is ever lost.
    """

    def __init__(self) -> None:
        self._stored: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}

    def store(self, digest: bytes) -> None:
        if digest in self._removed:
            del self._removed[digest]
        else:
            self._stored[digest] = None

    def remove(self, digest: bytes) -> None:
        if digest in self._stored:
            del self._stored[digest]
        else:
            self._removed[digest] = None

    def add(self, changes: BlockChanges) -> None:
        """Appends what another log reported."""
        for digest in changes.removed:
            self.remove(digest)
        for digest in changes.stored:
            self.store(digest)

    def take(self) -> BlockChanges:
        """The net changes since the last call, oldest first."""
        changes = BlockChanges(stored=tuple(self._stored), removed=tuple(self._removed))
        self._stored.clear()
        self._removed.clear()
        return changes


class BlockManager:
    """Hands out the pages of a pool of `num_pages`, `block_size` tokens each."""

    def __init__(self, num_pages: int, block_size: int, fingerprint: bytes, hasher: Hasher = hashing.child_hash) -> None:
        assert num_pages > 0 and block_size > 0
        self.num_pages = num_pages
        self.block_size = block_size
        self.changes = BlockChangeLog()
        self.version = 0
        """Grows whenever a reservation that failed before might succeed."""
        self._fingerprint = fingerprint
        self._hash = hasher
        self._free = list(range(num_pages - 1, -1, -1))
        self._blocks: dict[bytes, CachedBlock] = {}
        self._evictable: OrderedDict[bytes, CachedBlock] = OrderedDict()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def cached_pages(self) -> int:
        return len(self._evictable)

    @property
    def available_pages(self) -> int:
        """Pages that a reservation can have: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._evictable)

    @property
    def held_pages(self) -> int:
        return self.num_pages - len(self._free) - len(self._evictable)

    def blocks_for(self, tokens: int) -> int:
        """Blocks, the last perhaps partial, that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def open(self, token_ids: Sequence[int], salt: str = "") -> BlockTable:
        """A table without pages for a sequence that begins with `token_ids`; hashes them once."""
        digests: list[bytes] = []
        parent = hashing.root_hash(self._fingerprint, salt)
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            parent = self._hash(parent, token_ids[start : start + self.block_size])
            digests.append(parent)
        return BlockTable(tuple(token_ids), salt, digests)

    def match(self, table: BlockTable) -> list[CachedBlock]:
        """The longest cached chain the table's tokens begin with. Never all of them: the last token is always computed."""
        found: list[CachedBlock] = []
        parent: CachedBlock | None = None
        for index in range((len(table.token_ids) - 1) // self.block_size):
            block = self._blocks.get(table.digests[index])
            if block is None or not self._is(block, parent, table.salt, self._block_ids(table.token_ids, index)):
                break
            found.append(block)
            parent = block
        return found

    def reserve(self, table: BlockTable, spare_pages: int = 0) -> bool:
        """Gives the table pages for its tokens, cached ones first, and leaves `spare_pages` to others; all, or (False) nothing changes."""
        assert not table.pages, "a table is reserved once"
        matched = self.match(table)
        wanted = self.blocks_for(len(table.token_ids)) - len(matched)
        idle = sum(1 for block in matched if block.refs == 0)
        if wanted + spare_pages > self.available_pages - idle:
            return False
        for block in matched:
            self._reference(block)
        table.chain = matched
        table.shared = len(matched)
        table.pages = [block.page for block in matched]
        table.pages.extend(self._take_page() for _ in range(wanted))
        return True

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Sees to it that a reserved table has pages for `tokens` tokens, all or (False) none.

        When they run out the table gives up its copies of published blocks, so that a sequence never needs more pages than blocks:
        its earlier pages may be others afterwards, and nobody but the engine may be reading them.
        """
        wanted = self.blocks_for(tokens) - len(table.pages)
        if wanted > self.available_pages:
            self._drop_copies(table)
        if wanted > self.available_pages:
            return False
        table.pages.extend(self._take_page() for _ in range(wanted))
        return True

    def publish(self, table: BlockTable, token_ids: Sequence[int], computed_tokens: int) -> None:
        """Enters the blocks of `token_ids` (prompt and answer) whose KV, up to `computed_tokens`, is in the table's pages."""
        for index in range(len(table.chain), computed_tokens // self.block_size):
            if not table.publishing:
                return
            parent = table.chain[-1] if table.chain else None
            ids = self._block_ids(token_ids, index)
            digest = table.digests[index] if index < len(table.digests) else self._extend(table, ids)
            block = self._blocks.get(digest)
            if block is None:
                block = CachedBlock(table.pages[index], digest, parent, table.salt, ids)
                self._blocks[digest] = block
                self.changes.store(digest)
                self.version += 1
            elif self._is(block, parent, table.salt, ids):
                self._reference(block)
            else:
                table.publishing = False
                return
            table.chain.append(block)

    def free(self, table: BlockTable) -> None:
        """Takes the table's pages back: published ones stay cached, the others are free. The table is empty afterwards."""
        for index in range(len(table.pages) - 1, -1, -1):
            block = table.chain[index] if index < len(table.chain) else None
            if block is None or block.page != table.pages[index]:
                self._free.append(table.pages[index])
            if block is not None:
                block.refs -= 1
                if block.refs == 0:
                    self._evictable[block.digest] = block
        table.pages = []
        table.chain = []
        table.shared = 0
        self.version += 1

    def check_integrity(self, tables: Iterable[BlockTable]) -> None:
        """Raises AssertionError unless every page is free, cached or held exactly once and each reference is some table's."""
        refs: dict[bytes, int] = {}
        private: list[int] = []
        for table in tables:
            assert len(table.chain) <= len(table.pages), "a chain is longer than its table"
            for index, page in enumerate(table.pages):
                block = table.chain[index] if index < len(table.chain) else None
                if block is None or block.page != page:
                    private.append(page)
                if block is not None:
                    assert self._blocks.get(block.digest) is block, "a referenced block is not in the cache"
                    assert block.parent is (table.chain[index - 1] if index else None), "a chain skips a block"
                    refs[block.digest] = refs.get(block.digest, 0) + 1
        for digest, block in self._blocks.items():
            assert block.refs == refs.get(digest, 0), (
                f"block of page {block.page}: {block.refs} references, {refs.get(digest, 0)} explained"
            )
            assert (block.refs == 0) == (digest in self._evictable), f"page {block.page} is in the wrong list"
            assert block.parent is None or self._blocks.get(block.parent.digest) is block.parent, "a block outlived its parent"
        pages = [*self._free, *private, *(block.page for block in self._blocks.values())]
        assert sorted(pages) == list(range(self.num_pages)), "free + cached + held pages are not the pool"
        assert self.held_pages == len(private) + sum(1 for block in self._blocks.values() if block.refs)

    def _block_ids(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _extend(self, table: BlockTable, token_ids: tuple[int, ...]) -> bytes:
        parent = table.chain[-1].digest if table.chain else hashing.root_hash(self._fingerprint, table.salt)
        return self._hash(parent, token_ids)

    @staticmethod
    def _is(block: CachedBlock, parent: CachedBlock | None, salt: str, token_ids: tuple[int, ...]) -> bool:
        return block.parent is parent and block.token_ids == token_ids and block.salt == salt

    def _reference(self, block: CachedBlock) -> None:
        if block.refs == 0:
            del self._evictable[block.digest]
        block.refs += 1

    def _drop_copies(self, table: BlockTable) -> None:
        for index, block in enumerate(table.chain):
            if table.pages[index] != block.page:
                self._free.append(table.pages[index])
                table.pages[index] = block.page
                self.version += 1

    def _take_page(self) -> int:
        if self._free:
            return self._free.pop()
        digest, block = self._evictable.popitem(last=False)
        del self._blocks[digest]
        self.changes.remove(digest)
        return block.page
