"""What saves take of host memory, as the plan tells it before anything runs. (tests/mpi has the same of real runs.)"""

from __future__ import annotations

from typing import Any

import pytest

from hpctrain.bench.scale import Answers, Scene
from hpctrain.checkpoint.snapshot import Snapshot
from hpctrain.checkpoint.state import agree
from hpctrain.config import Config, parse
from hpctrain.plan.fit import GIB, fit
from hpctrain.plan.machines import find, topology_of
from hpctrain.plan.plan import Plan, decide
from hpctrain.plan.saved import COPY, NEAR, copies
from hpctrain.plan.topology import Topology

MODEL = {"family": "llama", "layers": 8, "width": 1024, "heads": 8, "mlp_width": 2816, "vocabulary": 8192}


def config(*overrides: str, **sections: Any) -> Config:
    return parse({"model": MODEL, "train": {"batch": 64}, "checkpoint": {"every": 5}, **sections}, overrides)


def planned(chosen: Config, hosts: str = "aabb") -> Plan:
    return decide(chosen, Topology(tuple(hosts)), MODEL["vocabulary"])


@pytest.mark.parametrize(
    "parallel",
    [{"zero": 0}, {"zero": 1}, {"zero": 3, "shard": 4}, {"zero": 1, "tp": 4}, {"zero": 1, "tp": 2, "pp": 4}],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_copies_what_the_plan_says(parallel: dict[str, int], tied: bool) -> None:
    plan = planned(config(parallel=parallel, model=MODEL | {"tied": tied}), "a" * 16)
    scene, mesh = Scene.of(plan), plan.mesh
    groups = [Answers(mesh.ranks_total, rank, scene.told) for rank in range(mesh.ranks_total)]
    taken = [Snapshot(agree(scene.state(group.rank), mesh, group), group).nbytes for group in groups]
    each = mesh.ranks_total // mesh.size("pp")
    stage = [mesh.index(rank, "pp") for rank in range(mesh.ranks_total)]
    stages = [sum(part for part, own in zip(taken, stage, strict=True) if own == p) for p in set(stage)]
    assert plan.host == {COPY: -(-max(stages) // each)}
    assert max(taken) <= plan.host[COPY] * 1.02 + (16 << 20)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["checkpoint.every=0"], False),  # the last save is waited for
        (["checkpoint.every=0", "checkpoint.near=/tmp", "checkpoint.near_every=2"], True),
        (["checkpoint.background=false"], False),
        (["checkpoint.background=false", "checkpoint.near=/tmp", "checkpoint.near_every=2"], False),
        (["checkpoint.writer=mpio"], False),
        (["checkpoint.writer=mpio", "checkpoint.near=/tmp", "checkpoint.near_every=2"], True),
    ],
)
def test_a_copy_is_made_where_a_save_goes_on_in_the_background(overrides: list[str], expected: bool) -> None:
    chosen = config(*overrides)
    assert copies(chosen.checkpoint) == expected == (COPY in planned(chosen).host)


@pytest.mark.parametrize(
    ("folder", "copies", "hosts", "times"),
    [
        ("/dev/shm", 2, "aabb", 4),
        ("/dev/shm/$USER", 2, "aabb", 4),
        ("/dev/shm", 1, "aabb", 2),
        ("/dev/shm", 2, "aaaa", 2),  # there is no other node
        ("/tmp", 2, "aabb", None),
        ("/dev/shmem", 2, "aabb", None),
    ],
)
def test_near_checkpoints_in_memory_are_there_twice_while_one_is_saved(
    folder: str, copies: int, hosts: str, times: int | None
) -> None:
    near = [f"checkpoint.near={folder}", "checkpoint.near_every=1", f"checkpoint.near_copies={copies}"]
    host = planned(config(*near), hosts).host
    assert host.get(NEAR) == (times and times * host[COPY])


def test_the_plan_tells_it_in_a_line_and_as_json() -> None:
    plan = planned(config("checkpoint.near=/dev/shm", "checkpoint.near_every=1"))
    copy, near = plan.host[COPY], plan.host[NEAR]
    assert plan.show().splitlines()[4] == (
        f"on the host  {copy / 2**20:,.0f} MiB for saves in the background, "
        f"{near / 2**20:,.0f} MiB for near checkpoints in memory"
    )
    assert plan.to_json()["host"] == {COPY: copy, NEAR: near}
    assert "on the host" not in planned(config("checkpoint.every=0")).show()


def test_ranks_that_compute_on_cpus_hold_it_as_well() -> None:
    laptop, frontier, chosen = find("laptop"), find("frontier"), config()
    plan = fit(decide(chosen, topology_of(laptop, 1, 2), MODEL["vocabulary"]), chosen, laptop)
    held = (sum(plan.bytes.values()) + plan.host[COPY]) / GIB
    assert any(reason.startswith(f"a rank holds {held:,.1f} of ") for reason in plan.reasons)
    plan = fit(decide(chosen, topology_of(frontier, 1, 2), MODEL["vocabulary"]), chosen, frontier)
    assert any(reason.startswith(f"a rank holds {sum(plan.bytes.values()) / GIB:,.1f} of ") for reason in plan.reasons)
