"""Runs whose ranks are on their places by where they run, and not by their numbers: they train what one rank trains.

The four ranks of one machine are told that they are on several nodes, dealt out in turn or unevenly. Then the mesh has
an order, every group is made of other ranks, and what is cut, sent, gathered and saved has to follow it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI
from torch import Tensor

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.cluster.stop import Flag, listening
from hpctrain.cluster.world import World
from hpctrain.comm.groups import Groups
from hpctrain.config import CheckpointConfig, Config
from hpctrain.plan.plan import lay
from hpctrain.train import train
from tests.support.grids import STEPS, course
from tests.support.matrix import BOUNDS, distances, on_one_rank
from tests.support.runs import by_turns, job, shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

HOSTS = ("abab", "abba", "abbb")
RUNS = {
    "tp 2 x dp 2": ("parallel.tp=2", "parallel.zero=1"),
    "tp 2 x pp 2": ("parallel.tp=2", "parallel.pp=2", "parallel.schedule=interleaved", "model.layers=4"),
    "pp 2 x dp 2": ("parallel.pp=2", "parallel.zero=2", "parallel.schedule=zb-v", "model.layers=4"),
    "copies": ("parallel.zero=3", "parallel.shard=2"),
    "neighbours": ("parallel.zero=3", "parallel.near=2"),
    "copies of heads": ("parallel.tp=4", "model.family=llama", "model.kv_heads=2"),
}
CASES = [(run, hosts) for run in RUNS for hosts in HOSTS]


def config_of(folder: Path, run: str) -> Config:
    return small_config(folder, "precision.compute=fp64", "model.dropout=0.1", *RUNS[run])


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("placement"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def alone(comm: MPI.Comm, folder: Path) -> Callable[[str], dict[str, Tensor]]:
    """The course of a run on one rank, told to all."""

    def make(run: str) -> dict[str, Tensor]:
        return course(on_one_rank(config_of(folder, run)), MPI.COMM_SELF, STEPS, folder / f"one-{run}")

    return by_turns(comm, list(RUNS), make)


@pytest.mark.parametrize(("run", "hosts"), CASES)
def test_ranks_on_other_places_train_what_one_rank_trains(
    run: str, hosts: str, first: Callable, folder: Path, alone: Callable, tmp_path: Path, comm: MPI.Comm
) -> None:
    four, kept, expected = first(4), shared_folder(comm, tmp_path), alone(run)
    found = course(config_of(folder, run), four, STEPS, kept, hosts) if four is not None else expected
    far = {kind: size for kind, size in distances(found, expected).items() if size > BOUNDS["fp64"][0]}
    assert comm.allgather(far) == [{}] * comm.size


@pytest.mark.parametrize(("hosts", "orders"), [("abab", "0213"), ("abba", "0312"), ("aabb", "0123")])
def test_ranks_that_share_products_are_on_one_node(hosts: str, orders: str, first: Callable, folder: Path) -> None:
    four = first(4)
    if four is None:
        return
    config = small_config(folder, "train.batch=64", *RUNS["tp 2 x dp 2"])  # more tokens than weights
    with job(config, four, hosts) as (run, _):
        mesh = run.plan.mesh
        assert mesh.ranks(0, "dp", "tp") == tuple(map(int, orders))
        assert len({hosts[rank] for rank in mesh.ranks(four.rank, "tp")}) == 1
        assert run.plan.placement.reason.startswith("ranks along tp are on one node; ")


@pytest.mark.parametrize("other", ["aabb", "abba"])
@pytest.mark.parametrize("run", ["tp 2 x dp 2", "tp 2 x pp 2", "copies"])
def test_a_checkpoint_from_one_order_of_ranks_goes_on_in_another(
    run: str, other: str, first: Callable, folder: Path, alone: Callable, tmp_path: Path, comm: MPI.Comm
) -> None:
    four, kept, expected = first(4), shared_folder(comm, tmp_path), alone(run)
    losses = []
    if four is not None:
        config = config_of(folder, run)
        for step, hosts in enumerate(("abab", other)):
            losses.append(leg(config, four, hosts, step, kept))
    told = comm.bcast(losses)
    assert told == pytest.approx(expected["loss and norm"][:, 0].tolist(), rel=1e-10)


def leg(config: Config, comm: MPI.Comm, hosts: str, step: int, folder: Path) -> float:
    """The loss of one step, before which a checkpoint is read, and after which one is written. Collective."""
    world = World.of(comm, host=hosts[comm.rank])
    groups = Groups.open(lay(config, world.topology), world)
    with job(config, comm, hosts) as (run, batches):
        point = Checkpoint(CheckpointConfig(sync=False), folder, run.plan.mesh, groups.whole)
        if step:
            for held in run.state.values():
                held.tensor.zero_()
        assert point.resume(run.state) == step
        loss = run.step(step, batches)["loss"]
        point.save(step + 1, run.state, {})
        groups.close()
        return loss


def test_a_whole_run_saves_and_goes_on_on_other_places(first: Callable, folder: Path, tmp_path: Path, comm) -> None:
    """The trainer itself, with its own groups: what it wrote under one order it reads under another."""
    four, kept = first(4), shared_folder(comm, tmp_path)
    if four is None:
        return
    for steps, hosts in ((2, "abab"), (4, "abba"), (5, "aabb")):
        more = (f"train.steps={steps}", f'run.dir="{kept}"', "parallel.tp=2", "parallel.zero=1", "optim.shape=constant")
        config = small_config(folder, *more, "precision.compute=fp64")
        assert trained(config, World.of(four, config.comm, hosts[four.rank])) == 0
    straight = small_config(
        folder, "train.steps=5", f'run.dir="{kept}/straight"', "optim.shape=constant", "precision.compute=fp64"
    )
    if four.rank == 0:
        assert trained(straight, World.of(MPI.COMM_SELF)) == 0
    four.Barrier()
    ours, one = (losses(path) for path in (kept, kept / "straight"))
    assert list(ours) == list(one) == [1, 2, 3, 4, 5]
    assert ours == pytest.approx(one, rel=1e-10)


def trained(config: Config, world: World) -> int:
    """The exit status of a run that nobody stops. Collective."""
    flag = Flag(())
    try:
        with listening(config.run, world, flag) as stop:
            return train(config, world, stop)
    finally:
        flag.restore()


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step, from a run's log."""
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
