"""The copies that real runs make of what they save have the bytes that the plan tells, whatever the optimizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.checkpoint.state import agree
from hpctrain.comm.mpi import MpiGroup
from hpctrain.plan.saved import COPY
from tests.support.runs import job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)
RUNS = {
    "adamw": ["parallel.zero=1"],
    "adamw in pairs": ["parallel.zero=3", "parallel.shard=2", "precision.compute=bf16", "optim.states=bf16"],
    "adafactor": ["optim.kind=adafactor", "parallel.zero=2"],
    "adamw8bit": ["optim.kind=adamw8bit", "parallel.zero=1", "model.width=64"],
    "muon by tp": ["optim.kind=muon", "parallel.tp=2"],
    "stages": ["parallel.pp=2", "model.tied=false"],
    "stages by tp": ["parallel.pp=2", "parallel.tp=2", "model.tied=false"],
}


@pytest.mark.parametrize("overrides", RUNS.values(), ids=RUNS)
def test_the_copies_of_all_ranks_have_the_bytes_that_the_plan_tells(
    comm: MPI.Comm, tmp_path: Path, overrides: list[str]
) -> None:
    if comm.rank == 0:
        write_corpus(tmp_path)
    comm.Barrier()
    group = MpiGroup(comm, timeout_seconds=60)
    with job(small_config(shared_folder(comm, tmp_path), "checkpoint.every=1", *overrides), comm) as (run, _):
        mesh = run.plan.mesh
        copy = Snapshot(agree(run.state, mesh, group), group)
        copy.take(run.state, "copying")
    sizes = comm.allgather(copy._memory.numel())
    group.close()
    stages = range(mesh.size("pp"))
    parts = [sum(size for rank, size in enumerate(sizes) if mesh.index(rank, "pp") == stage) for stage in stages]
    assert run.plan.host[COPY] == -(-max(parts) * len(stages) // comm.size)
