from kvrelay.inference.v1 import generation_pb2 as _generation_pb2
from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeRequest(_message.Message):
    __slots__ = ("job", "handle")
    JOB_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    job: _generation_pb2.WorkerJob
    handle: _handle_pb2.KvHandle
    def __init__(self, job: _Optional[_Union[_generation_pb2.WorkerJob, _Mapping]] = ..., handle: _Optional[_Union[_handle_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class DecodeResponse(_message.Message):
    __slots__ = ("accepted", "kv_ready", "token", "done")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    KV_READY_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    accepted: DecodeAccepted
    kv_ready: KvReady
    token: _generation_pb2.TokenEvent
    done: DecodeDone
    def __init__(self, accepted: _Optional[_Union[DecodeAccepted, _Mapping]] = ..., kv_ready: _Optional[_Union[KvReady, _Mapping]] = ..., token: _Optional[_Union[_generation_pb2.TokenEvent, _Mapping]] = ..., done: _Optional[_Union[DecodeDone, _Mapping]] = ...) -> None: ...

class DecodeAccepted(_message.Message):
    __slots__ = ("cached_tokens",)
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    cached_tokens: int
    def __init__(self, cached_tokens: _Optional[int] = ...) -> None: ...

class KvReady(_message.Message):
    __slots__ = ("stats",)
    STATS_FIELD_NUMBER: _ClassVar[int]
    stats: _generation_pb2.TransferStats
    def __init__(self, stats: _Optional[_Union[_generation_pb2.TransferStats, _Mapping]] = ...) -> None: ...

class DecodeDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "marks", "transfer")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    marks: _generation_pb2.WorkerMarks
    transfer: _generation_pb2.TransferStats
    def __init__(self, finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., marks: _Optional[_Union[_generation_pb2.WorkerMarks, _Mapping]] = ..., transfer: _Optional[_Union[_generation_pb2.TransferStats, _Mapping]] = ...) -> None: ...
