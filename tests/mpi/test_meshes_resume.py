"""What a run under one mesh has saved, a run under any other goes on from: equal bytes, and the losses of one rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.config import Config
from tests.support.legs import KINDS, leg
from tests.support.runs import shared_folder, small_config, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
PP2, DP2, TP2 = "parallel.pp=2", "parallel.dp=2", "parallel.tp=2"
MESHES: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "dp 4, zero 3": (4, ("parallel.zero=3",)),
    "tp 2": (2, (TP2,)),
    "tp 4, two copies of each key": (4, ("parallel.tp=4", "parallel.sequence=false")),
    "pp 2": (2, (PP2,)),
    "pp 4": (4, ("parallel.pp=4", "parallel.schedule=zb-h1")),
    "pp 2, interleaved": (2, (PP2, "parallel.schedule=interleaved")),
    "pp 2, folded, zero 3": (4, (PP2, "parallel.schedule=zb-v", DP2, "parallel.zero=3")),
    "pp 2 x tp 2": (4, (PP2, TP2)),
    "pp 2 x dp 2, zero 2": (4, (PP2, DP2, "parallel.zero=2", "parallel.layers_per_stage=[1,3]")),
    "dp 2 x tp 2, zero 1": (4, (DP2, TP2, "parallel.zero=1")),
    "dp 2 x tp 2, zero 3": (4, (DP2, TP2, "parallel.zero=3")),
}
# Odd sizes, so that pieces differ, and weights of 4096 elements and more, of which the 8-bit optimizer keeps codes.
MODEL = ("model.family=llama", "model.kv_heads=2", "model.tied=true", "model.layers=4", "model.width=32")
SIZES = ("model.mlp_width=85", "precision.compute=fp64", "train.batch=4", "train.microbatch=2", "optim.rate=1e-3",
         "log.peak_tflops=1")  # fmt: skip


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("meshes"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def saved(comm: MPI.Comm, first: First, folder: Path) -> dict[str, Path]:
    """A checkpoint of two steps under each mesh."""
    found = {name: folder / f"saved/{number}" for number, name in enumerate(MESHES)}
    for name, place in found.items():
        part = first(MESHES[name][0])
        if part is not None:
            with leg(config_of(folder, name), part) as one:
                one.losses(range(2))
                one.save(place, 2)
        comm.Barrier()
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_mesh_goes_on_from_what_any_mesh_has_saved(
    mesh: str, comm: MPI.Comm, first: First, folder: Path, saved: dict[str, Path], tmp_path: Path
) -> None:
    again, part = shared_folder(comm, tmp_path), first(MESHES[mesh][0])
    expected = _unbroken(config_of(folder, "one"), comm, range(4))[2:]
    found, equal = {}, {}
    if part is not None:
        with leg(config_of(folder, mesh), part) as one:
            for number, (source, place) in enumerate(saved.items()):
                equal[source] = one.same(place, again / str(number))
                found[source] = one.losses(range(2, 4))
    assert all(all(told.values()) for told in comm.allgather(equal))
    assert comm.bcast(len(equal)) == len(MESHES)
    for source, losses in found.items():
        assert losses == pytest.approx(expected, rel=1e-10, abs=0), source


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_goes_through_all_meshes_one_after_the_other(
    kind: str, comm: MPI.Comm, first: First, folder: Path, tmp_path: Path
) -> None:
    kept, (knobs, bound) = shared_folder(comm, tmp_path), KINDS[kind]
    found: list[float] = []
    for step, name in enumerate(MESHES):
        part = first(MESHES[name][0])
        if part is not None:
            with leg(config_of(folder, name, *knobs), part) as one:
                assert not step or one.same(kept / str(step), kept / "again")
                found += one.losses(range(step, step + 1))
                one.save(kept / str(step + 1), step + 1)
        comm.Barrier()
    expected = _unbroken(config_of(folder, "one", *knobs), comm, range(len(MESHES)))
    assert comm.bcast(found) == pytest.approx(expected, rel=bound, abs=0)


def config_of(folder: Path, mesh: str, *more: str) -> Config:
    """A run under a mesh."""
    return small_config(folder, *MODEL, *SIZES, *MESHES[mesh][1], *more)


def _unbroken(config: Config, comm: MPI.Comm, steps: range) -> list[float]:
    """The losses on one rank. Collective."""
    losses = None
    if comm.rank == 0:
        with leg(config, MPI.COMM_SELF) as one:
            losses = one.losses(steps)
    return comm.bcast(losses)
