"""The values of `services.runtime.ports` to messages and back, beside those of `kvrelay.wire`."""

from __future__ import annotations

from kvrelay import wire
from kvrelay.errors import InternalError
from kvrelay.inference.v1 import decode_service_pb2, generation_pb2, prefill_service_pb2, worker_pb2, worker_service_pb2
from services.runtime.ports import (
    DecodeAccepted,
    DecodeDone,
    DecodeEvent,
    DecodeToken,
    FirstToken,
    Job,
    KvReady,
    PrefillAccepted,
    PrefillDone,
    PrefillEvent,
    PrefillQueued,
    WorkerInfo,
    WorkerLoad,
)


def worker_load_to_proto(value: WorkerLoad) -> worker_pb2.WorkerLoad:
    return worker_pb2.WorkerLoad(
        running=value.running,
        waiting=value.waiting,
        prefill_backlog_tokens=value.prefill_backlog_tokens,
        decode_backlog_tokens=value.decode_backlog_tokens,
        total_pages=value.total_pages,
        available_pages=value.available_pages,
        held_handles=value.held_handles,
    )


def worker_load_from_proto(message: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        running=message.running,
        waiting=message.waiting,
        prefill_backlog_tokens=message.prefill_backlog_tokens,
        decode_backlog_tokens=message.decode_backlog_tokens,
        total_pages=message.total_pages,
        available_pages=message.available_pages,
        held_handles=message.held_handles,
    )


def worker_info_to_proto(value: WorkerInfo) -> worker_pb2.Worker:
    """Limits and topology are not part of the message: see `worker_details_to_proto` for the former."""
    return worker_pb2.Worker(
        worker_id=value.worker_id,
        role=value.role,
        address=value.address,
        state=value.state,
        identity=None if value.identity is None else wire.identity_to_proto(value.identity),
        layout=None if value.layout is None else wire.layout_to_proto(value.layout),
        incarnation=value.incarnation,
        load=worker_load_to_proto(value.load),
    )


def worker_info_from_proto(message: worker_pb2.Worker, *, max_context_tokens: int = 0, vocab_size: int = 0) -> WorkerInfo:
    """Raises `FingerprintMismatchError` for an identity whose fingerprint is not its own."""
    return WorkerInfo(
        worker_id=message.worker_id,
        role=message.role,
        address=message.address,
        incarnation=message.incarnation,
        state=message.state,
        identity=wire.identity_from_proto(message.identity) if message.HasField("identity") else None,
        layout=wire.layout_from_proto(message.layout) if message.HasField("layout") else None,
        max_context_tokens=max_context_tokens,
        vocab_size=vocab_size,
        load=worker_load_from_proto(message.load),
    )


def worker_details_to_proto(
    value: WorkerInfo, *, free_pages: int, cached_pages: int, held_pages: int
) -> worker_service_pb2.GetWorkerInfoResponse:
    return worker_service_pb2.GetWorkerInfoResponse(
        worker=worker_info_to_proto(value),
        max_context_tokens=value.max_context_tokens,
        vocab_size=value.vocab_size,
        free_pages=free_pages,
        cached_pages=cached_pages,
        held_pages=held_pages,
    )


def worker_details_from_proto(message: worker_service_pb2.GetWorkerInfoResponse) -> WorkerInfo:
    """The page ledger stays in the message."""
    return worker_info_from_proto(message.worker, max_context_tokens=message.max_context_tokens, vocab_size=message.vocab_size)


def job_to_proto(value: Job) -> generation_pb2.WorkerJob:
    return generation_pb2.WorkerJob(
        request_id=value.request_id,
        fingerprint=value.fingerprint,
        prompt=generation_pb2.TokenIds(ids=value.token_ids),
        sampling=wire.sampling_to_proto(value.sampling),
        stop=wire.stop_to_proto(value.stop),
        cache_salt=value.cache_salt,
    )


def job_from_proto(message: generation_pb2.WorkerJob) -> Job:
    """Nothing is validated: a worker checks fingerprint, ids and limits itself."""
    return Job(
        request_id=message.request_id,
        fingerprint=message.fingerprint,
        token_ids=tuple(message.prompt.ids),
        sampling=wire.sampling_from_proto(message.sampling),
        stop=wire.stop_from_proto(message.stop),
        cache_salt=message.cache_salt,
    )


def prefill_event_to_proto(value: PrefillEvent) -> prefill_service_pb2.PrefillResponse:
    match value:
        case PrefillQueued():
            return prefill_service_pb2.PrefillResponse(queued=prefill_service_pb2.PrefillQueued())
        case PrefillAccepted(handle):
            accepted = prefill_service_pb2.PrefillAccepted(handle=wire.handle_to_proto(handle))
            return prefill_service_pb2.PrefillResponse(accepted=accepted)
        case FirstToken(token):
            return prefill_service_pb2.PrefillResponse(first_token=wire.token_to_proto(token))
        case PrefillDone(finish_reason, usage, marks):
            done = prefill_service_pb2.PrefillDone(
                finish_reason=wire.finish_reason_to_proto(finish_reason),
                usage=wire.usage_to_proto(usage),
                marks=wire.marks_to_proto(marks),
            )
            return prefill_service_pb2.PrefillResponse(done=done)


def prefill_event_from_proto(message: prefill_service_pb2.PrefillResponse) -> PrefillEvent:
    """Raises `HandleForgedError` for a malformed handle and `InternalError` for an event that is none."""
    match message.WhichOneof("event"):
        case "queued":
            return PrefillQueued()
        case "accepted":
            return PrefillAccepted(wire.handle_from_proto(message.accepted.handle))
        case "first_token":
            return FirstToken(wire.token_from_proto(message.first_token))
        case "done":
            return PrefillDone(
                finish_reason=wire.finish_reason_from_proto(message.done.finish_reason),
                usage=wire.usage_from_proto(message.done.usage),
                marks=wire.marks_from_proto(message.done.marks),
            )
        case _:
            raise InternalError("an event of a prefill names nothing this version knows")


def decode_event_to_proto(value: DecodeEvent) -> decode_service_pb2.DecodeResponse:
    match value:
        case DecodeAccepted(cached_tokens):
            return decode_service_pb2.DecodeResponse(accepted=decode_service_pb2.DecodeAccepted(cached_tokens=cached_tokens))
        case KvReady(stats):
            return decode_service_pb2.DecodeResponse(kv_ready=decode_service_pb2.KvReady(stats=wire.transfer_stats_to_proto(stats)))
        case DecodeToken(token):
            return decode_service_pb2.DecodeResponse(token=wire.token_to_proto(token))
        case DecodeDone(finish_reason, usage, marks, transfer):
            done = decode_service_pb2.DecodeDone(
                finish_reason=wire.finish_reason_to_proto(finish_reason),
                usage=wire.usage_to_proto(usage),
                marks=wire.marks_to_proto(marks),
                transfer=None if transfer is None else wire.transfer_stats_to_proto(transfer),
            )
            return decode_service_pb2.DecodeResponse(done=done)


def decode_event_from_proto(message: decode_service_pb2.DecodeResponse) -> DecodeEvent:
    """Raises `InternalError` for an event that is none and for an end without its reason."""
    match message.WhichOneof("event"):
        case "accepted":
            return DecodeAccepted(message.accepted.cached_tokens)
        case "kv_ready":
            return KvReady(wire.transfer_stats_from_proto(message.kv_ready.stats))
        case "token":
            return DecodeToken(wire.token_from_proto(message.token))
        case "done":
            return DecodeDone(
                finish_reason=wire.required_finish_reason_from_proto(message.done.finish_reason),
                usage=wire.usage_from_proto(message.done.usage),
                marks=wire.marks_from_proto(message.done.marks),
                transfer=wire.transfer_stats_from_proto(message.done.transfer) if message.done.HasField("transfer") else None,
            )
        case _:
            raise InternalError("an event of a decode names nothing this version knows")
