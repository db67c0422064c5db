"""What is true of all optimizers: the configuration names them, and how much they work on at once is no matter."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from hpctrain.comm.group import Group
from hpctrain.config import OptimConfig
from hpctrain.optim import optimizer
from hpctrain.optim.optimizers import OPTIMIZERS
from hpctrain.plan.states import state_bytes
from hpctrain.plan.units import Member, arrange
from tests.contract.optimizer import SHAPES
from tests.support import shards, threads

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


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_plan_knows_the_bytes_of_the_states(case, ranks):
    config = OptimConfig(**CASES[case])
    weights = {name: x for name, x in shards.random(SHAPES, 1, torch.float32).items() if x.numel()}
    (unit,) = arrange(Member(name, tuple(x.shape), True, "float32", "all", False) for name, x in weights.items())

    def held(group: Group) -> int:
        first, last = unit.interval(ranks, group.rank)
        whole = shards.flat(weights, weights, (first / unit.total, last / unit.total))
        states = OPTIMIZERS[config.kind]([whole], config, group).states()
        return sum(one.tensor.nbytes for parts in states.values() for one in parts)

    planned = [state_bytes([unit], ranks, rank, config, "float32") for rank in range(ranks)]
    assert threads.run(ranks, held) == planned
