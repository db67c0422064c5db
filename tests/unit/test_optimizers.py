"""What is true of all optimizers: the configuration names them, and how much they work on at once is no matter."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hpctrain.config import OptimConfig
from hpctrain.optim import optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from tests.contract.optimizer import SHAPES
from tests.support import shards

CASES = {**{kind: {"kind": kind} for kind in OPTIMIZERS}, "adamw in bf16": {"states": "bf16"}}


def test_every_kind_of_the_configuration_has_its_optimizer():
    assert tuple(OPTIMIZERS) == get_args(OptimConfig.model_fields["kind"].annotation)


@pytest.mark.parametrize("cuts", [(), (0.3, 0.61)], ids=["one rank", "three ranks"])
@pytest.mark.parametrize("case", CASES)
def test_a_parameter_may_be_worked_on_in_many_small_chunks(case, cuts, monkeypatch):
    config = OptimConfig(**CASES[case])
    weights = shards.random(SHAPES, 1)
    gradients = [shards.random(SHAPES, 2 + step) for step in range(3)]
    make = lambda flats, group: OPTIMIZERS[config.kind](flats, config, group)  # noqa: E731
    expected = shards.course(make, weights, gradients)
    monkeypatch.setitem(optimizer.CHUNKS, "cpu", 512)
    found = shards.course(make, weights, gradients, cuts)
    for name, x in expected[0].items():
        torch.testing.assert_close(found[0][name], x, rtol=1e-12, atol=1e-12)
    for state, parts in expected[1].items():
        for name, x in parts.items():
            torch.testing.assert_close(found[1][state][name], x, rtol=1e-12, atol=1e-12)
