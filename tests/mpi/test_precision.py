"""Low precision on many ranks: the run on one rank in the same precision, but for the order of sums."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.config import Config
from hpctrain.train import Job
from tests.support.runs import course, job, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
STEPS = 8
# Ranks sum gradients in another order. A sum that falls to the other side of the middle between two 16-bit numbers
# moves a weight's copy by a whole step of the format, so a few such are allowed for; one step of bf16 is 4e-3.
BOUND = 1e-4
# Each precision over more steps than test_parity takes, where it meets every recomputation, stage, model and optimizer.
CASES = {
    "bf16": ("precision.compute=bf16", "train.recompute=selective", "parallel.zero=2", "train.microbatch=1"),
    "fp16": ("precision.compute=fp16", "train.recompute=full", "parallel.zero=3", "model.dropout=0.1"),
    "fp8 tensor": ("precision.compute=bf16", "precision.fp8=tensor", "train.recompute=full", "parallel.zero=1"),
    "fp8 in fp32": ("precision.compute=fp32", "precision.fp8=block", "train.recompute=offload", "parallel.zero=2"),
}


def config_of(comm: MPI.Comm, folder: Path, *overrides: str) -> Config:
    if comm.rank == 0:
        write_corpus(folder)
    comm.Barrier()
    return small_config(shared_folder(comm, folder), "optim.rate=1e-3", *overrides)


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_many_ranks_is_near_the_run_on_one(case: str, comm: MPI.Comm, first: First, tmp_path: Path) -> None:
    config = config_of(comm, tmp_path, *CASES[case])
    expected = course(config, MPI.COMM_SELF, STEPS) if comm.rank == 0 else None
    comm.Barrier()
    found = {ranks: course(config, part, STEPS) if (part := first(ranks)) is not None else None for ranks in (2, 4)}
    if comm.rank == 0:
        assert max(difference(found[ranks], expected) for ranks in found) < BOUND


def test_recomputation_changes_no_bit_on_any_stage(comm: MPI.Comm, tmp_path: Path) -> None:
    told = []
    for kind in ("none", "full", "offload"):
        config = config_of(comm, tmp_path, "precision.compute=bf16", "parallel.zero=3", f"train.recompute={kind}")
        told.append(course(config, comm, 3)["loss and norm"])
    same = all(torch.equal(one, told[0]) for one in told)
    assert comm.allgather(same) == [True] * comm.size


def test_all_ranks_leave_out_the_same_steps(comm: MPI.Comm, tmp_path: Path) -> None:
    config = config_of(comm, tmp_path, "precision.compute=fp16", "precision.scale=2e9", "parallel.zero=1")
    with job(config, comm) as (run, batches):
        before = held(run)
        values, moved = [], []
        for step in range(STEPS * 3):
            values.append(run.step(step, batches))
            moved.append(not all(map(torch.equal, held(run), before)))
            before = held(run)
    left_out = [value["norm"] is None for value in values]
    scales = [value["scale"] for value in values]
    course_of_all = comm.allgather((left_out, scales, [value["loss"] for value in values]))
    assert all(other == course_of_all[0] for other in course_of_all)
    assert left_out[0] and not left_out[-1] and moved == [not out for out in left_out]
    assert [b / a for a, b in pairwise(scales)] == [0.5 if out else 1 for out in left_out[:-1]]


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_a_stopped_run_goes_on_bit_for_bit(compute: str, comm: MPI.Comm, tmp_path: Path) -> None:
    knobs = ("train.steps=12", f"precision.compute={compute}", "precision.scale=1e8", "precision.scale_interval=3")
    config = config_of(comm, tmp_path, *knobs, "parallel.zero=2")
    unbroken = losses(config, comm, 0, 12)
    assert losses(config, comm, 0, 7, save=True) + losses(config, comm, 7, 12) == unbroken


def test_a_checkpoint_of_bf16_is_one_of_fp32(comm: MPI.Comm, tmp_path: Path) -> None:
    config = config_of(comm, tmp_path, "train.steps=12", "precision.compute=bf16")
    unbroken = losses(config, comm, 0, 12)
    losses(config, comm, 0, 7, save=True)
    after = losses(config_of(comm, tmp_path, "train.steps=12", "parallel.zero=1"), comm, 7, 12)
    assert after == pytest.approx(unbroken[7:], rel=2e-3) and after != unbroken[7:]


def losses(config: Config, comm: MPI.Comm, start: int, stop: int, save: bool = False) -> list[float]:
    """The losses of steps ``start`` to ``stop``, from the newest checkpoint when ``start`` is not 0."""
    with job(config, comm) as (run, batches):
        checkpoint = Checkpoint(config.checkpoint, config.run.folder / "checkpoints", run.plan.mesh, run.runner.group)
        if start:
            assert checkpoint.resume(run.state) == start
        found = [run.step(step, batches)["loss"] for step in range(start, stop)]
        if save:
            checkpoint.save(stop, run.state, {"plan": run.plan.to_json()})
        return found


def held(run: Job) -> list[torch.Tensor]:
    """This rank's part of the weights and of the optimizer's states."""
    return [piece.tensor.clone() for name, piece in run.state.items() if name != "optim/scale"]


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of a loss or a norm, or the whole weights' in the Euclidean norm."""
    told = (found["loss and norm"] / expected["loss and norm"] - 1).abs().max()
    names = [name for name in expected if name.startswith("model/")]
    ours, theirs = (torch.cat([side[name] for name in names]) for side in (found, expected))
    assert ours.dtype == torch.float32
    return max(float(told), float((ours - theirs).norm() / theirs.norm()))
