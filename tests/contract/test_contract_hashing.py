"""Byte-exact vectors, made by a second implementation of `docs/protocol.md`: another version of kvrelay must give the same."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from kvrelay import hashing
from kvrelay.handle import ModelIdentity

VECTORS = json.loads((Path(__file__).parent / "hashing.json").read_text(encoding="utf-8"))
IDENTITY = ModelIdentity(model="any", **VECTORS["chains_of"])


@pytest.mark.parametrize("vector", VECTORS["fingerprints"], ids=lambda vector: vector["sha256"][:8])
def test_fingerprint(vector: dict) -> None:
    assert hashing.fingerprint(vector["fields"]).hex() == vector["sha256"]


def test_an_identitys_fingerprint_is_that_of_all_its_fields_but_the_name() -> None:
    assert IDENTITY.fingerprint.hex() == VECTORS["fingerprints"][0]["sha256"]
    assert replace(IDENTITY, model="another").fingerprint == IDENTITY.fingerprint
    for f in fields(ModelIdentity):
        if f.name != "model":
            assert replace(IDENTITY, **{f.name: "other"}).fingerprint != IDENTITY.fingerprint, f.name


@pytest.mark.parametrize("vector", VECTORS["chains"], ids=lambda vector: vector["prompt_digest"][:8])
def test_block_hashes_and_prompt_digest(vector: dict) -> None:
    root = hashing.root_hash(IDENTITY.fingerprint, vector["salt"])
    ids, size = vector["token_ids"], vector["block_size"]
    assert root.hex() == vector["root"]
    hashes = hashing.block_hashes(root, ids, size)
    assert [h.hex() for h in hashes] == vector["block_hashes"]
    assert hashing.prompt_digest(root, ids, size).hex() == vector["prompt_digest"]
    parent = root
    for position, expected in enumerate(hashes):
        parent = hashing.child_hash(parent, ids[position * size : (position + 1) * size])
        assert parent == expected


@pytest.mark.parametrize("vector", VECTORS["tokenizers"], ids=["files", "none"])
def test_tokenizer_digest(vector: dict) -> None:
    assert hashing.tokenizer_digest({name: text.encode() for name, text in vector["files"].items()}) == vector["digest"]
