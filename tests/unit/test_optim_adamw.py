"""AdamW against torch's own, under any cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.optim import adamw
from hpctrain.optim.adamw import AdamW
from tests.contract.optimizer import SHAPES, OptimizerContract
from tests.support import shards

CONFIG = OptimConfig(beta1=0.8, beta2=0.97, epsilon=1e-6, decay=0.3)


class TestAdamW(OptimizerContract):
    make = staticmethod(partial(AdamW, config=CONFIG))


class TestAdamWWithStatesInBf16(OptimizerContract):
    make = staticmethod(partial(AdamW, config=CONFIG.model_copy(update={"states": "bf16"})))
    bounds = {torch.float32: 0.0, torch.float64: 0.0}


@pytest.mark.parametrize("update", [adamw.UPDATE, adamw.plain], ids=["fused", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_updates_are_those_of_torch(update, dtype, monkeypatch):
    monkeypatch.setattr(adamw, "UPDATE", update)
    weights = shards.random(SHAPES, 1, dtype)
    gradients = [shards.random(SHAPES, 2 + step, dtype) for step in range(10)]
    theirs = {name: x.clone().requires_grad_() for name, x in weights.items()}
    groups = [
        {"params": [x for x in theirs.values() if x.dim() > 1], "weight_decay": CONFIG.decay},
        {"params": [x for x in theirs.values() if x.dim() <= 1], "weight_decay": 0.0},
    ]
    betas = (CONFIG.beta1, CONFIG.beta2)
    reference = torch.optim.AdamW(groups, lr=0.01, betas=betas, eps=CONFIG.epsilon, foreach=False)
    for now in gradients:
        for name, x in theirs.items():
            x.grad = now[name]
        reference.step()
    found, states = shards.course(lambda flats, group: AdamW(flats, CONFIG, group), weights, gradients)
    tolerance = 1e-12 if dtype == torch.float64 else 2e-5
    for name, x in theirs.items():
        pairs = [(found[name], x.detach()), *((states[key][name], reference.state[x][key]) for key in states)]
        for actual, expected in pairs:
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_the_states_are_views_of_what_the_updates_use():
    weights = shards.random(SHAPES, 1)
    optimizer = AdamW(shards.flats(weights, weights), CONFIG, SoloGroup())
    for parts in optimizer.states().values():
        for part in parts:
            part.tensor.fill_(3.0)
    assert all((x == 3).all() for x in (*optimizer.exp_avg, *optimizer.exp_avg_sq))
