"""fp8: casts, scales, and products against the same numbers multiplied in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hpctrain.config import ModelConfig
from hpctrain.model.init import initialise
from hpctrain.model.parts import Gather, Spread
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import ModelShape
from hpctrain.precision.fp8 import (
    FORWARD,
    GRADIENT,
    RECIPES,
    TILE,
    WHOLE,
    Quantised,
    cast,
    emulated_product,
    in_fp8,
    linear,
    powers,
    scaled_product,
)

FORMS = [FORWARD, GRADIENT]
MANTISSA = {FORWARD: 3, GRADIENT: 2}
ALL = (WHOLE, WHOLE)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
every_form = pytest.mark.parametrize("form", FORMS, ids=str)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def rounded(x: Tensor, rows: int, columns: int, form: torch.dtype) -> Tensor:
    """Every tile of ``x`` scaled, cast by torch and scaled back, one by one, in fp64."""
    out = torch.empty_like(x)
    for top in range(0, x.shape[0], rows):
        for left in range(0, x.shape[1], columns):
            tile = x[top : top + rows, left : left + columns]
            scale = 2.0 ** math.ceil(math.log2(tile.abs().max() / torch.finfo(form).max))
            out[top : top + rows, left : left + columns] = (tile / scale).to(form).double() * scale
    return out


# ---- casts and scales


@every_form
@settings(deadline=None)
@given(st.lists(st.floats(-5e4, 5e4, width=32), min_size=1, max_size=20))
def test_a_cast_is_torchs_own_within_the_range(form: torch.dtype, values: list[float]) -> None:
    x = torch.tensor(values)
    x = x.clamp(-torch.finfo(form).max, torch.finfo(form).max)
    assert torch.equal(cast(x, form).float(), x.to(form).float())


@every_form
def test_a_cast_stops_at_the_largest_number_and_lets_nan_through(form: torch.dtype) -> None:
    largest = torch.finfo(form).max
    found = cast(torch.tensor([1e30, -1e30, math.inf, -math.inf, math.nan]), form).float()
    assert found[:4].tolist() == [largest, -largest, largest, -largest] and found[4].isnan()


@every_form
@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_a_scale_is_the_least_power_of_two_that_divides_into_the_range(form: torch.dtype, largest: float) -> None:
    scale = powers(torch.tensor([largest]), form).item()
    assert math.frexp(scale)[0] == 0.5
    assert largest / scale <= torch.finfo(form).max < 2 * largest / scale


def test_zeros_have_a_scale_of_one_and_what_is_not_finite_has_none() -> None:
    scales = powers(torch.tensor([0.0, math.inf, math.nan, torch.finfo(torch.float32).tiny]), FORWARD)
    assert scales[0] == 1 and scales[1:3].isnan().all() and scales[3] > 0


@pytest.mark.parametrize("tile", [ALL, (1, TILE), (TILE, TILE), (TILE, 1)], ids=str)
@every_form
def test_numbers_are_off_by_at_most_half_a_step_of_the_format(form: torch.dtype, tile: tuple[int, int]) -> None:
    x = normal(200, 300).abs() + 0.5  # no number falls below the smallest normal one of its tile
    error = (Quantised.of(x, tile, form).wide(torch.float64) - x).abs() / x
    assert 0 < error.max() <= 2.0 ** -(MANTISSA[form] + 1)


def test_an_outlier_costs_precision_in_its_own_tile_alone() -> None:
    x = normal(3, 4 * TILE, std=1e-3)
    x[1, 200] = 1e4
    bad = Quantised.of(x, ALL, FORWARD).wide(torch.float64)
    good = Quantised.of(x, (1, TILE), FORWARD).wide(torch.float64)
    assert not bad[0].any() and distance(good[0], x[0]) < 0.04
    assert distance(good[1, 2 * TILE :], x[1, 2 * TILE :]) < 0.04


# ---- products


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_recipe
def test_the_product_and_its_gradients_are_those_of_the_rounded_operands(recipe: str, dtype: torch.dtype) -> None:
    x, w, g = (normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate([(150, 300), (140, 300), (150, 140)]))
    x.requires_grad_(), w.requires_grad_()
    y = linear(x, w, None, RECIPES[recipe])
    y.backward(g)
    rows, columns = (1, TILE) if recipe == "block" else ALL
    weight = (TILE, TILE) if recipe == "block" else ALL
    x, w, g, found = x.detach().double(), w.detach().double(), g.double(), (y.detach(), x.grad, w.grad)
    rounded_x, rounded_w = rounded(x, rows, columns, FORWARD), rounded(w, *weight, FORWARD)
    again_x = rounded(rounded_x, columns, rows, FORWARD)
    expected = (
        rounded_x @ rounded_w.t(),
        rounded(g, rows, columns, GRADIENT) @ rounded_w,
        rounded(g, columns, rows, GRADIENT).t() @ again_x,
    )
    bound = {torch.float64: 1e-15, torch.float32: 1e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}[dtype]
    assert [one.dtype for one in found] == [dtype] * 3
    assert max(map(distance, found, expected)) < bound


@every_recipe
def test_the_product_and_its_gradients_are_near_those_in_fp64(recipe: str) -> None:
    x, w, g = normal(150, 300).requires_grad_(), normal(140, 300, seed=1, std=0.02).requires_grad_(), normal(150, 140)
    linear(x, w, None, RECIPES[recipe]).backward(g)
    found, (x.grad, w.grad) = (x.grad, w.grad), (None, None)
    torch.nn.functional.linear(x, w).backward(g)
    assert distance(linear(x, w, None, RECIPES[recipe]).detach(), (x @ w.t()).detach()) < 0.05
    assert 0.01 < max(map(distance, found, (x.grad, w.grad))) < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_torchs_product_is_the_emulated_one(form: torch.dtype, dtype: torch.dtype) -> None:
    a = Quantised.of(normal(24, 48).float(), ALL, form)
    b = Quantised.of(normal(32, 48, seed=1, std=1e-3).float(), ALL, FORWARD)
    torch.testing.assert_close(scaled_product(a, b, dtype), emulated_product(a, b, dtype), rtol=1e-6, atol=0)
    torch.testing.assert_close(scaled_product(b.t().t(), a, dtype), emulated_product(b, a, dtype), rtol=1e-6, atol=0)


@every_recipe
def test_zeros_give_zeros_and_nothing_gives_nothing(recipe: str) -> None:
    x, w = torch.zeros(4, 130, requires_grad=True), torch.zeros(3, 130, requires_grad=True)
    y = linear(x, w, torch.ones(3), RECIPES[recipe])
    y.sum().backward()
    assert (y == 1).all() and not x.grad.any() and not w.grad.any()
    assert linear(torch.zeros(0, 130), w, None, RECIPES[recipe]).shape == (0, 3)


@every_recipe
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_not_hidden(recipe: str, bad: float) -> None:
    x, w = normal(4, 130).float().requires_grad_(), normal(3, 130).float().requires_grad_()
    gradient = torch.ones(4, 3)
    gradient[2, 1] = bad
    linear(x, w, None, RECIPES[recipe]).backward(gradient)
    assert x.grad[2].isnan().all() and w.grad[1].isnan().all()
    assert linear(torch.full((1, 130), bad), w, None, RECIPES[recipe]).isnan().all()


# ---- in the model


@every_recipe
def test_only_the_blocks_linear_maps_are_in_fp8_and_all_of_them(recipe: str) -> None:
    shape = ModelShape.of(ModelConfig(family="llama", layers=2, width=32, heads=4, sequence=8), 50)
    model = Transformer(shape)
    initialise(model, shape, 1)
    in_fp8(model.blocks, recipe)
    maps = {name for name, part in model.named_modules() if isinstance(part, Spread | Gather)}
    changed = {name for name in maps if model.get_submodule(name).product is not torch.nn.functional.linear}
    assert maps - changed == {"head.logits"} and len(changed) == 14
    tokens = torch.arange(16).view(2, 8)
    model.loss(tokens, tokens)[0].backward()
    assert all(parameter.grad.stride() == parameter.stride() for parameter in model.parameters())


def test_without_a_recipe_nothing_changes() -> None:
    part = Spread(4, 4, bias=False)
    in_fp8(part, "none")
    assert part.product is torch.nn.functional.linear
