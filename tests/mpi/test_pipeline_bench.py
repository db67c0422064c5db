"""The benchmark of pipelines: every contestant does the same work, whether blocks compute or sleep."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.bench.pipeline import ASLEEP, Row, Scene, run
from hpctrain.cluster.world import World
from hpctrain.config import Config, parse
from hpctrain.errors import LaunchError, PlanError
from hpctrain.schedule.kinds import make
from hpctrain.schedule.simulate import Costs, simulate

pytestmark = pytest.mark.mpi(min_size=4)

First = Callable[[int], MPI.Comm | None]
KNOBS = ("layers=4", "width=32", "heads=4", "sequence=16", "vocabulary=64")
FAMILIES = {"gpt2": ("family=gpt2",), "llama": ("family=llama", "kv_heads=2")}
MICROBATCHES = 4


@pytest.fixture(autouse=True)
def no_default_group() -> Iterator[None]:
    """Torch's default group, which the peer needs, is of other ranks in the next test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def small(family: str) -> Config:
    knobs = tuple(f"model.{knob}" for knob in (*KNOBS, *FAMILIES[family]))
    return parse({}, (*knobs, "train.batch=8", "train.microbatch=2"))


def same(rows: list[Row]) -> bool:
    """Whether all did the same work."""
    first = rows[0]
    return all(
        (row.loss, row.norm) == (pytest.approx(first.loss, rel=1e-5), pytest.approx(first.norm, rel=1e-4))
        for row in rows
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_pipelines_that_compute_do_what_the_peer_does(family: str, first: First) -> None:
    part = first(2)
    if part is None:
        return
    kinds = ("1f1b", "interleaved", "zb-v")
    rows = run(Scene.open(small(family), World.of(part)), 1, kinds)
    assert [row.name for row in rows] == [*kinds, *(f"torch-{kind}" for kind in kinds)]
    assert same(rows) and rows[0].loss > 0 and rows[0].norm > 0
    assert all(row.tokens_per_second == pytest.approx(8 * 16 / row.seconds) for row in rows)
    assert all(0 <= row.bubble < 1 and 0 <= row.simulated_bubble < 1 for row in rows[:3])
    assert [(row.bubble, row.simulated_seconds) for row in rows[3:]] == [(None, None)] * 3
    assert max(row.times_torch for row in rows[3:]) == 1.0


def test_pipelines_that_sleep_have_a_row_for_each_schedule(comm: MPI.Comm) -> None:
    scene = Scene.sleeping((0.002, 0.001, 0.001), MICROBATCHES, World.of(comm))
    rows = run(scene, 1)
    assert [row.name for row in rows] == [*ASLEEP, "torch-1f1b", "torch-interleaved"]
    assert same(rows) and rows[0].loss > 0 and rows[0].norm > 0
    plain = simulate(make("gpipe", comm.size, MICROBATCHES), Costs(0.002, 0.001, 0.001))
    assert (rows[0].simulated_seconds, rows[0].simulated_bubble) == (plain.makespan, plain.bubble)
    for row in rows:
        assert row.seconds > row.simulated_seconds  # nobody sleeps too little
        assert 0 < row.bubble < 1
    for row in rows[: len(ASLEEP)]:
        assert row.traced_bubble < row.bubble  # what else an action does is work there
        assert 0 < row.traced_simulated < 1


def test_nobody_sleeps_less_than_nothing(comm: MPI.Comm) -> None:
    with pytest.raises(PlanError, match="a cost of -0.1 for weight"):
        Scene.sleeping((0.1, 0.1, -0.1), 1, World.of(comm))


def test_one_rank_is_no_pipeline() -> None:
    with pytest.raises(LaunchError, match="one rank is no pipeline\n  start it with mpirun -n 4"):
        Scene.sleeping((0.0, 0.0, 0.0), 1, World.of(MPI.COMM_SELF))
