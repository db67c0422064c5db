"""Adafactor against torch's own, under any cut."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from hpctrain.comm.group import SoloGroup
from hpctrain.config import OptimConfig
from hpctrain.optim.adafactor import Adafactor
from tests.contract.optimizer import SHAPES, OptimizerContract
from tests.support import shards

CONFIG = OptimConfig(kind="adafactor", decay=0.3)


class TestAdafactor(OptimizerContract):
    make = staticmethod(partial(Adafactor, config=CONFIG))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
@pytest.mark.parametrize("cuts", [(), (0.1, 0.35, 0.8)], ids=["one rank", "four ranks"])
def test_ten_updates_are_those_of_torch(dtype, bound, cuts):
    shapes = {name: shape for name, shape in SHAPES.items() if 0 not in shape}  # torch's divides by 0 rows
    weights = shards.random(shapes, 1, dtype)
    gradients = [shards.random(shapes, 2 + step, dtype) for step in range(10)]
    theirs = {name: x.clone().requires_grad_() for name, x in weights.items()}
    groups = [
        {"params": [x for x in theirs.values() if x.dim() > 1], "weight_decay": CONFIG.decay},
        {"params": [x for x in theirs.values() if x.dim() <= 1], "weight_decay": 0.0},
    ]
    reference = torch.optim.Adafactor(groups, lr=0.05, foreach=False)
    for now in gradients:
        for name, x in theirs.items():
            x.grad = now[name]
        reference.step()
    make = lambda flats, group: Adafactor(flats, CONFIG, group)  # noqa: E731
    found, states = shards.course(make, weights, gradients, cuts, rate=0.05)
    names = {"row": "row_var", "column": "col_var", "square": "variance"}
    for state, name, actual, expected in [
        *(("weight", name, found[name], x.detach()) for name, x in theirs.items()),
        *((s, n, x, reference.state[theirs[n]][names[s]]) for s, xs in states.items() for n, x in xs.items()),
    ]:
        difference = (actual - expected.reshape(actual.shape)).abs().max() / expected.abs().max()
        assert difference < bound, (state, name)


def test_states_are_few():
    weights = shards.random({"w": (300, 200), "stack": (4, 30, 20), "b": (10,)}, 1)
    states = Adafactor(shards.flats(weights, weights), CONFIG, SoloGroup()).states()
    sizes = {(name, one.parameter): tuple(one.tensor.shape) for name, parts in states.items() for one in parts}
    assert sizes == {
        ("row", "w"): (300,),
        ("column", "w"): (200,),
        ("row", "stack"): (4, 30),
        ("column", "stack"): (4, 20),
        ("square", "b"): (10,),
    }
