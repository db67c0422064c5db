"""Parity of tensor, sequence and pipeline parallelism, beside ZeRO and all else that is to choose.

Any two choices meet in some run, on two or four ranks, and it has the losses, norms, validation losses, gradients,
states and weights of one rank. What the bounds are is told in ``tests.support.matrix``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from tests.support.grids import ROUNDINGS, ROWS, SIZES, STEPS, course, knobs, ranks_of
from tests.support.matrix import name_of, on_one_rank, too_far
from tests.support.pairs import Row
from tests.support.runs import by_turns, shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
Course = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("grids"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def alone(comm: MPI.Comm, folder: Path) -> Callable[[Row], Course]:
    """The course of a row on one rank, told to all."""

    def make(row: Row) -> Course:
        config = on_one_rank(small_config(folder, *SIZES, *knobs(row)))
        return course(config, MPI.COMM_SELF, STEPS, folder / f"one-{ROWS.index(row)}")

    return by_turns(comm, ROWS, make)


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_any_two_choices_together_train_what_one_rank_trains(
    row: Row, comm: MPI.Comm, first: First, folder: Path, alone: Callable[[Row], Course], tmp_path: Path
) -> None:
    config, part = small_config(folder, *SIZES, *knobs(row)), first(ranks_of(row))
    kept = shared_folder(comm, tmp_path)
    expected = alone(row)
    found = course(config, part, STEPS, kept / "many") if part is not None else None
    far = too_far(found, expected, row, ROUNDINGS) if found else {}
    assert comm.allgather(far) == [{}] * comm.size
