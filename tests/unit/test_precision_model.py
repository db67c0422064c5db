"""The model in 16-bit formats: what is summed over many tokens is summed in fp32, and no format is left on the way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hpctrain.config import ModelConfig
from hpctrain.model.init import initialise
from hpctrain.model.loss import IGNORE, cross_entropy
from hpctrain.model.parts import Norm, lookup
from hpctrain.model.transformer import Transformer
from hpctrain.plan.weights import NORMS, ModelShape

EPSILON = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # half a step next to 1
every_dtype = pytest.mark.parametrize("dtype", EPSILON, ids=str)


def normal(*shape: int, seed: int = 0, std: float = 1.0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * std


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@every_dtype
@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_rounds_its_result_and_its_gradients_once(kind: str, dtype: torch.dtype) -> None:
    results = []
    x, gradient = normal(4096, 32, std=3).add(1).to(dtype), normal(4096, 32, seed=1).add(0.5).to(dtype)
    for format in (dtype, torch.float64):
        norm, inputs = Norm(kind, 32, 1e-5).to(format), x.to(format, copy=True).requires_grad_()
        for seed, parameter in enumerate(norm.parameters()):
            parameter.data.copy_(normal(32, seed=seed).to(dtype))
        y = norm(inputs)
        y.backward(gradient.to(format))
        results.append([y.detach(), inputs.grad, *(parameter.grad for parameter in norm.parameters())])
    assert all(one.dtype == dtype for one in results[0])
    assert max(map(distance, *results)) < EPSILON[dtype]


@every_dtype
def test_a_token_that_is_met_often_gets_the_sum_of_its_gradients(dtype: torch.dtype) -> None:
    weight = torch.ones(3, 2, dtype=dtype, requires_grad=True)
    found = lookup(torch.tensor([[1] * 4096 + [2]]), weight)
    found.backward(torch.full_like(found, 0.25))
    assert weight.grad.tolist() == [[0, 0], [1024, 1024], [0.25, 0.25]]


@every_dtype
def test_the_loss_is_that_of_the_rounded_logits_and_its_gradients_are_near(dtype: torch.dtype) -> None:
    hidden, weight = normal(1500, 16).to(dtype), normal(300, 16, seed=1, std=0.3).to(dtype)
    targets = torch.randint(300, (1500,), generator=torch.Generator().manual_seed(1))
    targets[::7] = IGNORE
    results, losses = [], []
    for format in (dtype, torch.float64):
        h, w = (x.to(format, copy=True).requires_grad_() for x in (hidden, weight))
        loss, count = cross_entropy(h, w, targets)
        (loss / count).backward()
        with torch.no_grad():
            torch.testing.assert_close(cross_entropy(h, w, targets)[0], loss)
        losses.append(loss)
        results.append([h.grad, w.grad])
    rounded = torch.nn.functional.cross_entropy((hidden @ weight.t()).double(), targets, reduction="sum")
    torch.testing.assert_close(losses[0], rounded, rtol=1e-6, atol=0)
    assert losses[0].dtype == torch.float64 and all(one.dtype == dtype for one in results[0])
    assert max(map(distance, *results)) < 2 * EPSILON[dtype]


def test_gradients_of_a_large_vocabulary_do_not_vanish_in_fp16() -> None:
    hidden, weight = torch.zeros(1, 4, dtype=torch.float16), torch.ones(40_000, 4, dtype=torch.float16)
    weight.requires_grad_(), hidden.fill_(1.0).requires_grad_()
    cross_entropy(hidden, weight, torch.zeros(1, dtype=torch.int64))[0].mul(1024.0).backward()
    torch.testing.assert_close(weight.grad[1:].float(), torch.full((39_999, 4), 1024 / 40_000), rtol=1e-3, atol=0)


@every_dtype
@pytest.mark.parametrize("knobs", [dict(family="gpt2", dropout=0.1), dict(family="llama", kv_heads=2)], ids=str)
def test_a_models_loss_and_gradients_are_near_those_in_fp64(knobs: dict, dtype: torch.dtype) -> None:
    shape = ModelShape.of(ModelConfig(layers=2, width=64, heads=4, sequence=32, init_std=0.1, **knobs), 50)
    tokens = torch.randint(50, (8, 33), generator=torch.Generator().manual_seed(5))
    short = Transformer(shape).to(dtype)
    initialise(short, shape, seed=1)
    exact = Transformer(shape).double()
    exact.load_state_dict(short.state_dict())
    losses = []
    for model in (short, exact):
        loss, count = model.loss(tokens[:, :-1], tokens[:, 1:])
        (loss / count * 64).backward()
        losses.append(loss / count)
    torch.testing.assert_close(losses[0], losses[1], rtol=0.3 * EPSILON[dtype], atol=0)
    pairs = zip(short.parameters(), exact.parameters(), strict=True)
    off = [distance(one.grad, other.grad) for one, other in pairs if other.grad.norm() > 1e-9]
    assert len(off) >= 18 and max(off) < 10 * EPSILON[dtype]
