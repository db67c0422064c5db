"""fp8 products of the device, and activations laid aside in pinned memory, against what the device makes without."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hpctrain.config import ModelConfig
from hpctrain.model.init import initialise
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.recompute import recompute
from hpctrain.plan.weights import ModelShape
from hpctrain.precision.fp8 import FORWARD, GRADIENT, RECIPES, Quantised, emulated_product, linear, scaled_product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
]
fp8 = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="this GPU does not multiply fp8"
)


@fp8
@pytest.mark.parametrize("form", [FORWARD, GRADIENT], ids=str)
def test_the_devices_product_is_the_emulated_one(form: torch.dtype) -> None:
    a = Quantised.of(torch.randn(256, 512, device="cuda"), RECIPES["tensor"].along, form)
    b = Quantised.of(torch.randn(128, 512, device="cuda"), RECIPES["tensor"].weight, FORWARD)
    found, expected = (product(a, b, torch.bfloat16) for product in (scaled_product, emulated_product))
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2e-2)


@fp8
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_linear_map_is_near_that_in_fp32(recipe: str) -> None:
    x, w = torch.randn(256, 512, device="cuda").bfloat16(), torch.randn(128, 512, device="cuda").bfloat16()
    gradient, results = torch.randn(256, 128, device="cuda").bfloat16(), []
    products = {x.dtype: partial(linear, bias=None, recipe=RECIPES[recipe]), torch.float32: torch.nn.functional.linear}
    for dtype, product in products.items():
        inputs = [one.to(dtype, copy=True).requires_grad_() for one in (x, w)]
        y = product(*inputs)
        y.backward(gradient.to(dtype))
        results.append([y.detach(), *(one.grad for one in inputs)])
    assert all(((a - b).norm() / b.norm()).item() < 0.1 for a, b in zip(*results, strict=True))


def test_activations_come_back_from_pinned_memory_as_they_were() -> None:
    gradients = []
    for kind in ("none", "offload"):
        shape = ModelShape.of(ModelConfig(layers=3, width=64, heads=4, sequence=64, dropout=0.1), vocabulary=64)
        model = Transformer(shape)
        initialise(model, shape, seed=1)
        model.cuda()
        recompute(model, kind)
        tokens = torch.arange(128, device="cuda").view(2, 64) % 64
        model.loss(tokens, tokens, noise=Noise(1, 0, (0, 1)))[0].backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for found, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
