"""The C interface of forward.cpp for ctypes: structures field by field as they stand there."""

from __future__ import annotations

import ctypes
import enum
from pathlib import Path
from typing import ClassVar

from services.engine.model.native.build import THIS_CPU, NativeKernelsUnavailable, library_path

MAX_GROUP = 96
"""Query heads for each KV head, at most: kQueryRows in attention.h."""


class Kind(enum.IntEnum):
    """How a linear's weights are stored."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2


class Which(enum.IntEnum):
    """A layer's linears."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class WhichNorm(enum.IntEnum):
    """A layer's norms; only INPUT and MLP must be set."""

    INPUT = 0
    QUERY = 1
    KEY = 2
    MLP = 3
    AFTER_ATTENTION = 4
    AFTER_MLP = 5


class Config(ctypes.Structure):
    """`KvrConfig`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "inner", "query_heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("max_positions", "gelu")),
        *((name, ctypes.c_float) for name in ("norm_epsilon", "query_scale", "embedding_scale")),
        ("threads", ctypes.c_int32),
    ]


class Step(ctypes.Structure):
    """`KvrStep`."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int32) for name in ("tokens", "spans", "samples")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "starts", "counts", "table_starts", "pages", "sample_rows", "logits")),
        ("logits_stride", ctypes.c_int64),
        ("pool", ctypes.c_void_p),
        ("page_size", ctypes.c_int32),
        ("pool_bf16", ctypes.c_int32),
    ]


def load(cache_dir: Path, target_flags: tuple[str, ...] = THIS_CPU) -> ctypes.CDLL:
    """The library, compiled if need be; `NativeKernelsUnavailable` if it cannot be had."""
    path = library_path(cache_dir, target_flags)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeKernelsUnavailable(f"{path} cannot be loaded: {error}") from error
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    library.kvr_instruction_set.restype = ctypes.c_char_p
    library.kvr_padded.argtypes, library.kvr_padded.restype = [ctypes.c_int64], ctypes.c_int64
    library.kvr_create.argtypes, library.kvr_create.restype = [pointer], pointer
    library.kvr_destroy.argtypes, library.kvr_destroy.restype = [pointer], None
    library.kvr_set_linear.argtypes = [pointer, integer, integer, integer, pointer, pointer, pointer, integer, integer, integer]
    library.kvr_set_norm.argtypes = [pointer, integer, integer, pointer, integer]
    library.kvr_set_layer.argtypes, library.kvr_set_layer.restype = [pointer, integer, integer, pointer], None
    library.kvr_set_embedding.argtypes, library.kvr_set_embedding.restype = [pointer, pointer, integer], None
    library.kvr_forward.argtypes = [pointer, pointer]
    return library
