"""Every optimizer on real ranks: what their shards make together is what one rank has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import Config, OptimConfig
from hpctrain.optim.optimizers import OPTIMIZERS
from tests.contract.optimizer import SHAPES
from tests.support import shards
from tests.support.runs import job, shared_folder, small_config, whole, write_corpus

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


@pytest.mark.parametrize("case", CASES)
def test_a_run_may_change_its_ranks_and_what_they_share(
    case: str, comm: MPI.Comm, first: Callable[[int], MPI.Comm | None], tmp_path: Path
) -> None:
    """Three steps with all shared by four ranks, and three with the states shared by two, are six of one rank."""
    folder = shared_folder(comm, tmp_path)
    if comm.rank == 0:
        write_corpus(folder)
    comm.Barrier()
    knobs = [f"optim.{key}={value}" for key, value in CASES[case].items()]
    config = small_config(folder, "precision.compute=fp64", *knobs)
    expected = _run(config, MPI.COMM_SELF, range(6)) if comm.rank == 0 else {}
    comm.Barrier()
    _run(_sharing(config, 3), comm, range(3), save=True)
    part = first(2)
    found = _run(_sharing(config, 1), part, range(3, 6)) if part is not None else {}
    if comm.rank == 0:
        assert found.keys() == expected.keys()
        # Adafactor divides by the root of squares however small, so it enlarges what sums round differently.
        bound = 1e-8 if config.optim.kind == "adafactor" else 1e-10
        assert max(float((x - expected[name]).abs().max()) for name, x in found.items()) < bound


def _sharing(config: Config, stage: int) -> Config:
    return config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": stage})})


def _run(config: Config, part: MPI.Comm, steps: range, save: bool = False) -> dict[str, torch.Tensor]:
    """The weights after some steps of a run, saved, or gone on from what was saved; those of the first rank count."""
    with job(config, part) as (run, batches):
        checkpoint = Checkpoint(config.checkpoint, config.run.folder / "kept", run.plan.mesh, run.runner.group)
        if steps.start:
            assert checkpoint.resume(run.state) == steps.start
        for step in steps:
            run.step(step, batches)
        if save:
            checkpoint.save(steps.stop, run.state, {})
        return {name: x for name, x in whole(run).items() if name.startswith("model/")}


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
