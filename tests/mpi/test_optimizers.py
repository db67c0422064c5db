"""Every optimizer on real ranks: what their shards make together is what one rank has."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from mpi4py import MPI

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import OptimConfig
from hpctrain.optim.optimizers import OPTIMIZERS
from tests.contract.optimizer import SHAPES
from tests.support import shards

pytestmark = pytest.mark.mpi(min_size=4)

CASES = {**{kind: {"kind": kind} for kind in OPTIMIZERS}, "adamw in bf16": {"states": "bf16"}}
EDGES = {2: (0.0, 0.37, 1.0), 4: (0.0, 0.11, 0.11, 0.8, 1.0)}  # of the parts of each rank; one has nothing


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", EDGES)
def test_shards_on_many_ranks_are_what_one_rank_has(
    case: str, ranks: int, comm: MPI.Comm, first: Callable[[int], MPI.Comm | None]
) -> None:
    config = OptimConfig(**CASES[case])
    part, worst = first(ranks), 0.0
    if part is not None:
        group = MpiGroup(part)
        found = _course(config, group, EDGES[ranks][group.rank : group.rank + 2])
        whole = dict((name, x) for name, _, x in _course(config, SoloGroup(), (0.0, 1.0)))
        group.close()
        for name, start, x in found:
            expected = whole[name][start : start + x.numel()]
            worst = max([worst, *(x - expected).abs().tolist()])  # the weights are numbers around 1
    assert max(comm.allgather(worst)) < 1e-12


def _course(config: OptimConfig, group: Group, part: tuple[float, float]) -> list[tuple[str, int, torch.Tensor]]:
    """This rank's weights after five updates: name, first element, elements."""
    weights = shards.random(SHAPES, 1)
    flats = shards.flats(weights, weights, part)
    optimizer = OPTIMIZERS[config.kind](flats, config, group, seed=3)
    for step in range(5):
        for flat, now in zip(flats, shards.flats(weights, shards.random(SHAPES, 2 + step), part), strict=True):
            flat.gradient.copy_(now.gradient)
        optimizer.update(0.01, step)
    return shards.own_parameters(flats)
