"""Messages byte for byte: a renumbered field or a changed rounding breaks running fleets, so it breaks these first."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrelay import errors, values, wire
from kvrelay.handle import HandleState, KvHandle, KvLayout, KvSegment, Lease, ModelIdentity, PeerLocation, StoreLocation
from services.runtime.ports import (
    DecodeAccepted,
    DecodeDone,
    DecodeToken,
    FirstToken,
    Job,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    WorkerInfo,
    WorkerLoad,
)
from services.runtime.rpc import wire as service_wire

HASHING = json.loads((Path(__file__).parent / "hashing.json").read_text(encoding="utf-8"))
VECTORS: dict[str, str] = json.loads((Path(__file__).parent / "messages.json").read_text(encoding="utf-8"))

IDENTITY = ModelIdentity(model="smol", **HASHING["chains_of"])
LAYOUT = KvLayout(layers=30, kv_heads=3, head_dim=64, block_size=4, dtype="bfloat16")
CHAIN = HASHING["chains"][3]
HANDLE = KvHandle(
    name="kvHandles/" + "0123456789abcdef" * 2,
    state=HandleState.WRITING,
    identity=IDENTITY,
    layout=LAYOUT,
    token_start=0,
    token_end=10,
    block_hashes=tuple(bytes.fromhex(h) for h in CHAIN["block_hashes"]),
    prompt_digest=bytes.fromhex(CHAIN["prompt_digest"]),
    segments=(KvSegment(0, 2, 2 * LAYOUT.block_bytes, crc32c=0xE3069283), KvSegment(2, 1, LAYOUT.block_bytes)),
    lease=Lease("lease-secret", 10.5),
    incarnation=1_700_000_000_123_456_789,
    locations=(PeerLocation("127.0.0.1:50052"), StoreLocation("127.0.0.1:50054")),
)
SAMPLING = values.SamplingParams(0.7, 40, 0.9, 0.05, 2**64 - 1, 1.1, 0.5, -0.5, {7: -1.5}, 2, 3)
TOKEN = values.Token(1, 42, "né", -0.25, (values.TokenLogprob(42, -0.25),))
USAGE = values.Usage(10, 4, 2)
MARKS = values.WorkerMarks(1, 2, 3, 4, 5, 6, 7)
STATS = values.TransferStats(4096, 2, 0.001, 0.002, 2048, 1, "grpc")
COMPLETION = values.Completion(
    values.FinishReason.STOP, USAGE, values.Timings(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.028, 0.010), STATS, "split"
)
ERROR = errors.OverloadedError("the queue is full", retry_after_s=0.25, queue="waiting")

MESSAGES: dict[str, Callable[[], object]] = {
    "handle": lambda: wire.handle_to_proto(HANDLE),
    "job": lambda: service_wire.job_to_proto(
        Job("r-1", IDENTITY.fingerprint, CHAIN["token_ids"], SAMPLING, values.StopConditions(5, ("END",), (2,), True), "pepper")
    ),
    "worker": lambda: service_wire.worker_info_to_proto(
        WorkerInfo("decode-0", "decode", "127.0.0.1:1", 5, "ready", IDENTITY, LAYOUT, load=WorkerLoad(1, 2, 3, 4, 5, 6, 7))
    ),
    "prefill.accepted": lambda: service_wire.prefill_event_to_proto(PrefillAccepted(HANDLE)),
    "prefill.first_token": lambda: service_wire.prefill_event_to_proto(FirstToken(TOKEN)),
    "prefill.done": lambda: service_wire.prefill_event_to_proto(PrefillDone(None, USAGE, MARKS)),
    "decode.accepted": lambda: service_wire.decode_event_to_proto(DecodeAccepted(4)),
    "decode.kv_ready": lambda: service_wire.decode_event_to_proto(KvReady(STATS)),
    "decode.token": lambda: service_wire.decode_event_to_proto(DecodeToken(TOKEN)),
    "decode.done": lambda: service_wire.decode_event_to_proto(DecodeDone(values.FinishReason.LENGTH, USAGE, MARKS, STATS)),
    "generate.done": lambda: wire.completion_to_proto(COMPLETION, decision="long prompt"),
    "error": lambda: wire.error_to_status(ERROR),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_message_bytes(name: str) -> None:
    message = MESSAGES[name]()
    assert message.SerializeToString(deterministic=True).hex() == VECTORS[name]  # type: ignore[attr-defined]


def test_every_vector_is_checked() -> None:
    assert set(VECTORS) == set(MESSAGES)


def test_a_handle_read_from_its_bytes_is_the_handle() -> None:
    message = type(wire.handle_to_proto(HANDLE)).FromString(bytes.fromhex(VECTORS["handle"]))
    assert wire.handle_from_proto(message) == HANDLE


def test_an_error_read_from_its_bytes_is_the_error() -> None:
    got = wire.error_from_status("RESOURCE_EXHAUSTED", "", bytes.fromhex(VECTORS["error"]))
    assert type(got) is errors.OverloadedError
    assert (got.message, got.fields, got.retry_after_s) == (ERROR.message, ERROR.fields, ERROR.retry_after_s)
