from kvrelay.inference.v1 import generation_pb2 as _generation_pb2
from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("job",)
    JOB_FIELD_NUMBER: _ClassVar[int]
    job: _generation_pb2.WorkerJob
    def __init__(self, job: _Optional[_Union[_generation_pb2.WorkerJob, _Mapping]] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "first_token", "done", "queued")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    first_token: _generation_pb2.TokenEvent
    done: PrefillDone
    queued: PrefillQueued
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., first_token: _Optional[_Union[_generation_pb2.TokenEvent, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ..., queued: _Optional[_Union[PrefillQueued, _Mapping]] = ...) -> None: ...

class PrefillQueued(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: _handle_pb2.KvHandle
    def __init__(self, handle: _Optional[_Union[_handle_pb2.KvHandle, _Mapping]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "marks")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    marks: _generation_pb2.WorkerMarks
    def __init__(self, finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., marks: _Optional[_Union[_generation_pb2.WorkerMarks, _Mapping]] = ...) -> None: ...
