"""KV handles and the identities they are checked against. Pure values; `kvrelay.wire` puts them on the wire."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from kvrelay import hashing
from kvrelay.errors import FingerprintMismatchError, LayoutMismatchError


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What changes the *values* of KV. Two workers with equal fingerprints compute the same KV for the same tokens, bit for bit."""

    model: str
    """Name requests use. Not part of the fingerprint."""
    weights_digest: str
    """'sha256:<hex>' of the weight files."""
    tokenizer_digest: str
    """'sha256:<hex>' of tokenizer.json, tokenizer_config.json and the chat template."""
    dtype: str
    """Dtype of the weights: 'bfloat16' or 'float32'; of those left unquantized where there is a quantization."""
    kv_dtype: str
    """Dtype of the KV cache."""
    rope: str
    """Canonical text of the rotary settings."""
    numerics: str
    """What computes, as far as it decides the last bits: 'native-1', 'torch-2.13.0/AVX512/GenuineIntel-6-143/threads-1'."""
    quantization: str = "none"
    adapter: str = "none"

    @property
    def weights_kind(self) -> str:
        """What weights are kept in, for people: the dtype, or the quantization where there is one."""
        return self.dtype if self.quantization == "none" else self.quantization

    @property
    def fingerprint(self) -> bytes:
        """32 bytes; see `kvrelay.hashing.fingerprint`."""
        return hashing.fingerprint({f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"})


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How KV is arranged: one block is `[layers, 2, block_size, kv_heads, head_dim]`, contiguous, key before value."""

    layers: int
    kv_heads: int
    head_dim: int
    block_size: int
    """Tokens a block."""
    dtype: str
    axis_order: str = "L2TNH"
    """Axes of one block: Layer, 2 (K, V), Token, kv head (N), Head dim."""
    tp_rank: int = 0
    tp_size: int = 1

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of all layers."""
        width = {"bfloat16": 2, "float16": 2, "float32": 4}[self.dtype]
        return self.layers * 2 * self.block_size * self.kv_heads * self.head_dim * width


def differences(ours: ModelIdentity | KvLayout, theirs: ModelIdentity | KvLayout) -> Iterator[tuple[str, str, str]]:
    """(field, our value, their value) for each field that differs; the model's name does not count."""
    for f in fields(ours):
        if f.name != "model" and getattr(ours, f.name) != getattr(theirs, f.name):
            yield f.name, str(getattr(ours, f.name)), str(getattr(theirs, f.name))


def check_fingerprint(ours: ModelIdentity, wanted: bytes) -> None:
    """Raises `FingerprintMismatchError` unless `ours` is the identity that `wanted` names."""
    if ours.fingerprint != wanted:
        message = f"this worker serves another version of the model, or computes it otherwise (numerics {ours.numerics})"
        raise FingerprintMismatchError(message, wanted=wanted.hex(), served=ours.fingerprint.hex(), numerics=ours.numerics)


def check_compatible(our_identity: ModelIdentity, our_layout: KvLayout, identity: ModelIdentity, layout: KvLayout) -> None:
    """Raises `FingerprintMismatchError` or `LayoutMismatchError`, naming every differing field with both values."""
    for cls, ours, theirs in (
        (FingerprintMismatchError, our_identity, identity),
        (LayoutMismatchError, our_layout, layout),
    ):
        found = list(differences(ours, theirs))
        if found:
            error = cls("; ".join(f"{name}: {mine} here, {other} there" for name, mine, other in found))
            error.fields = {name: f"{mine} != {other}" for name, mine, other in found}
            raise error


class HandleState(enum.Enum):
    """A handle's life, in this order; no way back."""

    WRITING = "writing"
    """Blocks are still being produced; those published so far may be pulled."""
    COMMITTED = "committed"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class PeerLocation:
    """KV that its holder serves over gRPC (`kvrelay.kv.v1.KvTransferService`)."""

    address: str
    """host:port."""


@dataclass(frozen=True, slots=True)
class StoreLocation:
    """KV in a block store (`kvrelay.kv.v1.KvStoreService`)."""

    address: str
    """host:port."""


Location = PeerLocation | StoreLocation
"""Where bytes can be had. Shared memory and RDMA descriptors join this union later."""


@dataclass(frozen=True, slots=True)
class KvSegment:
    """A contiguous run of KV bytes: whole blocks, in order."""

    first_block: int
    block_count: int
    size_bytes: int
    crc32c: int | None = None
    """Castagnoli checksum of the bytes; None while not computed yet (it then travels beside the bytes)."""


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to read a handle. `ttl_s` counts on the *reader's* own monotonic clock, from receipt."""

    lease_id: str
    """Secret; shown to whoever may pull, renew or release."""
    ttl_s: float


@dataclass(frozen=True, slots=True)
class KvHandle:
    """An immutable description of the KV of one prompt. Opaque name, single-use, leased, fenced, bound to content."""

    name: str
    """'kvHandles/<32 hex digits>'."""
    state: HandleState
    identity: ModelIdentity
    layout: KvLayout
    token_start: int
    token_end: int
    """KV of tokens [start, end)."""
    block_hashes: Sequence[bytes]
    """Chained hashes of the full blocks."""
    prompt_digest: bytes
    """`kvrelay.hashing.prompt_digest` of the whole prompt."""
    segments: Sequence[KvSegment]
    lease: Lease
    incarnation: int
    """The holder's life that made it; another life refuses it."""
    locations: Sequence[Location] = ()
    """Best first."""

    @property
    def block_count(self) -> int:
        return -(-self.token_end // self.layout.block_size) - self.token_start // self.layout.block_size
