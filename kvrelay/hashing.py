"""Byte-exact hashes: the model fingerprint and the chain of block hashes. `docs/protocol.md` is the specification.

fingerprint = SHA-256( "kvrelay.fingerprint.v1" NUL, then for each field in name order:
                       name NUL value NUL, all UTF-8 )
h[0]        = SHA-256( "kvrelay.block.v1" NUL, fingerprint (32 bytes), salt (UTF-8) )          the root, of no block
h[i]        = SHA-256( h[i-1], token ids of block i-1 as little-endian uint32 )                of full blocks only
prompt      = SHA-256( "kvrelay.prompt.v1" NUL, h[full blocks], remaining ids as little-endian uint32 )
tokenizer   = SHA-256( for each file in name order: name UTF-8 NUL, length as little-endian uint64, content )
"""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Mapping, Sequence

HASH_BYTES = 32


def fingerprint(fields: Mapping[str, str]) -> bytes:
    """32 bytes that change when anything changes that changes KV *values*. No field may hold a NUL."""
    digest = hashlib.sha256(b"kvrelay.fingerprint.v1\0")
    for name in sorted(fields):
        digest.update(name.encode() + b"\0" + fields[name].encode() + b"\0")
    return digest.digest()


def token_bytes(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32, four bytes each."""
    ids = array.array("I", token_ids)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def root_hash(model_fingerprint: bytes, salt: str = "") -> bytes:
    """The parent of a prompt's first block. `salt` keeps tenants' caches apart."""
    return hashlib.sha256(b"kvrelay.block.v1\0" + model_fingerprint + salt.encode()).digest()


def child_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of the full block `token_ids` that follows `parent`."""
    return hashlib.sha256(parent + token_bytes(token_ids)).digest()


def block_hashes(root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Chained hashes of the full blocks of a prompt; a rest shorter than a block has none."""
    raw, width = token_bytes(token_ids), 4 * block_size
    hashes, parent = [], root
    for start in range(0, len(raw) - width + 1, width):
        parent = hashlib.sha256(parent + raw[start : start + width]).digest()
        hashes.append(parent)
    return hashes


def prompt_digest(root: bytes, token_ids: Sequence[int], block_size: int) -> bytes:
    """32 bytes for the whole prompt, its rest included: what binds a handle to its content."""
    hashes = block_hashes(root, token_ids, block_size)
    rest = token_ids[len(hashes) * block_size :]
    return hashlib.sha256(b"kvrelay.prompt.v1\0" + (hashes[-1] if hashes else root) + token_bytes(rest)).digest()


def tokenizer_digest(files: Mapping[str, bytes]) -> str:
    """'sha256:<hex>' of a tokenizer's files, by file name (no path). Reads every byte: call it off the event loop."""
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name]
        digest.update(name.encode() + b"\0" + len(content).to_bytes(8, "little") + content)
    return f"sha256:{digest.hexdigest()}"
