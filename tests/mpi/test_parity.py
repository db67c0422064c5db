"""Parity proves a parallelism: on any number of ranks a run has the losses, norms and weights of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mpi4py import MPI

from tests.support.runs import course, shared_folder, small_config, write_corpus

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
BOUND = {"fp64": 1e-10, "fp32": 1e-5}
CASES = {
    "plain": ("precision.compute=fp64",),
    # A gentle rate: Adam divides by small numbers, and what fp32 rounds differently grows with every step.
    "fp32": ("precision.compute=fp32", "train.microbatch=1", "optim.rate=1e-3"),
    "llama": ("model.family=llama", "model.kv_heads=2", "precision.compute=fp64", "train.microbatch=8"),
    "within documents": ("data.cross_documents=false", "precision.compute=fp64", "model.tied=false"),
    "dropout": ("model.dropout=0.2", "precision.compute=fp64", "train.microbatch=3"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_run_on_many_ranks_is_the_run_on_one(
    case: str, ranks: int, comm: MPI.Comm, first: First, tmp_path: Path
) -> None:
    config = small_config(shared_folder(comm, tmp_path), *CASES[case])
    if comm.rank == 0:
        write_corpus(tmp_path)
    expected = course(config, MPI.COMM_SELF, config.train.steps) if comm.rank == 0 else None
    comm.Barrier()
    part = first(ranks)
    found = course(config, part, config.train.steps) if part is not None else None
    if comm.rank == 0:
        assert difference(found, expected) < BOUND[config.precision.compute]


def test_all_ranks_have_bit_for_bit_the_same_weights(comm: MPI.Comm, tmp_path: Path) -> None:
    config = small_config(shared_folder(comm, tmp_path), "train.steps=3")
    if comm.rank == 0:
        write_corpus(tmp_path)
    comm.Barrier()
    weights = comm.allgather([flat.numpy().tobytes() for flat in course(config, comm, config.train.steps).values()])
    assert all(others == weights[0] for others in weights)


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest difference of any of the kinds of numbers, as a part of the largest of its kind."""
    assert found.keys() == expected.keys()
    kinds: dict[str, list[str]] = {}
    for name in expected:
        kinds.setdefault(name.rpartition("/")[0], []).append(name)
    pairs = [[torch.cat([side[n].view(-1) for n in names]) for side in (found, expected)] for names in kinds.values()]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
