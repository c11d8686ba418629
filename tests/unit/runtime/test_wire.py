"""Jobs, workers and events come back from their bytes as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvrelay import errors
from kvrelay.inference.v1 import decode_service_pb2, prefill_service_pb2
from services.runtime import ports
from services.runtime.rpc import wire
from tests.unit.sdk import strategies

jobs = st.builds(
    ports.Job, request_id=strategies.text, fingerprint=st.binary(max_size=32), token_ids=st.lists(strategies.u32, max_size=5).map(tuple),
    sampling=strategies.sampling, stop=strategies.stops, cache_salt=strategies.text,
)  # fmt: skip
loads = st.builds(
    ports.WorkerLoad, running=strategies.u32, waiting=strategies.u32, prefill_backlog_tokens=strategies.u64,
    decode_backlog_tokens=strategies.u64, total_pages=strategies.u32, available_pages=strategies.u32, held_handles=strategies.u32,
)  # fmt: skip
workers = st.builds(
    ports.WorkerInfo, worker_id=strategies.text, role=st.sampled_from(["prefill", "decode", "kvstore"]), address=strategies.text,
    incarnation=strategies.u64, state=strategies.text, identity=st.none() | strategies.identities,
    layout=st.none() | strategies.layouts, max_context_tokens=strategies.u32, vocab_size=strategies.u32, load=loads,
)  # fmt: skip
prefill_events = (
    st.builds(ports.PrefillAccepted, strategies.handles())
    | st.builds(ports.FirstToken, strategies.tokens)
    | st.builds(ports.PrefillDone, st.none() | strategies.finish_reasons, strategies.usages, strategies.marks)
)
decode_events = (
    st.builds(ports.DecodeAccepted, strategies.u32)
    | st.builds(ports.KvReady, strategies.stats)
    | st.builds(ports.DecodeToken, strategies.tokens)
    | st.builds(ports.DecodeDone, strategies.finish_reasons, strategies.usages, strategies.marks, st.none() | strategies.stats)
)

PAIRS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "job": (jobs, wire.job_to_proto, wire.job_from_proto),
    "load": (loads, wire.worker_load_to_proto, wire.worker_load_from_proto),
    "worker": (
        workers,
        lambda w: wire.worker_details_to_proto(w, free_pages=1, cached_pages=2, held_pages=3),
        wire.worker_details_from_proto,
    ),
    "prefill event": (prefill_events, wire.prefill_event_to_proto, wire.prefill_event_from_proto),
    "decode event": (decode_events, wire.decode_event_to_proto, wire.decode_event_from_proto),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_values_survive_the_wire(name: str, data: st.DataObject) -> None:
    strategy, to_proto, from_proto = PAIRS[name]
    value = data.draw(strategy)
    message = to_proto(value)
    assert from_proto(type(message).FromString(message.SerializeToString())) == value


def test_an_event_of_no_known_kind_is_an_error() -> None:
    with pytest.raises(errors.InternalError):
        wire.prefill_event_from_proto(prefill_service_pb2.PrefillResponse())
    with pytest.raises(errors.InternalError):
        wire.decode_event_from_proto(decode_service_pb2.DecodeResponse())


def test_a_decode_that_ends_without_a_reason_is_an_error() -> None:
    with pytest.raises(errors.InternalError):
        wire.decode_event_from_proto(decode_service_pb2.DecodeResponse(done=decode_service_pb2.DecodeDone()))


def test_an_accepted_prefill_without_a_proper_handle_is_a_forgery() -> None:
    with pytest.raises(errors.HandleForgedError):
        wire.prefill_event_from_proto(prefill_service_pb2.PrefillResponse(accepted=prefill_service_pb2.PrefillAccepted()))
