"""What a run under one stage of sharing has saved, a run under any other goes on from: equal bits, and equal losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations_with_replacement, permutations
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.config import Config
from hpctrain.train import Job
from tests.support.runs import job, shared_folder, small_config, whole, write_tokens

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
STAGES = {
    "0": ("parallel.zero=0",),
    "1": ("parallel.zero=1",),
    "2": ("parallel.zero=2",),
    "3": ("parallel.zero=3",),
    "hybrid": ("parallel.zero=3", "parallel.shard=2"),
}
# What else a checkpoint holds: each pair of stages has the next of these.
KINDS = {
    "adamw": (),
    "adamw in bf16": ("optim.states=bf16",),
    "adafactor": ("optim.kind=adafactor",),
    "adamw8bit": ("optim.kind=adamw8bit",),
    "muon": ("optim.kind=muon", "model.family=llama", "model.kv_heads=2"),
    "fp16": ("precision.compute=fp16", "precision.scale=1024", "precision.scale_interval=2"),
}
# Of fp64 the last bits differ, by the order of sums; Adafactor divides by the root of squares however small, so it
# enlarges them. Of fp16 see tests.support.matrix.
BOUNDS = {"fp16": 1e-4, "adafactor": 1e-8}


def cases(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """The pairs of stages, each with a kind of states."""
    return [(*pair, list(KINDS)[turn % len(KINDS)]) for turn, pair in enumerate(pairs)]


class Leg(NamedTuple):
    """A part of a run: on so many ranks, under a stage, from one step to another."""

    ranks: int
    stage: str
    start: int
    stop: int


@pytest.fixture(scope="module")
def folder(comm: MPI.Comm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shared_folder(comm, tmp_path_factory.mktemp("stages"))
    if comm.rank == 0:
        write_tokens(folder)
    comm.Barrier()
    return folder


@pytest.fixture(scope="module")
def unbroken(comm: MPI.Comm, folder: Path) -> Callable[[str], list[float]]:
    """The losses of a run on one rank that was never interrupted; the last rank makes each once, and tells them."""
    known: dict[str, list[float]] = {}

    def of(kind: str) -> list[float]:
        if kind not in known:
            last = comm.size - 1
            leg = Leg(1, "0", 0, 6)
            mine = ran(config_of(folder, kind, "0"), MPI.COMM_SELF, leg)[0] if comm.rank == last else None
            known[kind] = comm.bcast(mine, last)
        return known[kind]

    return of


@pytest.mark.parametrize(("stage", "other", "kind"), cases(combinations_with_replacement(STAGES, 2)))
def test_any_stage_goes_on_from_any_other_on_four_two_and_one_ranks(
    stage: str, other: str, kind: str, comm: MPI.Comm, first: First, folder: Path, unbroken, tmp_path: Path
) -> None:
    """Four ranks take two steps under a stage, two go on under another, and one ends it under the first again."""
    kept = shared_folder(comm, tmp_path)
    losses, saved, equal = [], None, []
    for leg in (Leg(4, stage, 0, 2), Leg(2, other, 2, 4), Leg(1, stage, 4, 6)):
        part = first(leg.ranks)
        if part is not None:
            config = config_of(folder, kind, leg.stage if leg.ranks > 1 else leg.stage.replace("hybrid", "3"))
            found, loaded, at_end = ran(config, part, leg, kept)
            equal += [same(loaded, saved)] if saved else []
            losses, saved = losses + found, at_end
        comm.Barrier()
    expected = unbroken(kind)
    assert comm.allgather(equal) == [[True, True], [True], [], []]
    assert comm.bcast(losses) == pytest.approx(expected, rel=BOUNDS.get(kind, 1e-10), abs=0)


@pytest.mark.parametrize(("stage", "other", "kind"), cases(permutations(STAGES, 2)))
def test_any_stage_goes_on_from_any_other_on_as_many_ranks(
    stage: str, other: str, kind: str, comm: MPI.Comm, folder: Path, unbroken, tmp_path: Path
) -> None:
    kept = shared_folder(comm, tmp_path)
    before, _, saved = ran(config_of(folder, kind, stage), comm, Leg(4, stage, 0, 3), kept)
    after, loaded, _ = ran(config_of(folder, kind, other), comm, Leg(4, other, 3, 6), kept)
    assert comm.allgather(same(loaded, saved)) == [True] * comm.size
    assert before + after == pytest.approx(unbroken(kind), rel=BOUNDS.get(kind, 1e-10), abs=0)


def config_of(folder: Path, kind: str, stage: str) -> Config:
    """Weights of 4096 elements and more: of smaller ones the 8-bit optimizer keeps no codes."""
    return small_config(folder, "model.width=32", "precision.compute=fp64", *KINDS[kind], *STAGES[stage])


def ran(
    config: Config, part: MPI.Comm, leg: Leg, kept: Path | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """The losses of a leg, and what the run held at its start and at its end, which is saved. Collective."""
    with job(config, part) as (run, batches):
        if leg.start:
            for held in run.state.values():
                held.tensor.zero_()
        point = kept and Checkpoint(config.checkpoint, kept, run.plan.mesh, run.runner.group)
        assert not leg.start or point.resume(run.state) == leg.start
        loaded = state_of(run)
        losses = [run.step(step, batches)["loss"] for step in range(leg.start, leg.stop)]
        if point:
            point.save(leg.stop, run.state, {})
        return losses, loaded, state_of(run)


def state_of(run: Job) -> dict[str, Tensor]:
    """Everything that a checkpoint keeps, whole. Collective."""
    return {name: flat.clone() for name, flat in whole(run).items() if not name.startswith("gradient/")}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether two runs hold the same, bit for bit, and more than weights."""
    assert len({name.rpartition("/")[0] for name in one}) > 1
    if one.keys() != other.keys():
        return False
    return all(torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype for name in one)
