"""Initial weights: the same numbers for every cut, and numbers that look normal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ModelConfig
from hpctrain.model.init import BLOCK, fill, fill_box, hollow, initialise
from hpctrain.model.transformer import Transformer
from hpctrain.plan.layout import Box
from hpctrain.plan.weights import ModelShape, Weight, weights

MATRIX = Weight("blocks.0.mlp.up.weight", (300, 200), ("mlp", "width"), std=0.02)  # 3.7 blocks
GOLDEN = [-1.0734241260651494, -0.11580446716595952, -0.08319218765650215, -1.2398222931086023, -0.057095275201626106]
WHOLE = fill(torch.empty(MATRIX.size), MATRIX, seed=1)


@given(st.integers(0, MATRIX.size), st.integers(0, MATRIX.size))
def test_any_interval_has_the_numbers_of_the_whole(a, b):
    start, stop = sorted((a, b))
    assert torch.equal(fill(torch.empty(stop - start), MATRIX, 1, start), WHOLE[start:stop])


@given(st.data())
def test_any_box_has_the_numbers_of_the_whole(data):
    start = tuple(data.draw(st.integers(0, size - 1)) for size in MATRIX.shape)
    length = tuple(data.draw(st.integers(1, min(9, size - at))) for size, at in zip(MATRIX.shape, start, strict=True))
    box = Box(start, length)
    assert torch.equal(fill_box(torch.empty(length), MATRIX, 1, box), WHOLE.view(MATRIX.shape)[box.slices])


def test_threads_change_no_bit():
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 2)
        assert torch.equal(fill(torch.empty(MATRIX.size), MATRIX, seed=1), WHOLE)
    finally:
        torch.set_num_threads(threads)


def test_the_numbers_are_those_of_every_release():
    expected = torch.tensor(GOLDEN, dtype=torch.float64)
    actual = fill(torch.empty(5, dtype=torch.float64), Weight("a", (5,), ("width",), std=1.0), seed=7)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)


def test_single_precision_is_double_precision_rounded():
    double = fill(torch.empty(MATRIX.size, dtype=torch.float64), MATRIX, seed=1)
    assert torch.equal(double.to(torch.float32), WHOLE)


def test_the_numbers_are_normal_with_the_mean_and_spread_of_the_weight():
    weight = Weight("w", (BLOCK * 64,), ("width",), mean=3.0, std=0.5)
    x = (fill(torch.empty(weight.size, dtype=torch.float64), weight, seed=2) - 3.0) / 0.5
    root = weight.size**0.5
    assert x.mean().abs() < 4 / root
    assert (x.square().mean() - 1).abs() < 4 * 2**0.5 / root
    assert x.pow(3).mean().abs() < 4 * 15**0.5 / root
    assert (x.pow(4).mean() - 3).abs() < 4 * 96**0.5 / root
    below = torch.tensor([(x < z).double().mean() for z in (-2.0, -1.0, 0.0, 1.0, 2.0)])
    normal = torch.special.ndtr(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    assert (below - normal).abs().max() < 4 * 0.5 / root


@pytest.mark.parametrize("change", [dict(seed=2), dict(name="blocks.1.mlp.up.weight"), dict(start=BLOCK)])
def test_other_seeds_names_and_blocks_have_unrelated_numbers(change):
    size = BLOCK * 2
    name, seed, start = change.get("name", MATRIX.name), change.get("seed", 1), change.get("start", 0)
    other = fill(torch.empty(size), Weight(name, MATRIX.shape, MATRIX.dims, std=0.02), seed, start)
    correlation = torch.corrcoef(torch.stack([WHOLE[:size], other]).double())[0, 1]
    assert correlation.abs() < 4 / size**0.5


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_model_is_filled_wholly_and_equally_for_one_seed(family):
    shape = ModelShape.of(ModelConfig(family=family, layers=2, width=32, heads=2), 64)
    models = [Transformer(shape), Transformer(shape)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)
        initialise(model, shape, seed=3)
    for weight in weights(shape):
        first, second = (model.get_parameter(weight.name) for model in models)
        assert torch.equal(first, second) and first.isfinite().all()
        assert torch.equal(first.flatten(), fill(torch.empty(weight.size), weight, seed=3))


def test_a_hollow_model_has_every_shape_and_no_memory():
    shape = ModelShape.of(ModelConfig(layers=2, width=32, heads=2), 64)
    model = hollow(lambda: Transformer(shape), torch.bfloat16, torch.device("cpu"))
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == {w.name: w.shape for w in weights(shape)}
    assert all(p.dtype == torch.bfloat16 and p.requires_grad and p.isnan().all() for p in model.parameters())
    assert all(p.untyped_storage().nbytes() == 2 for p in model.parameters())
    with pytest.raises(RuntimeError):  # nobody's memory is written by mistake
        initialise(model, shape, seed=1)
