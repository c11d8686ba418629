import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from kvrelay.inference.v1 import generation_pb2 as _generation_pb2
from kvrelay.inference.v1 import worker_pb2 as _worker_pb2
from kvrelay.kv.v1 import handle_pb2 as _handle_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServingPath(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVING_PATH_UNSPECIFIED: _ClassVar[ServingPath]
    SERVING_PATH_LOCAL: _ClassVar[ServingPath]
    SERVING_PATH_SPLIT: _ClassVar[ServingPath]
    SERVING_PATH_FALLBACK: _ClassVar[ServingPath]
SERVING_PATH_UNSPECIFIED: ServingPath
SERVING_PATH_LOCAL: ServingPath
SERVING_PATH_SPLIT: ServingPath
SERVING_PATH_FALLBACK: ServingPath

class GenerateRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "token_ids", "sampling", "stop", "request_id", "cache_salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: _generation_pb2.ChatPrompt
    token_ids: _generation_pb2.TokenIds
    sampling: _generation_pb2.SamplingParams
    stop: _generation_pb2.StopConditions
    request_id: str
    cache_salt: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[_generation_pb2.ChatPrompt, _Mapping]] = ..., token_ids: _Optional[_Union[_generation_pb2.TokenIds, _Mapping]] = ..., sampling: _Optional[_Union[_generation_pb2.SamplingParams, _Mapping]] = ..., stop: _Optional[_Union[_generation_pb2.StopConditions, _Mapping]] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "token", "done")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    started: GenerateStarted
    token: _generation_pb2.TokenEvent
    done: GenerateDone
    def __init__(self, started: _Optional[_Union[GenerateStarted, _Mapping]] = ..., token: _Optional[_Union[_generation_pb2.TokenEvent, _Mapping]] = ..., done: _Optional[_Union[GenerateDone, _Mapping]] = ...) -> None: ...

class GenerateStarted(_message.Message):
    __slots__ = ("request_id", "model", "prompt_tokens", "trace_id")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRACE_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    prompt_tokens: int
    trace_id: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., trace_id: _Optional[str] = ...) -> None: ...

class GenerateDone(_message.Message):
    __slots__ = ("finish_reason", "usage", "timings", "transfer", "path", "decision")
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DECISION_FIELD_NUMBER: _ClassVar[int]
    finish_reason: _generation_pb2.FinishReason
    usage: _generation_pb2.Usage
    timings: _generation_pb2.Timings
    transfer: _generation_pb2.TransferStats
    path: ServingPath
    decision: str
    def __init__(self, finish_reason: _Optional[_Union[_generation_pb2.FinishReason, str]] = ..., usage: _Optional[_Union[_generation_pb2.Usage, _Mapping]] = ..., timings: _Optional[_Union[_generation_pb2.Timings, _Mapping]] = ..., transfer: _Optional[_Union[_generation_pb2.TransferStats, _Mapping]] = ..., path: _Optional[_Union[ServingPath, str]] = ..., decision: _Optional[str] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "next_page_token")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    next_page_token: str
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "identity", "max_context_tokens", "ready", "missing_role", "prefill_workers", "decode_workers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    MISSING_ROLE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKERS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    identity: _handle_pb2.ModelIdentity
    max_context_tokens: int
    ready: bool
    missing_role: str
    prefill_workers: int
    decode_workers: int
    def __init__(self, name: _Optional[str] = ..., identity: _Optional[_Union[_handle_pb2.ModelIdentity, _Mapping]] = ..., max_context_tokens: _Optional[int] = ..., ready: bool = ..., missing_role: _Optional[str] = ..., prefill_workers: _Optional[int] = ..., decode_workers: _Optional[int] = ...) -> None: ...

class GetFleetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetFleetResponse(_message.Message):
    __slots__ = ("workers", "incompatibilities", "mode", "registry_connected", "view_age", "in_flight")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INCOMPATIBILITIES_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    REGISTRY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    VIEW_AGE_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Worker]
    incompatibilities: _containers.RepeatedCompositeFieldContainer[Incompatibility]
    mode: str
    registry_connected: bool
    view_age: _duration_pb2.Duration
    in_flight: int
    def __init__(self, workers: _Optional[_Iterable[_Union[_worker_pb2.Worker, _Mapping]]] = ..., incompatibilities: _Optional[_Iterable[_Union[Incompatibility, _Mapping]]] = ..., mode: _Optional[str] = ..., registry_connected: bool = ..., view_age: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., in_flight: _Optional[int] = ...) -> None: ...

class Incompatibility(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "differences")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DIFFERENCES_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    differences: _containers.RepeatedCompositeFieldContainer[FieldDifference]
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., differences: _Optional[_Iterable[_Union[FieldDifference, _Mapping]]] = ...) -> None: ...

class FieldDifference(_message.Message):
    __slots__ = ("field", "prefill_value", "decode_value")
    FIELD_FIELD_NUMBER: _ClassVar[int]
    PREFILL_VALUE_FIELD_NUMBER: _ClassVar[int]
    DECODE_VALUE_FIELD_NUMBER: _ClassVar[int]
    field: str
    prefill_value: str
    decode_value: str
    def __init__(self, field: _Optional[str] = ..., prefill_value: _Optional[str] = ..., decode_value: _Optional[str] = ...) -> None: ...
