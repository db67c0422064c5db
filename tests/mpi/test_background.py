"""Runs that save in the background: they train the same, and their files are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.keep import file_name
from hpctrain.checkpoint.saver import Saver
from hpctrain.config import Config
from tests.support.runs import job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)
STEPS, EVERY, GO_ON = 12, 3, 6


@pytest.fixture
def config(comm: MPI.Comm, tmp_path: Path) -> Config:
    if comm.rank == 0:
        write_corpus(tmp_path)
    comm.Barrier()
    return small_config(shared_folder(comm, tmp_path), f"train.steps={STEPS}", f"checkpoint.every={EVERY}")


@pytest.mark.parametrize("zero", [0, 3])
def test_a_run_that_saves_in_the_background_has_the_losses_and_the_files_of_one_that_waits(
    config: Config, comm: MPI.Comm, zero: int
) -> None:
    config = config.model_copy(update={"parallel": config.parallel.model_copy(update={"zero": zero})})
    waited = _course(config, comm, "waited", False)
    behind = _course(config, comm, "behind", True)
    assert behind == waited
    for step in range(EVERY, STEPS + 1, EVERY):
        one, other = (config.run.folder / name / file_name(step) for name in ("waited", "behind"))
        assert one.read_bytes() == other.read_bytes()
    assert _course(config, comm, "behind", True, GO_ON) == waited[GO_ON:]


def _course(config: Config, comm: MPI.Comm, name: str, background: bool, start: int = 0) -> list[float]:
    """The losses of a run that keeps all its checkpoints; with ``start`` it goes on, as if there were no later ones."""
    knobs = config.checkpoint.model_copy(update={"background": background, "keep": 99, "sync": False})
    with job(config, comm) as (run, batches):
        folder, group = config.run.folder / name, run.runner.group
        if start and group.leads:
            for step in range(start + 1, STEPS + 1):
                (folder / file_name(step)).unlink(missing_ok=True)
        group.barrier()
        checkpoint = Checkpoint(knobs, folder, run.plan.mesh, group)
        assert checkpoint.resume(run.state) == start
        losses = []
        with Saver(checkpoint, run.state, {"plan": run.plan.to_json()}, lambda line: None) as saver:
            for step in range(start, STEPS):
                losses.append(run.step(step, batches)["loss"])
                saver.step(step + 1, last=step + 1 == STEPS)
        return losses
