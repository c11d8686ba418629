"""BlockStore against a dict model with leases, memory, LRU and time as events; then the rules one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvrelay.errors import (
    HandleConsumedError,
    HandleError,
    HandleForgedError,
    InvalidRequestError,
    KvNotFoundError,
    LeaseExpiredError,
    OverloadedError,
)
from services.kvstore.memory import Block
from services.kvstore.store import BlockStore

SIZE = 10
LIMIT = 5 * SIZE + 5
TTL_S = 10.0
MAX_LEASES = 5


def chain(path: str) -> list[bytes]:
    """'abc' is the chain a, ab, abc: a key names all before it, as a block hash does."""
    return [path[: i + 1].encode() for i in range(len(path))]


def block(key: bytes) -> Block:
    return Block((key.ljust(SIZE, b"."),), len(key))


paths = st.text("ab", min_size=1, max_size=5)


@dataclass
class ModelLease:
    keys: list[bytes]
    pinned: list[bytes]
    deadline: float
    missing: set[int] | None = None
    """None for a read."""
    written: set[int] = field(default_factory=set)
    arriving: set[int] = field(default_factory=set)
    used_up: bool = False


class StoreModel(RuleBasedStateMachine):
    handles = Bundle("handles")

    @initialize()
    def begin(self) -> None:
        self.store = BlockStore(LIMIT, TTL_S, max_leases=MAX_LEASES, max_chain_blocks=5)
        self.now = 0.0
        self.count = 0
        self.clock = 0
        self.visible: dict[bytes, int] = {}
        """Key to when it was last used."""
        self.leases: dict[str, ModelLease] = {}

    # --- the model ---

    def pins(self, key: bytes) -> int:
        return sum(key in lease.pinned for lease in self.leases.values())

    def used(self) -> int:
        writes = [x for x in self.leases.values() if x.missing is not None]
        return SIZE * (len(self.visible) + sum(len(x.written) + len(x.arriving) for x in writes))

    def use(self, keys: list[bytes]) -> None:
        for key in reversed(keys):
            if self.pins(key) == 0:
                self.clock += 1
                self.visible[key] = self.clock

    def drop(self, name: str) -> None:
        lease = self.leases.pop(name)
        self.use(lease.pinned)

    def alive(self, name: str) -> ModelLease | None:
        lease = self.leases.get(name)
        return lease if lease is not None and self.now < lease.deadline else None

    def has_room(self) -> bool:
        """Evicts as the store should; False when it can't."""
        idle = sorted((stamp, key) for key, stamp in self.visible.items() if self.pins(key) == 0)
        over = self.used() + SIZE - LIMIT
        if over > SIZE * len(idle):
            return False
        for _, key in idle[: max(0, -(-over // SIZE))]:
            del self.visible[key]
        return True

    # --- the rules ---

    @rule(target=handles, path=paths)
    def create(self, path: str) -> object:
        self.count += 1
        name = f"h{self.count}"
        keys = chain(path)
        if len(self.leases) == MAX_LEASES:
            with pytest.raises(OverloadedError):
                self.store.create(name, "s", keys, SIZE, self.now)
            return multiple()
        missing = self.store.create(name, "s", keys, SIZE, self.now)
        assert missing == [i for i, key in enumerate(keys) if key not in self.visible]
        pinned = [key for key in keys if key in self.visible]
        self.leases[name] = ModelLease(keys, pinned, self.now + TTL_S, set(missing))
        return name

    @rule(target=handles, path=paths)
    def lookup(self, path: str) -> object:
        self.count += 1
        name = f"h{self.count}"
        keys = chain(path)
        found = 0
        while found < len(keys) and keys[found] in self.visible:
            found += 1
        if found and len(self.leases) == MAX_LEASES:
            with pytest.raises(OverloadedError):
                self.store.lookup(name, "s", keys, self.now)
            return multiple()
        assert self.store.lookup(name, "s", keys, self.now) == [block(key) for key in keys[:found]]
        if not found:
            return multiple()
        self.leases[name] = ModelLease(keys[:found], keys[:found], self.now + TTL_S)
        return name

    @rule(name=handles, index=st.integers(0, 4), end=st.sampled_from(["finish", "finish", "abandon", "leave"]))
    def write(self, name: str, index: int, end: str) -> None:
        lease = self.alive(name)
        if lease is None or lease.missing is None:
            with pytest.raises(HandleError):
                self.store.begin_block(name, "s", index, self.now)
            return
        if index not in lease.missing - lease.written - lease.arriving:
            with pytest.raises(InvalidRequestError):
                self.store.begin_block(name, "s", index, self.now)
            return
        if not self.has_room():
            with pytest.raises(OverloadedError):
                self.store.begin_block(name, "s", index, self.now)
            return
        assert self.store.begin_block(name, "s", index, self.now) == SIZE
        lease.deadline = self.now + TTL_S
        if end == "finish":
            self.store.finish_block(name, "s", index, block(lease.keys[index]), self.now)
            lease.written.add(index)
        elif end == "abandon":
            self.store.abandon_block(name, index)
        else:
            lease.arriving.add(index)

    @rule(name=handles)
    def commit(self, name: str) -> None:
        lease = self.alive(name)
        if lease is None or lease.missing is None:
            with pytest.raises(HandleError):
                self.store.commit(name, "s", self.now)
            return
        length = 0
        while length < len(lease.keys) and (lease.keys[length] in self.visible or length in lease.written):
            length += 1
        fresh = [key for key in lease.keys[:length] if key not in self.visible]
        assert self.store.commit(name, "s", self.now) == len(fresh)
        self.drop(name)
        self.visible.update(dict.fromkeys(fresh, 0))
        self.use(lease.keys[:length])

    @rule(path=paths)
    def store_whole_chain(self, path: str) -> None:
        """All of a write in one step, so that memory runs out often."""
        name = self.create(path)
        if isinstance(name, str):
            for index in range(len(path)):
                self.write(name, index, "finish")
            self.commit(name)

    @rule(name=handles, index=st.integers(0, 4))
    def read(self, name: str, index: int) -> None:
        lease = self.alive(name)
        if lease is None or lease.missing is not None:
            with pytest.raises(HandleError):
                self.store.readable(name, "s", self.now)
            return
        assert self.store.readable(name, "s", self.now) == len(lease.keys)
        if lease.used_up:
            with pytest.raises(HandleConsumedError):
                self.store.begin_read(name)
        else:
            self.store.begin_read(name)
            lease.used_up = True
        if index < len(lease.keys):
            assert self.store.block(name, "s", index, self.now) == block(lease.keys[index])
            lease.deadline = self.now + TTL_S

    @rule(name=handles, right=st.booleans())
    def renew(self, name: str, right: bool) -> None:
        lease = self.alive(name)
        assert (self.store.renew(name, "s" if right else "guess", self.now) is not None) is (lease is not None and right)
        if lease is not None and right:
            lease.deadline = self.now + TTL_S

    @rule(name=consumes(handles))
    def release(self, name: str) -> None:
        self.store.release(name, "s", self.now)
        if name in self.leases:
            self.drop(name)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]), sweep=st.booleans())
    def time_passes(self, seconds: float, sweep: bool) -> None:
        self.now += seconds
        if sweep:
            self.store.expire(self.now)
            for name in sorted((n for n, x in self.leases.items() if self.now >= x.deadline), key=lambda n: self.leases[n].deadline):
                self.drop(name)

    @invariant()
    def as_the_model_says(self) -> None:
        if not hasattr(self, "store"):
            return
        self.store.check_integrity()
        assert set(self.store._stored) == set(self.visible)
        assert all(key[:-1] in self.visible for key in self.visible if len(key) > 1), "a block whose parent is gone cannot be found"
        assert self.store.used_bytes == self.used() <= LIMIT
        assert self.store.leases == len(self.leases) and self.store.blocks == len(self.visible)


StoreModel.TestCase.settings = settings(max_examples=50, stateful_step_count=40, deadline=None)
TestStoreModel = StoreModel.TestCase


def fill(store: BlockStore, path: str, now: float = 0.0, name: str | None = None) -> int:
    name = name or f"w-{path}-{now}"
    keys = chain(path)
    for index in store.create(name, "s", keys, SIZE, now):
        store.begin_block(name, "s", index, now)
        store.finish_block(name, "s", index, block(keys[index]), now)
    return store.commit(name, "s", now)


def stored(store: BlockStore) -> set[str]:
    return {key.decode() for key in store._stored}


def test_nothing_is_visible_before_the_commit_and_then_all_at_once() -> None:
    store = BlockStore(LIMIT, TTL_S)
    keys = chain("ab")
    assert store.create("w", "s", keys, SIZE, 0.0) == [0, 1]
    for index in (1, 0):
        store.begin_block("w", "s", index, 0.0)
        store.finish_block("w", "s", index, block(keys[index]), 0.0)
    assert store.lookup("r", "s", keys, 0.0) == [] and store.blocks == 0
    with pytest.raises(HandleError):
        store.readable("w", "s", 0.0)
    assert store.commit("w", "s", 0.0) == 2
    assert store.lookup("r", "s", [*keys, b"abc"], 0.0) == [block(b"a"), block(b"ab")]
    assert (store.hits, store.misses) == (1, 1)
    with pytest.raises(HandleConsumedError):
        store.commit("w", "s", 0.0)


def test_two_writers_of_the_same_blocks_do_no_harm() -> None:
    store = BlockStore(LIMIT, TTL_S)
    keys = chain("abc")
    assert store.create("w1", "s", keys, SIZE, 0.0) == [*store.create("w2", "s", keys[:2], SIZE, 0.0), 2]
    for name, count in (("w1", 3), ("w2", 2)):
        for index in range(count):
            store.begin_block(name, "s", index, 0.0)
            store.finish_block(name, "s", index, block(keys[index]), 0.0)
    assert store.used_bytes == 5 * SIZE
    assert (store.commit("w2", "s", 0.0), store.commit("w1", "s", 0.0)) == (2, 1)
    assert store.used_bytes == 3 * SIZE and stored(store) == {"a", "ab", "abc"}
    store.check_integrity()


def test_a_commit_stops_at_the_first_gap() -> None:
    store = BlockStore(LIMIT, TTL_S)
    keys = chain("abc")
    store.create("w", "s", keys, SIZE, 0.0)
    for index in (0, 2):
        store.begin_block("w", "s", index, 0.0)
        store.finish_block("w", "s", index, block(keys[index]), 0.0)
    assert store.commit("w", "s", 0.0) == 1
    assert stored(store) == {"a"} and store.used_bytes == SIZE


def test_the_tail_of_the_least_recently_used_chain_goes_first() -> None:
    store = BlockStore(6 * SIZE, TTL_S)
    fill(store, "aaa")
    fill(store, "bbb")
    store.lookup("r", "s", chain("aaa"), 1.0)
    store.release("r", "s", 1.0)
    fill(store, "c", 2.0)
    assert stored(store) == {"a", "aa", "aaa", "b", "bb", "c"}
    fill(store, "cdef", 3.0)
    assert stored(store) == {"a", "aa", "c", "cd", "cde", "cdef"}
    assert store.evicted == 4


def test_a_chain_that_grew_still_loses_its_tail_first() -> None:
    store = BlockStore(2 * SIZE, TTL_S)
    fill(store, "a")
    fill(store, "ab", 1.0)
    fill(store, "c", 2.0)
    assert stored(store) == {"a", "c"}


def test_what_is_being_read_stays_and_memory_that_is_all_in_use_refuses_writers() -> None:
    store = BlockStore(3 * SIZE, TTL_S)
    fill(store, "aaa")
    store.lookup("r", "s", chain("aa"), 0.0)
    assert fill(store, "b", 1.0) == 1
    assert stored(store) == {"a", "aa", "b"}, "only the unpinned tail could go"
    store.create("w", "s", chain("cc"), SIZE, 2.0)
    store.begin_block("w", "s", 0, 2.0)
    with pytest.raises(OverloadedError) as caught:
        store.begin_block("w", "s", 1, 2.0)
    assert caught.value.retry_after_s is not None and stored(store) == {"a", "aa"}
    assert store.block("r", "s", 1, 2.0) == block(b"aa")
    store.check_integrity()


def test_what_an_open_write_builds_on_stays() -> None:
    store = BlockStore(2 * SIZE, TTL_S)
    fill(store, "a")
    assert store.create("w", "s", chain("ab"), SIZE, 0.0) == [1]
    store.create("v", "s", chain("cc"), SIZE, 0.0)
    store.begin_block("v", "s", 0, 0.0)
    with pytest.raises(OverloadedError):
        store.begin_block("w", "s", 1, 0.0)
    store.release("v", "s", 0.0)
    store.begin_block("w", "s", 1, 0.0)
    store.finish_block("w", "s", 1, block(b"ab"), 0.0)
    assert store.commit("w", "s", 0.0) == 1 and stored(store) == {"a", "ab"}


def test_a_write_that_cannot_fit_evicts_nothing() -> None:
    store = BlockStore(3 * SIZE, TTL_S)
    fill(store, "a")
    store.lookup("r", "s", chain("a"), 0.0)
    fill(store, "b")
    store.create("w", "s", chain("cc"), 2 * SIZE + 1, 0.0)
    with pytest.raises(OverloadedError):
        store.begin_block("w", "s", 0, 0.0)
    assert stored(store) == {"a", "b"}


def test_an_abandoned_write_gives_its_memory_back_when_its_lease_ends() -> None:
    store = BlockStore(LIMIT, TTL_S)
    fill(store, "a")
    store.create("w", "s", chain("aab"), SIZE, 0.0)
    store.begin_block("w", "s", 1, 0.0)
    store.finish_block("w", "s", 1, block(b"aa"), 0.0)
    store.begin_block("w", "s", 2, 5.0)
    store.expire(14.0)
    assert store.used_bytes == 3 * SIZE and store.leases == 1
    store.expire(15.0)
    assert store.used_bytes == SIZE and store.leases == 0 and stored(store) == {"a"}
    with pytest.raises(LeaseExpiredError):
        store.finish_block("w", "s", 2, block(b"aab"), 15.0)
    store.abandon_block("w", 2)
    store.check_integrity()


def test_handles_are_refused_by_their_true_reason() -> None:
    store = BlockStore(LIMIT, TTL_S)
    fill(store, "ab")
    store.lookup("r", "s", chain("ab"), 0.0)
    store.create("w", "s", chain("b"), SIZE, 0.0)
    with pytest.raises(HandleForgedError):
        store.readable("r", "guess", 0.0)
    with pytest.raises(HandleForgedError):
        store.commit("w", "guess", 0.0)
    with pytest.raises(HandleForgedError):
        store.release("w", "guess", 0.0)
    with pytest.raises(HandleForgedError):
        store.commit("r", "s", 0.0)
    with pytest.raises(KvNotFoundError):
        store.readable("x", "s", 0.0)
    store.begin_read("r")
    with pytest.raises(HandleConsumedError):
        store.begin_read("r")
    with pytest.raises(LeaseExpiredError):
        store.block("r", "s", 0, 10.0)
    store.release("r", "s", 10.0)
    with pytest.raises(LeaseExpiredError):
        store.readable("r", "s", 10.0)
    store.release("unknown", "s", 0.0)


@pytest.mark.parametrize(
    ("keys", "size"),
    [([], SIZE), (chain("aaaaaa"), SIZE), ([b"a", b"a"], SIZE), ([b"a"], LIMIT + 1), ([b"a"], 0)],
    ids=["empty", "too long", "repeats", "block over memory", "empty block"],
)
def test_a_chain_that_makes_no_sense_is_refused(keys: list[bytes], size: int) -> None:
    store = BlockStore(LIMIT, TTL_S, max_chain_blocks=5)
    with pytest.raises(InvalidRequestError):
        store.create("w", "s", keys, size, 0.0)
    assert store.leases == 0
