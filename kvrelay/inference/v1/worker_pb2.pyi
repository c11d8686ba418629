from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Worker(_message.Message):
    __slots__ = ("worker_id", "role", "address", "state", "identity", "layout", "incarnation", "load")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    address: str
    state: str
    identity: _handle_pb2.ModelIdentity
    layout: _handle_pb2.KvLayout
    incarnation: int
    load: WorkerLoad
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., identity: _Optional[_Union[_handle_pb2.ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[_handle_pb2.KvLayout, _Mapping]] = ..., incarnation: _Optional[int] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ...) -> None: ...

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "prefill_backlog_tokens", "decode_backlog_tokens", "total_pages", "available_pages", "held_handles")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_BACKLOG_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    HELD_HANDLES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    prefill_backlog_tokens: int
    decode_backlog_tokens: int
    total_pages: int
    available_pages: int
    held_handles: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., prefill_backlog_tokens: _Optional[int] = ..., decode_backlog_tokens: _Optional[int] = ..., total_pages: _Optional[int] = ..., available_pages: _Optional[int] = ..., held_handles: _Optional[int] = ...) -> None: ...
