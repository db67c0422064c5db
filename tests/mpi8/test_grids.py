"""Every way to split eight ranks into pipeline, data and tensor parallelism, and checkpoints from one to the next.

Each trains what one rank trains; what the bounds are is told in ``tests.support.matrix``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI
from torch import Tensor

from hpctrain.config import Config
from hpctrain.schedule.kinds import SCHEDULES
from tests.support.grids import ROUNDINGS, SIZES, STEPS, course, meshed
from tests.support.legs import leg
from tests.support.matrix import PRECISIONS, on_one_rank, too_far
from tests.support.runs import by_turns, shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=8)

SPLITS = [(pp, 8 // pp // tp, tp) for pp in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if pp * tp <= 8]
TINY = ("model.heads=8",)
LLAMA = ("model.family=llama", "model.heads=8", "model.kv_heads=2", "model.mlp_width=85")
# Schedule, stage of ZeRO, precision and optimizer for the splits in turn: of a tiny GPT-2, and of a Llama.
TURNS = {
    "tiny": [(1, "fp64", "adamw"), (2, "fp32", "muon"), (3, "bf16", "adafactor"), (0, "fp16", "adamw")],
    "llama": [(3, "fp64", "muon"), (0, "fp32", "adamw8bit"), (2, "fp64", "adafactor")],
}
MODELS = {"tiny": TINY, "llama": LLAMA}
Case = tuple[str, int, int, int]
CASES: list[Case] = [(model, *split) for model in MODELS for split in SPLITS]


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("grids"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


def row_of(model: str, pp: int, dp: int, tp: int) -> dict[str, Any]:
    """What a split of a model is tried with; models have four layers, or as many as there are stages."""
    turn = CASES.index((model, pp, dp, tp))
    zero, precision, optimizer = TURNS[model][turn % len(TURNS[model])]
    fitting = [name for name, kind in SCHEDULES.items() if pp * kind.usual_chunks <= 8]
    return dict(zero=zero, precision=precision, optimizer=optimizer, schedule=fitting[turn % len(fitting)])


def knobs(model: str, pp: int, dp: int, tp: int) -> tuple[str, ...]:
    """A split of a model as overrides."""
    row = row_of(model, pp, dp, tp)
    layers = max(4, pp * SCHEDULES[row["schedule"]].usual_chunks if pp > 1 else 1)
    chosen = (f"parallel.schedule={row['schedule']}",) if pp > 1 else ()
    more = (f"parallel.zero={row['zero']}", f"optim.kind={row['optimizer']}", f"model.layers={layers}")
    return (*SIZES, *MODELS[model], *meshed((pp, dp, tp)), *chosen, *PRECISIONS[row["precision"]], *more)


def config_of(folder: Path, case: Case) -> Config:
    return small_config(folder, *knobs(*case), "train.batch=16", "train.microbatch=3", "model.dropout=0.1")


@pytest.fixture(scope="module")
def alone(comm: MPI.Comm, folder: Path) -> Callable[[Case], dict[str, Tensor]]:
    """The course of a case on one rank, told to all."""

    def make(case: Case) -> dict[str, Tensor]:
        kept = folder / f"one-{CASES.index(case)}"
        return course(on_one_rank(config_of(folder, case)), MPI.COMM_SELF, STEPS, kept)

    return by_turns(comm, CASES, make)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_split_of_eight_ranks_trains_what_one_rank_trains(
    case: Case, comm: MPI.Comm, folder: Path, alone: Callable[[Case], dict[str, Tensor]], tmp_path: Path
) -> None:
    found = course(config_of(folder, case), comm, STEPS, shared_folder(comm, tmp_path))
    assert comm.allgather(too_far(found, alone(case), row_of(*case), ROUNDINGS)) == [{}] * comm.size


MESHES = [
    (*meshed((2, 2, 2)), "parallel.zero=1"),
    (*meshed((1, 1, 8)), "parallel.sequence=false"),
    (*meshed((8, 1, 1)), "parallel.schedule=zb-h2"),
    (*meshed((1, 8, 1)), "parallel.zero=3"),
    (*meshed((4, 1, 2)), "parallel.schedule=interleaved"),
    (*meshed((1, 2, 4)), "parallel.zero=2"),
    (*meshed((2, 4, 1)), "parallel.zero=3", "parallel.shard=2", "parallel.schedule=dualpipe-v"),
]


@pytest.mark.parametrize("kind", ["muon", "adamw8bit"])
def test_a_run_goes_through_meshes_of_eight_ranks_one_after_the_other(
    kind: str, comm: MPI.Comm, folder: Path, tmp_path: Path
) -> None:
    kept, found = shared_folder(comm, tmp_path), []
    own = (*SIZES, *LLAMA, "train.batch=8", "precision.compute=fp64", "model.layers=8", f"optim.kind={kind}")
    for step, mesh in enumerate(MESHES):
        with leg(small_config(folder, *own, *mesh), comm) as one:
            assert not step or one.same(kept / str(step), kept / "again")
            found += one.losses(range(step, step + 1))
            one.save(kept / str(step + 1), step + 1)
    expected = None
    if comm.rank == 0:
        with leg(small_config(folder, *own), MPI.COMM_SELF) as one:
            expected = one.losses(range(len(MESHES)))
    assert found == pytest.approx(comm.bcast(expected), rel=1e-10, abs=0)
