"""What a heartbeat believes the registry knows: modelled, with lost messages and lost data."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.runtime.registry.heartbeat import BlockLedger

BLOCKS = st.binary(min_size=1, max_size=1)


class LedgerMachine(RuleBasedStateMachine):
    """`cache` is the truth, `registry` what was told; they agree whenever nothing is pending."""

    @initialize()
    def begin(self) -> None:
        self.ledger = BlockLedger()
        self.cache: set[bytes] = set()
        self.registry: set[bytes] = set()

    @rule(stored=st.lists(BLOCKS), removed=st.lists(BLOCKS))
    def cache_changes(self, stored: list[bytes], removed: list[bytes]) -> None:
        self.cache.difference_update(removed)
        self.cache.update(stored)
        self.ledger.record(stored, removed)

    @rule(limit=st.integers(1, 5), arrives=st.booleans())
    def publish(self, limit: int, arrives: bool) -> None:
        batch = self.ledger.pending(limit)
        stored = [block for block in batch if self.ledger.holds(block)]
        removed = [block for block in batch if not self.ledger.holds(block)]
        if arrives:
            self.registry.update(stored)
            self.registry.difference_update(removed)
            self.ledger.published(stored, removed)

    @rule(parts=st.integers(1, 4))
    def renew_all(self, parts: int) -> None:
        """Renewing slice after slice reaches every published block, held or not."""
        reached: set[bytes] = set()
        for _ in range(parts):
            for block in self.ledger.slice_to_renew(parts):
                reached.add(block)
                held = self.ledger.holds(block)
                self.ledger.published([block] if held else [], [] if held else [block])
                self.registry.add(block) if held else self.registry.discard(block)
        assert self.registry <= reached

    @rule()
    def registry_loses_everything(self) -> None:
        self.registry.clear()
        self.ledger.forget_published()

    @invariant()
    def nothing_pending_means_agreement(self) -> None:
        pending = set(self.ledger.pending(10_000))
        assert pending == self.cache ^ self.registry


LedgerMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestLedger = LedgerMachine.TestCase


def test_changes_that_cancel_out_leave_nothing_to_say() -> None:
    ledger = BlockLedger()
    ledger.record([b"a"], [])
    ledger.record([], [b"a"])
    assert ledger.pending(10) == []


def test_the_oldest_change_is_published_first() -> None:
    ledger = BlockLedger()
    ledger.record([b"a", b"b"], [])
    ledger.record([b"c"], [])
    assert ledger.pending(2) == [b"a", b"b"]
