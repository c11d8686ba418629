import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PullKvRequest(_message.Message):
    __slots__ = ("name", "lease_id", "incarnation", "identity", "layout", "prompt_digest", "first_block")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    incarnation: int
    identity: _handle_pb2.ModelIdentity
    layout: _handle_pb2.KvLayout
    prompt_digest: bytes
    first_block: int
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., identity: _Optional[_Union[_handle_pb2.ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[_handle_pb2.KvLayout, _Mapping]] = ..., prompt_digest: _Optional[bytes] = ..., first_block: _Optional[int] = ...) -> None: ...

class PullKvResponse(_message.Message):
    __slots__ = ("segment", "chunk", "end")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    segment: SegmentHeader
    chunk: KvChunk
    end: KvEnd
    def __init__(self, segment: _Optional[_Union[SegmentHeader, _Mapping]] = ..., chunk: _Optional[_Union[KvChunk, _Mapping]] = ..., end: _Optional[_Union[KvEnd, _Mapping]] = ...) -> None: ...

class SegmentHeader(_message.Message):
    __slots__ = ("segment", "wait", "early")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    EARLY_FIELD_NUMBER: _ClassVar[int]
    segment: _handle_pb2.KvSegment
    wait: _duration_pb2.Duration
    early: bool
    def __init__(self, segment: _Optional[_Union[_handle_pb2.KvSegment, _Mapping]] = ..., wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., early: bool = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("offset", "data")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class KvEnd(_message.Message):
    __slots__ = ("first_token_id", "finished", "prefill_end_unix_nanos")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_END_UNIX_NANOS_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    finished: bool
    prefill_end_unix_nanos: int
    def __init__(self, first_token_id: _Optional[int] = ..., finished: bool = ..., prefill_end_unix_nanos: _Optional[int] = ...) -> None: ...

class RenewLeasesRequest(_message.Message):
    __slots__ = ("renewals",)
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    renewals: _containers.RepeatedCompositeFieldContainer[LeaseRenewal]
    def __init__(self, renewals: _Optional[_Iterable[_Union[LeaseRenewal, _Mapping]]] = ...) -> None: ...

class LeaseRenewal(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class RenewLeasesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[LeaseRenewalResult]
    def __init__(self, results: _Optional[_Iterable[_Union[LeaseRenewalResult, _Mapping]]] = ...) -> None: ...

class LeaseRenewalResult(_message.Message):
    __slots__ = ("renewed", "ttl")
    RENEWED_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    renewed: bool
    ttl: _duration_pb2.Duration
    def __init__(self, renewed: bool = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ReleaseKvRequest(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class ReleaseKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
