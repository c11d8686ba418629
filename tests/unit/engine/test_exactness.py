"""The rules in services/engine/exactness.py hold on the machine that runs this test."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from services.engine.exactness import KEY_BLOCK, SUPPORTED_DTYPES, round_up, rules_for
from services.engine.exactness_check import violations

CPU = torch.device("cpu")
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (128, 64), (256, 64), (64, 128), (300, 64))
"""Of SmolLM2 and of the tiny test models."""


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(9, 3, 64), (4, 2, 16), (14, 2, 64), (8, 8, 128)], ids=str)
def test_a_row_keeps_its_bits_under_the_rules(dtype: torch.dtype, heads: tuple[int, int, int]) -> None:
    assert violations(dtype, rules_for(dtype, CPU), shapes=SHAPES, heads=heads) == []


def test_the_check_notices_rules_that_are_too_lax() -> None:
    lax = dataclasses.replace(rules_for(torch.float32, CPU), linear_rows=1, query_rows=1, key_tails=tuple(range(1, KEY_BLOCK + 1)))
    assert violations(torch.float32, lax, shapes=SHAPES, heads=(9, 3, 64))


@pytest.mark.parametrize("dtype", SUPPORTED_DTYPES, ids=str)
def test_padding_never_shrinks_and_stays_within_its_block(dtype: torch.dtype) -> None:
    rules = rules_for(dtype, CPU)
    for count in range(1, 2 * KEY_BLOCK + 2):
        keys = rules.pad_keys(count)
        assert count <= keys <= round_up(count, KEY_BLOCK)
        assert keys % 16 == 0 and rules.pad_keys(keys) == keys
        assert rules.pad_queries(count) >= count and rules.pad_rows(count) >= count


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match="float16"):
        rules_for(torch.float16, CPU)
