"""Int8 rows and weights: close to what they stand for, exact in their sums, and blind to their company."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.engine.model.exactness import rules_for
from services.engine.model.layers import linear
from services.engine.model.llama import load_model
from services.engine.model.quantization import LARGEST, block_of, quantize_rows, quantize_weight
from services.engine.model.weights import Int8Weight, load_weights, quantize
from tests.engine_runs import MODES, PagedRun, random_ids
from tests.tiny_models import write_tiny_model

RULES = rules_for(torch.device("cpu"))


def drawn(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values near 1, with one column of outliers as real activations have them."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    values[:, columns // 3] *= 30
    return values


@pytest.mark.parametrize(("columns", "block"), [(1, 1), (7, 1), (12, 4), (16, 16), (96, 32), (576, 64), (1536, 64), (4096, 64)])
def test_a_block_is_the_largest_power_of_two_that_divides_a_row(columns: int, block: int) -> None:
    assert block_of(columns) == block


@pytest.mark.parametrize("columns", [1, 7, 96, 576, 1536])
def test_a_rotated_row_stands_for_the_hadamard_transform_of_its_blocks(columns: int) -> None:
    block = block_of(columns)
    signs = [[(-1.0) ** (row & column).bit_count() for column in range(block)] for row in range(block)]
    x = drawn(5, columns)
    expected = (x.view(5, -1, block).double() @ torch.tensor(signs).double()).view(5, columns)
    values, scales = quantize_rows(x, block)
    assert values.abs().amax(dim=1).eq(LARGEST).all()
    assert (values * scales[:, None] - expected).abs().amax(dim=1).le(scales * 0.51).all()


def test_halves_round_to_even() -> None:
    row = torch.tensor([[0.5, 1.5, -0.5, -1.5, -2.5, 3.5, 127.0]])
    assert quantize_rows(row, 1)[0].tolist() == [[0, 2, 0, -2, -2, 4, 127]]


@pytest.mark.parametrize(("shape", "block"), [((1, 64), 64), ((3, 64), 64), ((1, 7), 1), ((4, 7), 1)])
def test_what_is_quantized_is_left_as_it_was(shape: tuple[int, int], block: int) -> None:
    x = drawn(*shape)
    before = x.clone()
    quantize_rows(x, block)
    assert torch.equal(x, before)


def test_the_rotation_spreads_outliers_so_that_the_other_columns_keep_their_bits() -> None:
    weight, x = torch.randn(50, 576, generator=torch.Generator().manual_seed(1)), drawn(20, 576, seed=2)
    exact = x @ weight.t()
    naive = linear(Int8Weight(*quantize_rows(weight, 1), 1), None, RULES)(x) - exact
    rotated = linear(quantize_weight(weight), None, RULES)(x) - exact
    assert rotated.square().mean() < 0.2 * naive.square().mean()


def test_a_row_too_small_for_an_inverse_is_zero() -> None:
    values, scales = quantize_rows(torch.full((1, 64), 1e-40), 64)
    assert not values.any() and scales.isfinite().all()


def test_a_row_of_zeros_stays_one() -> None:
    values, scales = quantize_rows(torch.zeros(2, 64), 64)
    assert not values.any() and not scales.any()


@pytest.mark.parametrize("shape", [(30, 96), (40, 576), (20, 1536), (8, 4096)], ids=str)
def test_a_product_is_the_scaled_sum_of_exact_integers(shape: tuple[int, int]) -> None:
    weight, x = quantize_weight(drawn(*shape, seed=1)), drawn(9, shape[1], seed=2)
    bias = torch.randn(shape[0], generator=torch.Generator().manual_seed(3))
    values, scales = quantize_rows(x, weight.block)
    sums = (values.long() @ weight.values.long().t()).float()
    assert torch.equal(linear(weight, bias, RULES)(x), sums * (scales[:, None] * weight.scales) + bias)


def test_the_largest_sums_are_exact_too() -> None:
    weight = Int8Weight(torch.full((2, 4096), LARGEST, dtype=torch.int8), torch.ones(2), 1)
    assert linear(weight, None, RULES)(torch.full((1, 4096), 127.0)).tolist() == [[4096 * 127**2.0] * 2]


def test_a_product_is_close_to_that_of_the_weights_it_stands_for() -> None:
    weight, x = drawn(50, 576, seed=1), drawn(20, 576, seed=2)
    exact = x @ weight.t()
    error = linear(quantize_weight(weight), None, RULES)(x) - exact
    assert error.square().mean() < 2e-4 * exact.square().mean()


def test_a_row_is_quantized_alike_in_any_company() -> None:
    weight, x = quantize_weight(drawn(300, 120, seed=1)), drawn(70, 120, seed=2)
    product = linear(weight, None, RULES)
    whole = product(x)
    for start, count in ((0, 1), (3, 2), (17, 16), (1, 69)):
        assert torch.equal(product(x[start : start + count]), whole[start : start + count])


def test_a_quantized_model_keeps_its_embedding_and_stays_close(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "qwen2")
    exact, rounded = load_model(folder, MODES["float32"]), load_model(folder, MODES["int8"])
    weights = load_weights(folder, exact.config, torch.bfloat16, torch.device("cpu"))
    smaller = quantize(weights)
    assert smaller.embedding is weights.embedding and isinstance(smaller.head, Int8Weight)
    ids = random_ids(200, 300, seed=5)
    difference = PagedRun(exact).prefill(ids).logits[199] - PagedRun(rounded).prefill(ids).logits[199]
    assert 0 < difference.abs().max() < 0.5
