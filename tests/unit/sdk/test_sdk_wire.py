"""Every value comes back from its bytes as it was; what no peer would send is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvrelay import errors, values, wire
from kvrelay.errors import KvRelayError
from kvrelay.handle import KvHandle, KvLayout
from kvrelay.inference.v1 import generation_pb2
from kvrelay.kv.v1 import handle_pb2
from tests.unit.sdk import strategies


def over_the_wire(message: Any) -> Any:
    return type(message).FromString(message.SerializeToString())


PAIRS: dict[str, tuple[st.SearchStrategy[Any], Callable[[Any], Any], Callable[[Any], Any]]] = {
    "identity": (strategies.identities, wire.identity_to_proto, wire.identity_from_proto),
    "layout": (strategies.layouts, wire.layout_to_proto, wire.layout_from_proto),
    "lease": (strategies.leases, wire.lease_to_proto, wire.lease_from_proto),
    "segment": (strategies.segments, wire.segment_to_proto, wire.segment_from_proto),
    "location": (strategies.locations, wire.location_to_proto, wire.location_from_proto),
    "handle": (strategies.handles(), wire.handle_to_proto, wire.handle_from_proto),
    "chat": (strategies.messages, wire.chat_to_proto, wire.chat_from_proto),
    "sampling": (strategies.sampling, wire.sampling_to_proto, wire.sampling_from_proto),
    "stop": (strategies.stops, wire.stop_to_proto, wire.stop_from_proto),
    "token": (strategies.tokens, wire.token_to_proto, wire.token_from_proto),
    "usage": (strategies.usages, wire.usage_to_proto, wire.usage_from_proto),
    "timings": (strategies.timings, wire.timings_to_proto, wire.timings_from_proto),
    "transfer_stats": (strategies.stats, wire.transfer_stats_to_proto, wire.transfer_stats_from_proto),
    "marks": (strategies.marks, wire.marks_to_proto, wire.marks_from_proto),
}


@pytest.mark.parametrize("name", PAIRS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_values_survive_the_wire(name: str, data: st.DataObject) -> None:
    strategy, to_proto, from_proto = PAIRS[name]
    value = data.draw(strategy)
    assert from_proto(over_the_wire(to_proto(value))) == value


@settings(max_examples=25, deadline=None)
@given(strategies.completions)
def test_completions_survive_the_wire(value: values.Completion) -> None:
    assert wire.completion_from_proto(over_the_wire(wire.completion_to_proto(value)), trace_id=value.trace_id) == value


@pytest.mark.parametrize("reason", [None, *values.FinishReason])
def test_finish_reasons_survive_the_wire(reason: values.FinishReason | None) -> None:
    assert wire.finish_reason_from_proto(wire.finish_reason_to_proto(reason)) is reason


def test_an_unknown_or_missing_finish_reason_is_an_error() -> None:
    with pytest.raises(errors.InternalError):
        wire.finish_reason_from_proto(99)  # type: ignore[arg-type]
    with pytest.raises(errors.InternalError):
        wire.required_finish_reason_from_proto(generation_pb2.FINISH_REASON_UNSPECIFIED)


@pytest.mark.parametrize(
    ("value", "message", "suffix"),
    [
        (KvLayout, handle_pb2.KvLayout, ""),
        (values.WorkerMarks, generation_pb2.WorkerMarks, "_unix_nanos"),
        (values.Timings, generation_pb2.Timings, None),
    ],
)
def test_values_converted_by_name_have_exactly_the_messages_fields(value: type, message: Any, suffix: str | None) -> None:
    names = {f.name.removesuffix("_s") if suffix is None else f.name + suffix for f in fields(value)}
    assert names == set(message.DESCRIPTOR.fields_by_name)


def test_an_unset_seed_and_unset_max_tokens_are_absent_and_read_as_defaults() -> None:
    sampling = wire.sampling_to_proto(values.SamplingParams(seed=5), with_seed=False)
    stop = wire.stop_to_proto(values.StopConditions(max_tokens=5), with_max_tokens=False)
    assert not sampling.HasField("seed") and not stop.HasField("max_tokens")
    assert wire.sampling_from_proto(sampling) == values.SamplingParams() and wire.stop_from_proto(stop) == values.StopConditions()
    assert wire.sampling_from_proto(generation_pb2.SamplingParams()) == values.SamplingParams()


# --- what is refused ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def handle() -> KvHandle:
    from tests.contract.test_contract_messages import HANDLE

    return HANDLE


def test_a_fingerprint_that_is_not_that_of_its_fields_is_refused_with_both(handle: KvHandle) -> None:
    message = wire.identity_to_proto(handle.identity)
    message.rope = "another"
    with pytest.raises(errors.FingerprintMismatchError) as caught:
        wire.identity_from_proto(message)
    assert handle.identity.fingerprint.hex() in caught.value.fields["fingerprint"]
    message.fingerprint = b""
    assert wire.identity_from_proto(message).rope == "another"


def test_an_identity_without_numerics_is_no_other_identity(handle: KvHandle) -> None:
    """Of a sender that knows no such field: what it holds may have been computed in any way."""
    message = wire.identity_to_proto(handle.identity)
    message.ClearField("numerics")
    with pytest.raises(errors.FingerprintMismatchError):
        wire.identity_from_proto(message)


FORGERIES: dict[str, Callable[[handle_pb2.KvHandle], object]] = {
    "name": lambda m: setattr(m, "name", "kvHandles/../../etc"),
    "upper-case name": lambda m: setattr(m, "name", "kvHandles/" + "A" * 32),
    "name with newline": lambda m: setattr(m, "name", m.name + "\n"),
    "no state": lambda m: setattr(m, "state", handle_pb2.HANDLE_STATE_UNSPECIFIED),
    "state of no version": lambda m: setattr(m, "state", 77),
    "no identity": lambda m: m.ClearField("identity"),
    "no layout": lambda m: m.ClearField("layout"),
    "no lease": lambda m: m.ClearField("lease"),
    "empty range": lambda m: setattr(m, "token_end", 0),
    "block size 0": lambda m: setattr(m.layout, "block_size", 0),
    "too many hashes": lambda m: m.block_hashes.extend([bytes(32)] * 3),
    "short hash": lambda m: m.block_hashes.__setitem__(0, bytes(31)),
    "no address": lambda m: setattr(m.locations[0].peer, "address", ""),
    "no digest": lambda m: setattr(m, "prompt_digest", b""),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_malformed_handle_is_refused(handle: KvHandle, forgery: str) -> None:
    message = wire.handle_to_proto(handle)
    FORGERIES[forgery](message)
    with pytest.raises(errors.HandleForgedError):
        wire.handle_from_proto(over_the_wire(message))


def test_locations_of_later_transports_are_left_out(handle: KvHandle) -> None:
    message = wire.handle_to_proto(handle)
    message.locations.insert(0, handle_pb2.KvLocation(shm=handle_pb2.ShmLocation(name="seg")))
    assert wire.handle_from_proto(over_the_wire(message)).locations == handle.locations
    assert wire.handle_from_proto(wire.handle_to_proto(replace(handle, locations=()))).locations == ()


# --- errors ------------------------------------------------------------------------------------------------------------------


def tree(root: type[KvRelayError]) -> Iterator[type[KvRelayError]]:
    for cls in root.__subclasses__():
        yield cls
        yield from tree(cls)


@pytest.mark.parametrize("cls", list(tree(KvRelayError)), ids=lambda cls: cls.__name__)
def test_every_error_crosses_the_wire_as_its_own_class(cls: type[KvRelayError]) -> None:
    error = cls("text", retry_after_s=1.5, field="a.b", other="3")
    status = over_the_wire(wire.error_to_status(error))
    got = wire.error_from_status(error.code, "text", status.SerializeToString())
    assert type(got) is cls and got.reason == error.reason
    assert (got.message, got.fields, got.retry_after_s) == (error.message, error.fields, error.retry_after_s)


def test_reasons_are_unique() -> None:
    reasons = [cls.reason for cls in tree(KvRelayError)]
    assert len(set(reasons)) == len(reasons)


def test_a_named_field_also_travels_as_bad_request() -> None:
    from google.rpc import error_details_pb2

    status = wire.error_to_status(errors.InvalidSamplingError("bad", field="top_p", value=7))
    violations = error_details_pb2.BadRequest()
    assert [detail.Unpack(violations) for detail in status.details if detail.Is(violations.DESCRIPTOR)] == [True]
    assert [(v.field, v.description) for v in violations.field_violations] == [("top_p", "bad")]


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        ("DEADLINE_EXCEEDED", errors.DeadlineExceededError),
        ("CANCELLED", errors.CancelledByClientError),
        ("UNAVAILABLE", errors.UnavailableError),
        ("RESOURCE_EXHAUSTED", errors.RequestTooLargeError),
        ("UNIMPLEMENTED", errors.InternalError),
    ],
)
@pytest.mark.parametrize("details", [None, b"", b"\xff\xff", b"\x08\x03"], ids=["none", "empty", "garbage", "no-info"])
def test_without_our_details_the_code_decides(code: str, cls: type[KvRelayError], details: bytes | None) -> None:
    got = wire.error_from_status(code, "text", details)
    assert type(got) is cls and "text" in got.message


def test_details_of_another_domain_are_not_believed() -> None:
    from google.rpc import error_details_pb2

    status = wire.error_to_status(errors.OverloadedError("x"))
    info = error_details_pb2.ErrorInfo(reason="OVERLOADED", domain="elsewhere.example")
    status.details[0].Pack(info)
    assert type(wire.error_from_status("INTERNAL", "x", status.SerializeToString())) is errors.InternalError


def test_a_reason_of_a_later_version_keeps_its_name() -> None:
    status = wire.error_to_status(errors.OverloadedError("x", a="b"))
    from google.rpc import error_details_pb2

    status.details[0].Pack(error_details_pb2.ErrorInfo(reason="FROM_THE_FUTURE", domain=errors.ERROR_DOMAIN))
    got = wire.error_from_status("INTERNAL", "x", status.SerializeToString())
    assert type(got) is errors.InternalError and got.fields["reason"] == "FROM_THE_FUTURE"


def test_grpcs_sizes_are_read_from_its_text() -> None:
    got = wire.error_from_status("RESOURCE_EXHAUSTED", "SERVER: Received message larger than max (1041 vs. 1000)", None)
    assert got.fields == {"size_bytes": "1041", "limit_bytes": "1000"}


@settings(max_examples=25, deadline=None)
@example("\U0001f600" * 5000, {name: "\U0001f600" * 3000 for name in "abcd"})
@given(st.text(max_size=500), st.dictionaries(st.text(max_size=30), st.text(max_size=100), max_size=40))
def test_any_error_fits_the_trailers(message: str, extra: dict[str, str]) -> None:
    error = errors.InternalError(message + "\ud800")
    error.fields = extra
    status = wire.error_to_status(error).SerializeToString()
    # The details travel in base64 beside the percent-encoded message.
    assert len(status) * 4 / 3 + 3 * 400 < 8192


def test_long_texts_are_cut_and_say_so() -> None:
    got = wire.error_from_status("INTERNAL", "", wire.error_to_status(errors.InternalError("x" * 5000)).SerializeToString())
    assert got.message.endswith("…") and len(got.message.encode()) == 400
