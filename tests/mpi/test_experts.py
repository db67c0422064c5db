"""Experts under any product of parallelism: what one rank trains, and each other's checkpoints.

Which experts a token goes to is a choice between numbers that may lie close together. In fp64 and fp32 the order of
sums hardly ever decides it. In shorter formats it may, and one token with another expert is more than a rounding; so
there each token goes to all experts, and there is nothing to balance.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.config import Config
from tests.support.grids import MESHES, ROUNDINGS, SCHEDULES, SIZES, course, meshed, stages
from tests.support.legs import leg
from tests.support.matrix import PRECISIONS, on_one_rank, too_far
from tests.support.pairs import Row
from tests.support.runs import shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
EXPERTS = ("model.family=mixtral", "model.experts=4", "model.kv_heads=2", "model.mlp_width=24")
CHOSEN = {True: ("model.balance_loss=0.5",), False: ("model.experts_per_token=4", "model.balance_loss=0")}
# Mesh, schedule, stage of ZeRO, precision, optimizer, recomputation, and whether ranks along tp share the tokens.
CASES = [
    ("tp 4", "1f1b", 0, "fp64", "muon", "none", True),
    ("pp 2 x tp 2", "zb-h1", 0, "fp64", "adamw", "none", True),
    ("pp 2 x tp 2", "zb-v", 0, "fp64", "adafactor", "every:2", False),
    ("dp 2 x tp 2", "1f1b", 3, "fp64", "muon", "full", True),
    ("dp 2 x tp 2", "1f1b", 1, "fp32", "adamw8bit", "offload", True),
    ("pp 2 x dp 2", "interleaved", 2, "fp64", "muon", "selective", True),
    ("pp 4", "dualpipe-v", 0, "fp64", "adamw", "full", True),
    ("dp 2 x tp 2", "1f1b", 3, "bf16", "adamw", "none", True),
    ("pp 2 x tp 2", "zb-h2", 0, "fp8 tensor", "muon", "none", True),
]


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("experts"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


def config_of(folder: Path, *case: object) -> Config:
    mesh, schedule, zero, precision, optimizer, recompute, sequence = case
    layers = max(2, stages(MESHES[mesh], schedule))
    return small_config(
        folder, *SIZES, *EXPERTS, *meshed(MESHES[mesh]), *SCHEDULES[schedule], *PRECISIONS[precision],
        *CHOSEN[precision in ("fp64", "fp32")], f"parallel.zero={zero}", f"optim.kind={optimizer}",
        f"train.recompute={recompute}", f"parallel.sequence={str(sequence).lower()}", f"model.layers={layers}",
        "train.microbatch=3",
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_experts_train_what_one_rank_trains(case: tuple, comm: MPI.Comm, folder: Path, tmp_path: Path) -> None:
    config, kept = config_of(folder, *case), shared_folder(comm, tmp_path)
    row: Row = {"precision": case[3], "optimizer": case[4]}
    found = course(config, comm, 2, kept / "many")
    far = {}
    if comm.rank == 0:
        far = too_far(found, course(on_one_rank(config), MPI.COMM_SELF, 2, kept / "one"), row, ROUNDINGS)
    assert comm.bcast(far) == {}


def test_a_run_of_experts_goes_from_mesh_to_mesh(comm: MPI.Comm, first: First, folder: Path, tmp_path: Path) -> None:
    kept = shared_folder(comm, tmp_path)
    cases = [case for case in CASES if case[3] == "fp64" and case[4] == "muon"] + [CASES[0]]
    configs = [config_of(folder, *case) for case in cases]
    configs = [one.model_copy(update={"model": configs[0].model.model_copy(update={"layers": 4})}) for one in configs]
    found: list[float] = []
    for step, config in enumerate(configs):
        with leg(config, comm) as one:
            assert not step or one.same(kept / str(step), kept / "again")
            found += one.losses(range(step, step + 1))
            one.save(kept / str(step + 1), step + 1)
    expected = []
    if comm.rank == 0:
        with leg(on_one_rank(configs[0]), MPI.COMM_SELF) as one:
            expected = one.losses(range(len(configs)))
    assert found == pytest.approx(comm.bcast(expected), rel=1e-10, abs=0)
