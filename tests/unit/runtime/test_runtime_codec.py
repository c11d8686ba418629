"""Registry entries as text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.handle import KvLayout, ModelIdentity
from services.runtime.ports import Topology, WorkerInfo, WorkerLoad
from services.runtime.registry.codec import Keys, padded, split_hashes, worker_from_json, worker_to_json

text = st.text(max_size=12)
count = st.integers(0, 2**40)
workers = st.builds(
    WorkerInfo,
    worker_id=text, role=text, address=text, incarnation=st.integers(0, 2**63), state=text,
    identity=st.none() | st.builds(ModelIdentity, *([text] * 9)),
    layout=st.none() | st.builds(KvLayout, count, count, count, count, text),
    max_context_tokens=count, vocab_size=count,
    topology=st.builds(Topology, text, text, text),
    load=st.builds(WorkerLoad, count, count, count, count, count, count, count),
)  # fmt: skip


@given(workers)
def test_a_worker_survives_the_way_there_and_back(worker: WorkerInfo) -> None:
    assert worker_from_json(worker_to_json(worker)) == worker


def test_members_of_a_newer_version_are_ignored_and_missing_ones_have_their_defaults() -> None:
    worker = WorkerInfo("a", "prefill", "h:1", 7)
    members = {**json.loads(worker_to_json(worker)), "future": {"x": 1}}
    members["load"]["future"] = 3
    del members["vocab_size"]
    assert worker_from_json(json.dumps(members)) == worker


@pytest.mark.parametrize(
    "info", ["", "{", "[]", "3", "null", '{"role": 3}', '{"worker_id": "a", "role": "b", "address": "c", "incarnation": 1, "load": 3}']
)
def test_what_is_no_worker_is_a_value_error(info: str) -> None:
    with pytest.raises(ValueError):
        worker_from_json(info)


@given(st.integers(0, 2**63), st.integers(0, 2**63))
def test_padded_incarnations_order_as_numbers_do(first: int, second: int) -> None:
    assert (padded(first) < padded(second)) == (first < second)


def test_keys_of_a_namespace_share_a_hash_slot_tag() -> None:
    keys = Keys("fleet")
    names = [keys.index, keys.events, keys.sequence, keys.worker("w"), keys.fence("w"), keys.block(b"\x01"), keys.held("w", 5)]
    assert all(name.startswith("{fleet}:") for name in names) and len(set(names)) == len(names)


def test_joined_hashes_are_split() -> None:
    hashes = tuple(bytes([number]) * 32 for number in range(3))
    assert split_hashes(b"".join(hashes)) == hashes
    assert split_hashes(b"") == ()
