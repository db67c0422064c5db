"""Copies of a model, each shared by some of eight ranks: their run is the run of one rank, and goes on as any other.

What the bounds are and why is told in ``tests.support.matrix``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.config import Config
from tests.support.matrix import knobs, name_of, on_one_rank, too_far
from tests.support.pairs import Row
from tests.support.runs import by_turns, course, job, shared_folder, small_config, whole, write_tokens

pytestmark = pytest.mark.mpi(min_size=8)

STEPS = 4
SIZES = ("model.width=32", "train.batch=24", "optim.rate=1e-3")  # three sequences a rank
NAMES = ("zero", "shard", "precision", "recompute", "optimizer", "microbatch", "states", "model", "dropout")
CASES = [
    (1, 2, "fp64", "selective", "adafactor", 2, "fp32", "llama", 0.1),
    (1, 4, "bf16", "none", "muon", 1, "fp32", "gpt2", 0.0),
    (2, 2, "fp16", "full", "adamw", 3, "bf16", "llama", 0.0),
    (2, 4, "fp64", "every:2", "adamw8bit", 2, "fp32", "gpt2", 0.1),
    (3, 2, "fp8 block", "offload", "adamw8bit", 1, "fp32", "gpt2", 0.0),
    (3, 2, "fp64", "none", "muon", 2, "fp32", "llama", 0.0),
    (3, 4, "fp32", "full", "adamw", 2, "fp32", "gpt2", 0.1),
]
ROWS: list[Row] = [dict(zip(NAMES, case, strict=True)) for case in CASES]
MOVES = [
    (("parallel.zero=3", "parallel.shard=2"), ("parallel.zero=3", "parallel.shard=4")),
    (("parallel.zero=2", "parallel.shard=4"), ("parallel.zero=0",)),
    (("parallel.zero=3",), ("parallel.zero=1", "parallel.shard=2")),
]


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("copies"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def alone(comm: MPI.Comm, folder: Path) -> Callable[[Row], dict[str, torch.Tensor]]:
    """The course of a row on one rank, told to all."""

    def make(row: Row) -> dict[str, torch.Tensor]:
        return course(on_one_rank(small_config(folder, *SIZES, *knobs(row))), MPI.COMM_SELF, STEPS)

    return by_turns(comm, ROWS, make)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_copies_shared_by_some_ranks_train_what_one_rank_trains(row: Row, comm: MPI.Comm, folder: Path, alone) -> None:
    found, expected = course(small_config(folder, *SIZES, *knobs(row)), comm, STEPS), alone(row)
    assert comm.allgather(too_far(found, expected, row)) == [{}] * comm.size


@pytest.mark.parametrize("move", MOVES, ids=str)
def test_copies_go_on_from_what_others_have_saved(move, comm: MPI.Comm, folder: Path, tmp_path: Path) -> None:
    kept = shared_folder(comm, tmp_path)
    configs = [small_config(folder, *SIZES, "precision.compute=fp64", *stage) for stage in move]
    saved, _ = _ran(configs[0], comm, kept, range(2))
    loaded, after = _ran(configs[1], comm, kept, range(2, STEPS))
    equal = saved.keys() == loaded.keys() and all(torch.equal(saved[name], loaded[name]) for name in saved)
    assert comm.allgather(equal) == [True] * comm.size
    unbroken = comm.bcast(course(on_one_rank(configs[0]), MPI.COMM_SELF, STEPS) if comm.rank == 0 else None)
    assert after == pytest.approx(unbroken["loss and norm"][2:, 0].tolist(), rel=1e-10, abs=0)


def _ran(config: Config, comm: MPI.Comm, kept: Path, steps: range) -> tuple[dict[str, torch.Tensor], list[float]]:
    """What is saved after the first steps, or was loaded before later ones, and the losses. Collective."""
    with job(config, comm) as (run, batches):
        point = Checkpoint(config.checkpoint, kept, run.plan.mesh, run.runner.group)
        if steps.start:
            for held in run.state.values():
                held.tensor.zero_()
            assert point.resume(run.state) == steps.start
            loaded = whole(run)
        losses = [run.step(step, batches)["loss"] for step in steps]
        if not steps.start:
            point.save(steps.stop, run.state, {})
            loaded = whole(run)
        return {name: flat.clone() for name, flat in loaded.items() if not name.startswith("gradient/")}, losses
