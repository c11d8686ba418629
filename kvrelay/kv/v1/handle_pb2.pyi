import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandleState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDLE_STATE_UNSPECIFIED: _ClassVar[HandleState]
    HANDLE_STATE_WRITING: _ClassVar[HandleState]
    HANDLE_STATE_COMMITTED: _ClassVar[HandleState]
    HANDLE_STATE_RELEASED: _ClassVar[HandleState]
HANDLE_STATE_UNSPECIFIED: HandleState
HANDLE_STATE_WRITING: HandleState
HANDLE_STATE_COMMITTED: HandleState
HANDLE_STATE_RELEASED: HandleState

class ModelIdentity(_message.Message):
    __slots__ = ("model", "weights_digest", "tokenizer_digest", "dtype", "kv_dtype", "rope", "quantization", "adapter", "numerics", "fingerprint")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights_digest: str
    tokenizer_digest: str
    dtype: str
    kv_dtype: str
    rope: str
    quantization: str
    adapter: str
    numerics: str
    fingerprint: bytes
    def __init__(self, model: _Optional[str] = ..., weights_digest: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., rope: _Optional[str] = ..., quantization: _Optional[str] = ..., adapter: _Optional[str] = ..., numerics: _Optional[str] = ..., fingerprint: _Optional[bytes] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("layers", "kv_heads", "head_dim", "block_size", "dtype", "axis_order", "tp_rank", "tp_size")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    AXIS_ORDER_FIELD_NUMBER: _ClassVar[int]
    TP_RANK_FIELD_NUMBER: _ClassVar[int]
    TP_SIZE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: str
    axis_order: str
    tp_rank: int
    tp_size: int
    def __init__(self, layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., axis_order: _Optional[str] = ..., tp_rank: _Optional[int] = ..., tp_size: _Optional[int] = ...) -> None: ...

class PeerLocation(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class StoreLocation(_message.Message):
    __slots__ = ("address",)
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    address: str
    def __init__(self, address: _Optional[str] = ...) -> None: ...

class ShmLocation(_message.Message):
    __slots__ = ("name", "offset")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    name: str
    offset: int
    def __init__(self, name: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class RemoteDescriptor(_message.Message):
    __slots__ = ("library", "descriptor")
    LIBRARY_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    library: str
    descriptor: bytes
    def __init__(self, library: _Optional[str] = ..., descriptor: _Optional[bytes] = ...) -> None: ...

class KvLocation(_message.Message):
    __slots__ = ("peer", "store", "shm", "remote")
    PEER_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    SHM_FIELD_NUMBER: _ClassVar[int]
    REMOTE_FIELD_NUMBER: _ClassVar[int]
    peer: PeerLocation
    store: StoreLocation
    shm: ShmLocation
    remote: RemoteDescriptor
    def __init__(self, peer: _Optional[_Union[PeerLocation, _Mapping]] = ..., store: _Optional[_Union[StoreLocation, _Mapping]] = ..., shm: _Optional[_Union[ShmLocation, _Mapping]] = ..., remote: _Optional[_Union[RemoteDescriptor, _Mapping]] = ...) -> None: ...

class KvSegment(_message.Message):
    __slots__ = ("first_block", "block_count", "size_bytes", "crc32c")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_count: int
    size_bytes: int
    crc32c: int
    def __init__(self, first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., size_bytes: _Optional[int] = ..., crc32c: _Optional[int] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("lease_id", "ttl", "expire_time")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    EXPIRE_TIME_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ttl: _duration_pb2.Duration
    expire_time: _timestamp_pb2.Timestamp
    def __init__(self, lease_id: _Optional[str] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., expire_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class KvHandle(_message.Message):
    __slots__ = ("name", "state", "identity", "layout", "token_start", "token_end", "block_hashes", "prompt_digest", "segments", "lease", "incarnation", "locations")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_END_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    LOCATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: HandleState
    identity: ModelIdentity
    layout: KvLayout
    token_start: int
    token_end: int
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    prompt_digest: bytes
    segments: _containers.RepeatedCompositeFieldContainer[KvSegment]
    lease: Lease
    incarnation: int
    locations: _containers.RepeatedCompositeFieldContainer[KvLocation]
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[HandleState, str]] = ..., identity: _Optional[_Union[ModelIdentity, _Mapping]] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., token_start: _Optional[int] = ..., token_end: _Optional[int] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., prompt_digest: _Optional[bytes] = ..., segments: _Optional[_Iterable[_Union[KvSegment, _Mapping]]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., incarnation: _Optional[int] = ..., locations: _Optional[_Iterable[_Union[KvLocation, _Mapping]]] = ...) -> None: ...
