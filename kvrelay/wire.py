"""Values to messages and back, in symmetrical pairs. Errors and statuses are in `kvrelay.status`, re-exported here.

`X_to_proto(value)` never fails for a valid value; `X_from_proto(message)` raises a `KvRelayError` for a message no peer of this
suite would send. Durations keep nanoseconds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields

from google.protobuf.duration_pb2 import Duration

from kvrelay.errors import FingerprintMismatchError, HandleForgedError, InternalError
from kvrelay.handle import HandleState, KvHandle, KvLayout, KvSegment, Lease, Location, ModelIdentity, PeerLocation, StoreLocation
from kvrelay.hashing import HASH_BYTES
from kvrelay.inference.v1 import generation_pb2, router_service_pb2
from kvrelay.kv.v1 import handle_pb2
from kvrelay.status import error_from_rpc as error_from_rpc
from kvrelay.status import error_from_status as error_from_status
from kvrelay.status import error_to_status as error_to_status
from kvrelay.status import names_kvrelay_reason as names_kvrelay_reason
from kvrelay.values import (
    ChatMessage,
    Completion,
    FinishReason,
    SamplingParams,
    StopConditions,
    Timings,
    Token,
    TokenLogprob,
    TransferStats,
    Usage,
    WorkerMarks,
)

HANDLE_NAME = re.compile(r"kvHandles/[0-9a-f]{32}")

_FINISH_REASONS = {
    FinishReason.STOP: generation_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generation_pb2.FINISH_REASON_LENGTH,
}
_HANDLE_STATES = {
    HandleState.WRITING: handle_pb2.HANDLE_STATE_WRITING,
    HandleState.COMMITTED: handle_pb2.HANDLE_STATE_COMMITTED,
    HandleState.RELEASED: handle_pb2.HANDLE_STATE_RELEASED,
}
_SERVING_PATHS = {
    "local": router_service_pb2.SERVING_PATH_LOCAL,
    "split": router_service_pb2.SERVING_PATH_SPLIT,
    "fallback": router_service_pb2.SERVING_PATH_FALLBACK,
}

# Values whose fields have the messages' names; a test holds that no field is forgotten on either side.
_LAYOUT_FIELDS = tuple(f.name for f in fields(KvLayout))
_MARKS = tuple(f.name for f in fields(WorkerMarks))
_TIMINGS = tuple(f.name.removesuffix("_s") for f in fields(Timings))


def duration_to_proto(seconds: float) -> Duration:
    """Rounded to nanoseconds."""
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def duration_from_proto(message: Duration) -> float:
    """Seconds."""
    return (message.seconds * 1_000_000_000 + message.nanos) / 1e9


# --- handles -----------------------------------------------------------------------------------------------------------------


def identity_to_proto(value: ModelIdentity) -> handle_pb2.ModelIdentity:
    return handle_pb2.ModelIdentity(
        model=value.model,
        weights_digest=value.weights_digest,
        tokenizer_digest=value.tokenizer_digest,
        dtype=value.dtype,
        kv_dtype=value.kv_dtype,
        rope=value.rope,
        numerics=value.numerics,
        quantization=value.quantization,
        adapter=value.adapter,
        fingerprint=value.fingerprint,
    )


def identity_from_proto(message: handle_pb2.ModelIdentity) -> ModelIdentity:
    """Computes the fingerprint again; raises `FingerprintMismatchError` when another one was sent."""
    value = ModelIdentity(
        model=message.model,
        weights_digest=message.weights_digest,
        tokenizer_digest=message.tokenizer_digest,
        dtype=message.dtype,
        kv_dtype=message.kv_dtype,
        rope=message.rope,
        numerics=message.numerics,
        quantization=message.quantization,
        adapter=message.adapter,
    )
    if message.fingerprint and message.fingerprint != value.fingerprint:
        sent, computed = message.fingerprint.hex(), value.fingerprint.hex()
        raise FingerprintMismatchError(
            f"the fingerprint sent with model {value.model!r} is not that of its fields: {sent} sent, {computed} computed",
            fingerprint=f"{computed} != {sent}",
        )
    return value


def layout_to_proto(value: KvLayout) -> handle_pb2.KvLayout:
    return handle_pb2.KvLayout(**{name: getattr(value, name) for name in _LAYOUT_FIELDS})


def layout_from_proto(message: handle_pb2.KvLayout) -> KvLayout:
    return KvLayout(**{name: getattr(message, name) for name in _LAYOUT_FIELDS})


def lease_to_proto(value: Lease) -> handle_pb2.Lease:
    return handle_pb2.Lease(lease_id=value.lease_id, ttl=duration_to_proto(value.ttl_s))


def lease_from_proto(message: handle_pb2.Lease) -> Lease:
    return Lease(lease_id=message.lease_id, ttl_s=duration_from_proto(message.ttl))


def segment_to_proto(value: KvSegment) -> handle_pb2.KvSegment:
    return handle_pb2.KvSegment(
        first_block=value.first_block, block_count=value.block_count, size_bytes=value.size_bytes, crc32c=value.crc32c
    )


def segment_from_proto(message: handle_pb2.KvSegment) -> KvSegment:
    return KvSegment(
        first_block=message.first_block,
        block_count=message.block_count,
        size_bytes=message.size_bytes,
        crc32c=message.crc32c if message.HasField("crc32c") else None,
    )


def location_to_proto(value: Location) -> handle_pb2.KvLocation:
    match value:
        case PeerLocation(address):
            return handle_pb2.KvLocation(peer=handle_pb2.PeerLocation(address=address))
        case StoreLocation(address):
            return handle_pb2.KvLocation(store=handle_pb2.StoreLocation(address=address))


def location_from_proto(message: handle_pb2.KvLocation) -> Location | None:
    """None for a transport this version does not know: a taker uses the next location."""
    match message.WhichOneof("transport"):
        case "peer":
            return PeerLocation(message.peer.address)
        case "store":
            return StoreLocation(message.store.address)
        case _:
            return None


def handle_to_proto(value: KvHandle) -> handle_pb2.KvHandle:
    return handle_pb2.KvHandle(
        name=value.name,
        state=_HANDLE_STATES[value.state],
        identity=identity_to_proto(value.identity),
        layout=layout_to_proto(value.layout),
        token_start=value.token_start,
        token_end=value.token_end,
        block_hashes=value.block_hashes,
        prompt_digest=value.prompt_digest,
        segments=[segment_to_proto(s) for s in value.segments],
        lease=lease_to_proto(value.lease),
        incarnation=value.incarnation,
        locations=[location_to_proto(x) for x in value.locations],
    )


def handle_from_proto(message: handle_pb2.KvHandle) -> KvHandle:
    """Raises `HandleForgedError` for a handle no holder could have made; locations of unknown transports are left out."""

    def require(ok: bool, what: str) -> None:
        if not ok:
            raise HandleForgedError(f"malformed handle: {what}", handle=message.name)

    require(HANDLE_NAME.fullmatch(message.name) is not None, "no such name is given out")
    states = {pb: state for state, pb in _HANDLE_STATES.items()}
    require(message.state in states, f"unknown state {message.state}")
    require(message.HasField("identity") and message.HasField("layout") and message.HasField("lease"), "a part is missing")
    require(message.token_start < message.token_end, f"token range [{message.token_start}, {message.token_end})")
    require(message.layout.block_size > 0, "block size 0")
    require(len(message.block_hashes) <= message.token_end // message.layout.block_size, "more hashes than full blocks")
    require(all(len(h) == HASH_BYTES for h in message.block_hashes), f"a block hash is not {HASH_BYTES} bytes long")
    require(len(message.prompt_digest) == HASH_BYTES, f"the prompt digest is not {HASH_BYTES} bytes long")
    locations = [location_from_proto(x) for x in message.locations]
    require(all(x is None or x.address for x in locations), "a location without an address")
    return KvHandle(
        name=message.name,
        state=states[message.state],
        identity=identity_from_proto(message.identity),
        layout=layout_from_proto(message.layout),
        token_start=message.token_start,
        token_end=message.token_end,
        block_hashes=tuple(message.block_hashes),
        prompt_digest=message.prompt_digest,
        segments=tuple(segment_from_proto(s) for s in message.segments),
        lease=lease_from_proto(message.lease),
        incarnation=message.incarnation,
        locations=tuple(x for x in locations if x is not None),
    )


# --- what is asked -----------------------------------------------------------------------------------------------------------


def chat_to_proto(messages: Sequence[ChatMessage]) -> generation_pb2.ChatPrompt:
    return generation_pb2.ChatPrompt(messages=[generation_pb2.ChatMessage(role=m.role, content=m.content) for m in messages])


def chat_from_proto(message: generation_pb2.ChatPrompt) -> tuple[ChatMessage, ...]:
    return tuple(ChatMessage(m.role, m.content) for m in message.messages)


def sampling_to_proto(value: SamplingParams, *, with_seed: bool = True) -> generation_pb2.SamplingParams:
    """Every field is set; without a seed the router draws one."""
    return generation_pb2.SamplingParams(
        temperature=value.temperature,
        top_k=value.top_k,
        top_p=value.top_p,
        min_p=value.min_p,
        seed=value.seed if with_seed else None,
        repetition_penalty=value.repetition_penalty,
        presence_penalty=value.presence_penalty,
        frequency_penalty=value.frequency_penalty,
        logit_bias=dict(value.logit_bias),
        min_tokens=value.min_tokens,
        logprobs=value.logprobs,
    )


def sampling_from_proto(message: generation_pb2.SamplingParams) -> SamplingParams:
    """Absent fields get their defaults. Nothing is validated: call `validate()`."""
    names = (
        "temperature", "top_k", "top_p", "min_p", "seed", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "min_tokens", "logprobs",
    )  # fmt: skip
    present = {name: getattr(message, name) for name in names if message.HasField(name)}
    return SamplingParams(logit_bias=dict(message.logit_bias), **present)


def stop_to_proto(value: StopConditions, *, with_max_tokens: bool = True) -> generation_pb2.StopConditions:
    """Without `max_tokens` the router takes the default, or what the context leaves."""
    return generation_pb2.StopConditions(
        max_tokens=value.max_tokens if with_max_tokens else None,
        strings=value.strings,
        token_ids=value.token_ids,
        ignore_eos=value.ignore_eos,
    )


def stop_from_proto(message: generation_pb2.StopConditions) -> StopConditions:
    """Absent `max_tokens` gets its default. Nothing is validated: call `validate()`."""
    return StopConditions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else StopConditions().max_tokens,
        strings=tuple(message.strings),
        token_ids=tuple(message.token_ids),
        ignore_eos=message.ignore_eos,
    )


# --- what is answered --------------------------------------------------------------------------------------------------------


def finish_reason_to_proto(value: FinishReason | None) -> generation_pb2.FinishReason:
    return generation_pb2.FINISH_REASON_UNSPECIFIED if value is None else _FINISH_REASONS[value]


def finish_reason_from_proto(message: generation_pb2.FinishReason) -> FinishReason | None:
    """None when unspecified; `InternalError` for a number that is none of the enum."""
    if message == generation_pb2.FINISH_REASON_UNSPECIFIED:
        return None
    for value, number in _FINISH_REASONS.items():
        if number == message:
            return value
    raise InternalError(f"unknown finish reason {message}")


def required_finish_reason_from_proto(message: generation_pb2.FinishReason) -> FinishReason:
    """Raises `InternalError` when unspecified."""
    value = finish_reason_from_proto(message)
    if value is None:
        raise InternalError("the end of a generation came without its finish reason")
    return value


def token_to_proto(value: Token) -> generation_pb2.TokenEvent:
    return generation_pb2.TokenEvent(
        index=value.index,
        token_id=value.token_id,
        text=value.text,
        logprob=value.logprob,
        top_logprobs=[generation_pb2.TokenLogprob(token_id=t.token_id, logprob=t.logprob) for t in value.top_logprobs],
    )


def token_from_proto(message: generation_pb2.TokenEvent) -> Token:
    return Token(
        index=message.index,
        token_id=message.token_id,
        text=message.text,
        logprob=message.logprob if message.HasField("logprob") else None,
        top_logprobs=tuple(TokenLogprob(t.token_id, t.logprob) for t in message.top_logprobs),
    )


def usage_to_proto(value: Usage) -> generation_pb2.Usage:
    return generation_pb2.Usage(
        prompt_tokens=value.prompt_tokens, cached_tokens=value.cached_tokens, completion_tokens=value.completion_tokens
    )


def usage_from_proto(message: generation_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.cached_tokens, message.completion_tokens)


def timings_to_proto(value: Timings) -> generation_pb2.Timings:
    return generation_pb2.Timings(**{name: duration_to_proto(getattr(value, f"{name}_s")) for name in _TIMINGS})


def timings_from_proto(message: generation_pb2.Timings) -> Timings:
    return Timings(**{f"{name}_s": duration_from_proto(getattr(message, name)) for name in _TIMINGS})


def transfer_stats_to_proto(value: TransferStats) -> generation_pb2.TransferStats:
    return generation_pb2.TransferStats(
        kv_bytes=value.kv_bytes,
        blocks=value.blocks,
        wait=duration_to_proto(value.wait_s),
        transfer=duration_to_proto(value.transfer_s),
        early_bytes=value.early_bytes,
        retries=value.retries,
        transport=value.transport,
    )


def transfer_stats_from_proto(message: generation_pb2.TransferStats) -> TransferStats:
    return TransferStats(
        kv_bytes=message.kv_bytes,
        blocks=message.blocks,
        wait_s=duration_from_proto(message.wait),
        transfer_s=duration_from_proto(message.transfer),
        early_bytes=message.early_bytes,
        retries=message.retries,
        transport=message.transport,
    )


def marks_to_proto(value: WorkerMarks) -> generation_pb2.WorkerMarks:
    return generation_pb2.WorkerMarks(**{f"{name}_unix_nanos": getattr(value, name) for name in _MARKS})


def marks_from_proto(message: generation_pb2.WorkerMarks) -> WorkerMarks:
    return WorkerMarks(**{name: getattr(message, f"{name}_unix_nanos") for name in _MARKS})


def completion_to_proto(value: Completion, *, decision: str = "") -> router_service_pb2.GenerateDone:
    """The trace id travels in `GenerateStarted`, not here."""
    return router_service_pb2.GenerateDone(
        finish_reason=finish_reason_to_proto(value.finish_reason),
        usage=usage_to_proto(value.usage),
        timings=timings_to_proto(value.timings),
        transfer=None if value.transfer is None else transfer_stats_to_proto(value.transfer),
        path=_SERVING_PATHS.get(value.path, router_service_pb2.SERVING_PATH_UNSPECIFIED),
        decision=decision,
    )


def completion_from_proto(message: router_service_pb2.GenerateDone, *, trace_id: str = "") -> Completion:
    paths = {pb: path for path, pb in _SERVING_PATHS.items()}
    return Completion(
        finish_reason=required_finish_reason_from_proto(message.finish_reason),
        usage=usage_from_proto(message.usage),
        timings=timings_from_proto(message.timings),
        transfer=transfer_stats_from_proto(message.transfer) if message.HasField("transfer") else None,
        path=paths.get(message.path, ""),
        trace_id=trace_id,
    )
