"""Parity proves a parallelism: any number of ranks have the losses, norms, gradients, states and weights of one rank.

The matrix has every two choices of precision, recomputation, stage, optimizer, micro-batches, model and dropout
together in some run. What its bounds are and why is told in ``tests.support.matrix``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from tests.support.matrix import ROWS, knobs, name_of, on_one_rank, too_far
from tests.support.pairs import Row
from tests.support.runs import by_turns, course, difference, shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
Course = dict[str, torch.Tensor]
Run = tuple[tuple[str, ...], int]
STEPS, LONG = 4, 20
# A gentle rate: Adam divides by small numbers, and what fp32 rounds differently grows with every step.
SIZES = ("model.width=32", "train.batch=16", "optim.rate=1e-3")
BOUND = {"fp64": 1e-10, "fp32": 1e-5}
CASES = {
    "twenty steps": ("precision.compute=fp32", "train.microbatch=1", "optim.rate=1e-3"),
    "within documents": ("data.cross_documents=false", "precision.compute=fp64", "model.tied=false"),
}
RUNS: list[Run] = [((*SIZES, *knobs(row)), STEPS) for row in ROWS] + [(case, LONG) for case in CASES.values()]


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the text is, and the tokens that are made of it: here already, since runs go on beside each other."""
    folder = shared_folder(comm, tmp_path_factory.mktemp("parity"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def alone(comm: MPI.Comm, folder: Path) -> Callable[[Run], Course]:
    """The course of a run on one rank, told to all."""

    def make(run: Run) -> Course:
        return course(on_one_rank(small_config(folder, *run[0])), MPI.COMM_SELF, run[1])

    return by_turns(comm, RUNS, make)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_any_two_choices_together_train_what_one_rank_trains(
    row: Row, ranks: int, comm: MPI.Comm, first: First, folder: Path, alone
) -> None:
    run, part = RUNS[ROWS.index(row)], first(ranks)
    expected = alone(run)
    found = course(small_config(folder, *run[0]), part, STEPS) if part is not None else None
    assert comm.allgather(too_far(found, expected, row) if found else {}) == [{}] * comm.size


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_a_run_on_many_ranks_is_the_run_on_one(
    case: str, ranks: int, comm: MPI.Comm, first: First, folder: Path, alone
) -> None:
    config, part = small_config(folder, *CASES[case]), first(ranks)
    expected = alone((CASES[case], LONG))
    found = course(config, part, LONG) if part is not None else None
    far = difference(found, expected) if found else 0.0
    assert max(comm.allgather(far)) < BOUND[config.precision.compute]


def test_all_ranks_have_bit_for_bit_the_same_weights(comm: MPI.Comm, folder: Path) -> None:
    config = small_config(folder, "train.steps=3")
    weights = comm.allgather([flat.numpy().tobytes() for flat in course(config, comm, config.train.steps).values()])
    assert all(others == weights[0] for others in weights)
