"""Eight ranks on unlike nodes, or dealt out in turn: laid by where they are, they train what one rank trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI
from torch import Tensor

from hpctrain.config import Config
from tests.support.grids import STEPS, course
from tests.support.matrix import BOUNDS, distances, on_one_rank
from tests.support.runs import by_turns, job, shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=8)

RUNS = {
    "all three": ("parallel.pp=2", "parallel.tp=2", "parallel.zero=1", "model.layers=4"),
    "neighbours in copies": ("parallel.zero=3", "parallel.shard=4", "parallel.near=2"),
    "copies and products": ("parallel.tp=2", "parallel.zero=2", "parallel.shard=2"),
}
HOSTS = ("aaaaabbb", "abababab", "abcabcab")


def config_of(folder: Path, run: str) -> Config:
    return small_config(folder, "train.batch=16", "precision.compute=fp64", "model.dropout=0.1", *RUNS[run])


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


@pytest.mark.parametrize("hosts", HOSTS)
@pytest.mark.parametrize("run", RUNS)
def test_ranks_on_uneven_nodes_train_what_one_rank_trains(
    run: str, hosts: str, comm: MPI.Comm, folder: Path, alone: Callable, tmp_path: Path
) -> None:
    found = course(config_of(folder, run), comm, STEPS, shared_folder(comm, tmp_path), hosts)
    far = {kind: size for kind, size in distances(found, alone(run)).items() if size > BOUNDS["fp64"][0]}
    assert comm.allgather(far) == [{}] * comm.size


@pytest.mark.parametrize(("hosts", "together"), [("aaaaabbb", 3), ("abababab", 4), ("abcabcab", 3)])
def test_as_many_pairs_are_on_one_node_as_can_be(hosts: str, together: int, comm: MPI.Comm, folder: Path) -> None:
    config = small_config(folder, "train.batch=64", "parallel.tp=2")  # more tokens than weights
    with job(config, comm, hosts) as (run, _):
        pairs = run.plan.mesh.groups("tp")
        assert sum(hosts[a] == hosts[b] for a, b in pairs) == together
