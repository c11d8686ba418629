"""Which blocks are stored, who reads and writes them, and which go first when memory runs out: pure, told the time with every call.

A chain is a prompt's blocks in order, each named by a key that determines all before it. What is visible is always closed towards the
head: where a block is stored, so are those before it. Three things keep it so: a commit stops at the first gap, a lease pins its chain
from the head on, and every use of a chain makes its head the most recently used and its tail the least, so that tails are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvrelay.errors import HandleError, HandleForgedError, InvalidRequestError, LeaseExpiredError, OverloadedError
from services.kvstore.memory import Block
from services.relay.leases import LeaseEnd, LeaseTable


@dataclass(slots=True)
class _Stored:
    block: Block
    pins: int = 0
    """Leases whose chain it is in."""


@dataclass(slots=True)
class _Write:
    keys: Sequence[bytes]
    block_bytes: int
    missing: frozenset[int]
    pinned: Sequence[bytes]
    written: dict[int, Block] = field(default_factory=dict)
    arriving: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Read:
    keys: Sequence[bytes]


class BlockStore:
    """Two-phase writes, leased reads, LRU under a memory limit. `now` is seconds on one monotonic clock."""

    def __init__(self, limit_bytes: int, lease_ttl_s: float, *, max_leases: int = 1024, max_chain_blocks: int = 16384) -> None:
        self.limit_bytes = limit_bytes
        self.lease_ttl_s = lease_ttl_s
        self.used_bytes = 0
        """Of visible blocks and of those being written, room for arriving ones included."""
        self.hits = 0
        """Lookups since the start that found at least one block."""
        self.misses = 0
        """Lookups since the start that found none."""
        self.evicted = 0
        """Blocks since the start."""
        self._max_chain_blocks = max_chain_blocks
        self._leases = LeaseTable(lease_ttl_s, max_live=max_leases)
        self._stored: dict[bytes, _Stored] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()
        """Visible and unpinned, least recently used first, with sizes in bytes."""
        self._idle_bytes = 0
        self._open: dict[str, _Write | _Read] = {}

    @property
    def blocks(self) -> int:
        """Visible blocks."""
        return len(self._stored)

    @property
    def leases(self) -> int:
        """Live leases."""
        return len(self._leases)

    # --- writes ------------------------------------------------------------------------------------------------------------------

    def create(self, name: str, lease_id: str, keys: Sequence[bytes], block_bytes: int, now: float) -> list[int]:
        """Opens a write of a chain of blocks of `block_bytes` each; the indexes of those not stored. The others are pinned.

        Raises `InvalidRequestError` for a chain that is empty, too long, repeats a block, or has blocks over the memory limit;
        `OverloadedError` when too many leases are out.
        """
        self._check_chain(keys)
        if not 0 < block_bytes <= self.limit_bytes:
            raise InvalidRequestError(f"a block of {block_bytes} bytes in a store of {self.limit_bytes}", field="layout")
        self._leases.grant(name, lease_id, now)
        missing = [index for index, key in enumerate(keys) if key not in self._stored]
        pinned = [key for key in keys if key in self._stored]
        self._pin(pinned)
        self._open[name] = _Write(tuple(keys), block_bytes, frozenset(missing), pinned)
        return missing

    def check_write(self, name: str, lease_id: str, now: float) -> None:
        """Raises the `HandleError` that says why nothing can be written under this handle."""
        self._writing(name, lease_id, now)

    def begin_block(self, name: str, lease_id: str, index: int, now: float) -> int:
        """Makes room for a block that is about to arrive; its size in bytes. Extends the lease.

        Raises `InvalidRequestError` for a block that isn't missing, was written, or is arriving already; `OverloadedError` when
        everything stored is in use; `HandleError` when the write is over.
        """
        write = self._writing(name, lease_id, now)
        if index not in write.missing or index in write.written or index in write.arriving:
            raise InvalidRequestError(f"block {index} is not one to be written now", field="segment.first_block")
        self._make_room(write.block_bytes)
        self.used_bytes += write.block_bytes
        write.arriving.add(index)
        self._leases.touch(name, now)
        return write.block_bytes

    def finish_block(self, name: str, lease_id: str, index: int, block: Block, now: float) -> None:
        """A begun block arrived and is verified. Not visible yet. Extends the lease."""
        write = self._writing(name, lease_id, now)
        assert index in write.arriving and block.size_bytes == write.block_bytes
        write.arriving.discard(index)
        write.written[index] = block
        self._leases.touch(name, now)

    def abandon_block(self, name: str, index: int) -> None:
        """A begun block will not arrive; its room is free again. Does nothing when the write is over."""
        write = self._open.get(name)
        if isinstance(write, _Write) and index in write.arriving:
            write.arriving.discard(index)
            self.used_bytes -= write.block_bytes

    def commit(self, name: str, lease_id: str, now: float) -> int:
        """Ends a write and makes its blocks visible, up to the first gap in the chain; how many became visible.

        Blocks that another writer committed meanwhile are dropped: equal keys are equal blocks.
        """
        write = self._writing(name, lease_id, now)
        length = 0
        while length < len(write.keys) and (write.keys[length] in self._stored or length in write.written):
            length += 1
        chain = write.keys[:length]
        fresh = [index for index, key in enumerate(chain) if key not in self._stored]
        for index in fresh:
            self._stored[chain[index]] = _Stored(write.written.pop(index), pins=1)
        self._finish(name, LeaseEnd.RELEASED, now)
        self._unpin([chain[index] for index in fresh])
        self._use(chain)
        return len(fresh)

    # --- reads -------------------------------------------------------------------------------------------------------------------

    def lookup(self, name: str, lease_id: str, keys: Sequence[bytes], now: float) -> list[Block]:
        """The longest stored prefix of a chain, pinned under a lease unless it is empty. Raises as `create` does."""
        self._check_chain(keys)
        found = 0
        while found < len(keys) and keys[found] in self._stored:
            found += 1
        if found == 0:
            self.misses += 1
            return []
        self._leases.grant(name, lease_id, now)
        self.hits += 1
        prefix = tuple(keys[:found])
        self._pin(prefix)
        self._open[name] = _Read(prefix)
        return [self._stored[key].block for key in prefix]

    def readable(self, name: str, lease_id: str, now: float) -> int:
        """How many blocks a leased prefix has. Raises the `HandleError` that says what is wrong with the handle."""
        return len(self._reading(name, lease_id, now).keys)

    def begin_read(self, name: str) -> None:
        """Takes the one use of a prefix that is `readable`; raises `HandleConsumedError` when it is gone."""
        self._leases.consume(name)

    def block(self, name: str, lease_id: str, index: int, now: float) -> Block:
        """A block of a leased prefix. Extends the lease."""
        read = self._reading(name, lease_id, now)
        self._leases.touch(name, now)
        return self._stored[read.keys[index]].block

    # --- leases ------------------------------------------------------------------------------------------------------------------

    def renew(self, name: str, lease_id: str, now: float) -> float | None:
        return self._leases.renew(name, lease_id, now)

    def release(self, name: str, lease_id: str, now: float) -> None:
        """Ends a read, or a write, whose blocks are dropped. Nothing for one that is over; `HandleForgedError` for a wrong secret."""
        if name not in self._open:
            return
        try:
            self._leases.check(name, lease_id, now)
        except LeaseExpiredError:
            self._finish(name, LeaseEnd.EXPIRED, now)
        else:
            self._finish(name, LeaseEnd.RELEASED, now)

    def expire(self, now: float) -> None:
        """Ends what let its lease run out."""
        for name in self._leases.expire(now):
            self._drop(name)

    def check_integrity(self) -> None:
        """Raises AssertionError unless bytes, pins and leases explain one another."""
        writes = [x for x in self._open.values() if isinstance(x, _Write)]
        held = sum(w.block_bytes * (len(w.written) + len(w.arriving)) for w in writes)
        assert self.used_bytes == held + sum(s.block.size_bytes for s in self._stored.values()) <= self.limit_bytes
        pins: dict[bytes, int] = dict.fromkeys(self._stored, 0)
        for entry in self._open.values():
            for key in entry.pinned if isinstance(entry, _Write) else entry.keys:
                pins[key] += 1
        assert pins == {key: s.pins for key, s in self._stored.items()}
        assert self._idle == {key: self._stored[key].block.size_bytes for key, count in pins.items() if count == 0}
        assert self._idle_bytes == sum(self._idle.values())
        assert len(self._open) == len(self._leases)

    # --- inside ------------------------------------------------------------------------------------------------------------------

    def _check_chain(self, keys: Sequence[bytes]) -> None:
        if not 0 < len(keys) <= self._max_chain_blocks:
            raise InvalidRequestError(f"a chain of {len(keys)} blocks; 1 to {self._max_chain_blocks} are taken", field="block_hashes")
        if len(set(keys)) != len(keys):
            raise InvalidRequestError("a chain that repeats a block", field="block_hashes")

    def _writing(self, name: str, lease_id: str, now: float) -> _Write:
        self._leases.check(name, lease_id, now)
        write = self._open[name]
        if not isinstance(write, _Write):
            raise HandleForgedError("the handle is not of a write", handle=name)
        return write

    def _reading(self, name: str, lease_id: str, now: float) -> _Read:
        self._leases.check(name, lease_id, now)
        read = self._open[name]
        if not isinstance(read, _Read):
            raise HandleError("nothing can be read before the commit", handle=name)
        return read

    def _finish(self, name: str, why: LeaseEnd, now: float) -> None:
        self._leases.end(name, why, now)
        self._drop(name)

    def _drop(self, name: str) -> None:
        entry = self._open.pop(name)
        if isinstance(entry, _Read):
            self._unpin(entry.keys)
            return
        self.used_bytes -= entry.block_bytes * (len(entry.written) + len(entry.arriving))
        self._unpin(entry.pinned)

    def _pin(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._stored[key].pins += 1
            self._idle_bytes -= self._idle.pop(key, 0)

    def _unpin(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            stored = self._stored[key]
            stored.pins -= 1
            if stored.pins == 0:
                self._idle[key] = stored.block.size_bytes
                self._idle_bytes += stored.block.size_bytes

    def _use(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._idle:
                self._idle.move_to_end(key)

    def _make_room(self, size_bytes: int) -> None:
        over = self.used_bytes + size_bytes - self.limit_bytes
        if over > self._idle_bytes:
            raise OverloadedError("every stored block is in use", retry_after_s=1.0, limit_bytes=self.limit_bytes)
        while over > 0:
            key, freed = self._idle.popitem(last=False)
            del self._stored[key]
            self._idle_bytes -= freed
            self.used_bytes -= freed
            over -= freed
            self.evicted += 1
