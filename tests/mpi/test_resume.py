"""A run that was stopped goes on as if it never had been, also on another number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.config import Config
from tests.support.runs import job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
STOP, STEPS = 30, 36


@pytest.fixture
def config(comm: MPI.Comm, tmp_path: Path) -> Config:
    if comm.rank == 0:
        write_corpus(tmp_path)
    comm.Barrier()
    return small_config(shared_folder(comm, tmp_path), f"train.steps={STEPS}", "model.dropout=0.1")


@pytest.mark.parametrize("writer", ["direct", "mpio"])
def test_a_stopped_run_goes_on_bit_for_bit(writer: str, config: Config, comm: MPI.Comm) -> None:
    config = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"writer": writer})})
    unbroken = _losses(config, comm, 0, STEPS)
    before = _losses(config, comm, 0, STOP, save=True)
    after = _losses(config, comm, STOP, STEPS)
    assert before + after == unbroken


@pytest.mark.parametrize("ranks", [2, 1])
def test_a_run_of_four_ranks_goes_on_with_fewer(ranks: int, config: Config, comm: MPI.Comm, first: First) -> None:
    config = config.model_copy(update={"precision": config.precision.model_copy(update={"compute": "fp64"})})
    unbroken = _losses(config, comm, 0, STEPS)
    _losses(config, comm, 0, STOP, save=True)
    part = first(ranks)
    after = _losses(config, part, STOP, STEPS) if part is not None else unbroken[STOP:]
    assert after == pytest.approx(unbroken[STOP:], rel=1e-10)


def _losses(config: Config, comm: MPI.Comm, start: int, stop: int, save: bool = False) -> list[float]:
    """The losses of steps ``start`` to ``stop``, from the newest checkpoint when ``start`` is not 0."""
    with job(config, comm) as (run, batches):
        checkpoint = Checkpoint(config.checkpoint, config.run.folder / "checkpoints", run.plan.mesh, run.runner.group)
        if start:
            assert checkpoint.resume(run.state) == start
        losses = [run.step(step, batches)["loss"] for step in range(start, stop)]
        if save:
            checkpoint.save(stop, run.state, {"plan": run.plan.to_json()})
        return losses
