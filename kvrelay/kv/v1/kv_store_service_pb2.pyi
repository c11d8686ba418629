import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from kvrelay.kv.v1 import transfer_service_pb2 as _transfer_service_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateKvRequest(_message.Message):
    __slots__ = ("identity", "layout", "block_hashes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    identity: _handle_pb2.ModelIdentity
    layout: _handle_pb2.KvLayout
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, identity: _Optional[_Union[_handle_pb2.ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[_handle_pb2.KvLayout, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class CreateKvResponse(_message.Message):
    __slots__ = ("handle", "missing_blocks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    MISSING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handle: _handle_pb2.KvHandle
    missing_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, handle: _Optional[_Union[_handle_pb2.KvHandle, _Mapping]] = ..., missing_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class WriteKvRequest(_message.Message):
    __slots__ = ("start", "segment", "chunk")
    START_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    start: WriteKvStart
    segment: _handle_pb2.KvSegment
    chunk: _transfer_service_pb2.KvChunk
    def __init__(self, start: _Optional[_Union[WriteKvStart, _Mapping]] = ..., segment: _Optional[_Union[_handle_pb2.KvSegment, _Mapping]] = ..., chunk: _Optional[_Union[_transfer_service_pb2.KvChunk, _Mapping]] = ...) -> None: ...

class WriteKvStart(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class WriteKvResponse(_message.Message):
    __slots__ = ("blocks", "size_bytes")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    size_bytes: int
    def __init__(self, blocks: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class CommitKvRequest(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class CommitKvResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class LookupPrefixRequest(_message.Message):
    __slots__ = ("identity", "layout", "block_hashes")
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    identity: _handle_pb2.ModelIdentity
    layout: _handle_pb2.KvLayout
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, identity: _Optional[_Union[_handle_pb2.ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[_handle_pb2.KvLayout, _Mapping]] = ..., block_hashes: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LookupPrefixResponse(_message.Message):
    __slots__ = ("handle", "blocks")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    handle: _handle_pb2.KvHandle
    blocks: int
    def __init__(self, handle: _Optional[_Union[_handle_pb2.KvHandle, _Mapping]] = ..., blocks: _Optional[int] = ...) -> None: ...

class ReadKvRequest(_message.Message):
    __slots__ = ("name", "lease_id", "incarnation", "first_block")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    incarnation: int
    first_block: int
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., first_block: _Optional[int] = ...) -> None: ...

class ReadKvResponse(_message.Message):
    __slots__ = ("segment", "chunk", "end")
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    segment: _transfer_service_pb2.SegmentHeader
    chunk: _transfer_service_pb2.KvChunk
    end: ReadKvEnd
    def __init__(self, segment: _Optional[_Union[_transfer_service_pb2.SegmentHeader, _Mapping]] = ..., chunk: _Optional[_Union[_transfer_service_pb2.KvChunk, _Mapping]] = ..., end: _Optional[_Union[ReadKvEnd, _Mapping]] = ...) -> None: ...

class ReadKvEnd(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class KvStoreServiceRenewLeasesRequest(_message.Message):
    __slots__ = ("renewals",)
    RENEWALS_FIELD_NUMBER: _ClassVar[int]
    renewals: _containers.RepeatedCompositeFieldContainer[_transfer_service_pb2.LeaseRenewal]
    def __init__(self, renewals: _Optional[_Iterable[_Union[_transfer_service_pb2.LeaseRenewal, _Mapping]]] = ...) -> None: ...

class KvStoreServiceRenewLeasesResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[_transfer_service_pb2.LeaseRenewalResult]
    def __init__(self, results: _Optional[_Iterable[_Union[_transfer_service_pb2.LeaseRenewalResult, _Mapping]]] = ...) -> None: ...

class KvStoreServiceReleaseKvRequest(_message.Message):
    __slots__ = ("name", "lease_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    lease_id: str
    def __init__(self, name: _Optional[str] = ..., lease_id: _Optional[str] = ...) -> None: ...

class KvStoreServiceReleaseKvResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStoreInfoResponse(_message.Message):
    __slots__ = ("incarnation", "blocks", "used_bytes", "limit_bytes", "leases", "hits", "misses", "evicted", "lease_ttl")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    MISSES_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    blocks: int
    used_bytes: int
    limit_bytes: int
    leases: int
    hits: int
    misses: int
    evicted: int
    lease_ttl: _duration_pb2.Duration
    def __init__(self, incarnation: _Optional[int] = ..., blocks: _Optional[int] = ..., used_bytes: _Optional[int] = ..., limit_bytes: _Optional[int] = ..., leases: _Optional[int] = ..., hits: _Optional[int] = ..., misses: _Optional[int] = ..., evicted: _Optional[int] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...
