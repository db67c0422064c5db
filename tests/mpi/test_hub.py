"""Weights that go out, come back and are trained on, by ranks over MPI."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.hub import bring, export
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig, parse
from tests.support.runs import job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mixtral"])
def test_a_run_that_starts_with_brought_weights_has_the_loss_that_they_had(
    family: str, comm: MPI.Comm, tmp_path: Path
) -> None:
    if comm.rank == 0:
        write_corpus(tmp_path)
    comm.Barrier()
    folder, group = shared_folder(comm, tmp_path), MpiGroup(comm)
    config = small_config(folder, f"model.family={family}", "precision.compute=fp64", "parallel.tp=2")
    with job(config, comm) as (run, batches):
        for step in range(5):
            run.step(step, batches)
        whole = Checkpoint(CheckpointConfig(), folder / "saved", run.plan.mesh, group)
        saved = whole.save(5, run.state, {"config": config.model_dump(mode="json")})
        expected = run.step(0, batches)["loss"]

    export(saved, folder / "hf", group, shard_bytes=20_000)
    bring(folder / "hf", folder / "back.h5", group)
    vocabulary = f"model.vocabulary={run.plan.shape.vocabulary}"
    other = parse(config.model_dump(), ("parallel.tp=1", "parallel.pp=2", "parallel.zero=1", vocabulary))
    with job(other, comm) as (run, batches):
        start = CheckpointConfig(start_from=str(folder / "back.h5"))
        assert Checkpoint(start, folder / "new", run.plan.mesh, group).resume(run.state) == 0
        assert run.step(0, batches)["loss"] == pytest.approx(expected, rel=1e-10)
    group.close()
