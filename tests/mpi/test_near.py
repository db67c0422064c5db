"""Near checkpoints by real ranks on nodes that are folders: lost nodes, other numbers of ranks, disks that fill."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.comm.mpi import MpiGroup
from hpctrain.errors import FullError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.near import Cluster, flip

pytestmark = pytest.mark.mpi(min_size=4)

LAYOUTS = {
    "model/columns": Layout((60, 101), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((3, 1_100_000), "bfloat16"),
    "model/rows": Layout((2000, 301), "bfloat16", (Cut(0, ("dp",)),)),
    "model/small": Layout((7,), "float32"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
}
NODES = ("aabb", "abab", "abcd")


class Ranks:
    """Some ranks of this launch, on nodes by the letters of ``hosts``."""

    def __init__(self, cluster: Cluster, comm: MPI.Comm | None, hosts: str) -> None:
        self.cluster, self.hosts, self.mesh = cluster, hosts, Mesh((("dp", len(hosts)),))
        alone = comm is not None and comm.size == 1
        self.group = None if comm is None else SoloGroup() if alone else MpiGroup(comm, node_key=hosts[comm.rank])

    def save(self, step: int, whole: bool = False, **config: object) -> bool:
        """Save a step, near or in the run's folder."""
        point = self.cluster.point(self.group, self.mesh, self.hosts, **config)
        state = states.filled(self.cluster.layouts, self.mesh, self.group.rank, step)
        return bool(point.save(step, state, {}) if whole else point.near.save_if_room(step, state))

    def resume(self) -> int:
        """The step gone on from, every element of this rank being right."""
        state = states.blank(self.cluster.layouts, self.mesh, self.group.rank)
        step = self.cluster.point(self.group, self.mesh, self.hosts).resume(state)
        assert step == 0 or states.wrong(state, self.mesh, self.group.rank, step) == []
        return step


@pytest.fixture
def cluster(comm: MPI.Comm, tmp_path: Path) -> Cluster:
    """One run and its nodes, for all ranks."""
    return Cluster(Path(comm.bcast(str(tmp_path))), LAYOUTS, "aabb")


@pytest.fixture
def ranks(
    cluster: Cluster, comm: MPI.Comm, first: Callable[[int], MPI.Comm | None]
) -> Iterator[Callable[[str], Ranks]]:
    """``ranks(hosts)`` gives as many ranks as there are letters; the others have no group."""
    made: list[Ranks] = []

    def make(hosts: str) -> Ranks:
        made.append(Ranks(cluster, first(len(hosts)), hosts))
        return made[-1]

    yield make
    for one in made:
        if one.group:
            one.group.close()


def alone(comm: MPI.Comm, act: Callable[[], object]) -> None:
    """Let one rank do something while no other does anything."""
    comm.Barrier()
    if comm.rank == 0:
        act()
    comm.Barrier()


@pytest.mark.parametrize("hosts", NODES)
def test_the_loss_of_a_node_loses_nothing_and_that_of_two_neighbours_goes_back(
    cluster: Cluster, ranks: Callable[[str], Ranks], comm: MPI.Comm, hosts: str
):
    four = ranks(hosts)
    if four.group:
        four.save(10, whole=True)
        four.save(15)
        assert four.resume() == 15
    alone(comm, lambda: shutil.rmtree(cluster.disks / "a"))
    if four.group:
        assert four.resume() == 15
    alone(comm, lambda: shutil.rmtree(cluster.disks / "b"))
    if four.group:
        assert four.resume() == 10
        assert four.save(16) and four.resume() == 16


@pytest.mark.parametrize("hosts", ["abc", "bba", "b", "ba"])
def test_another_number_of_ranks_on_other_nodes_goes_on(
    cluster: Cluster, ranks: Callable[[str], Ranks], comm: MPI.Comm, hosts: str
):
    four = ranks("aabb")
    if four.group:
        four.save(15)
    alone(comm, lambda: shutil.rmtree(cluster.disks / "a"))
    some = ranks(hosts)
    if some.group:
        assert some.resume() == 15


def test_a_flipped_byte_costs_no_more_than_the_partner_s_copy(
    cluster: Cluster, ranks: Callable[[str], Ranks], comm: MPI.Comm
):
    four = ranks("aabb")
    if four.group:
        four.save(15)
    alone(comm, lambda: [flip(path, -9) for path in cluster.files("a") if path.name.endswith(".own")])
    if four.group:
        assert four.resume() == 15
    alone(comm, lambda: [flip(path, -9) for path in cluster.files("b") if path.name.endswith("1.copy")])
    if four.group:
        assert four.resume() == 0


def test_what_another_life_of_the_run_has_left_is_ignored(
    cluster: Cluster, ranks: Callable[[str], Ranks], comm: MPI.Comm
):
    four = ranks("abcd")
    if four.group:
        four.save(15)
    alone(comm, lambda: shutil.rmtree(cluster.run))
    if four.group:
        assert four.resume() == 0


@pytest.fixture
def small_disk(cluster: Cluster, comm: MPI.Comm) -> Iterator[Path]:
    """A file system of 24 MiB on node b; a save takes 10 MB of it."""
    place = cluster.disks / "b"

    def mount() -> str:
        if os.geteuid():
            return "mounting a small tmpfs needs root"
        place.mkdir(parents=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place]
        return subprocess.run(command, capture_output=True, text=True).stderr

    failed = comm.bcast(mount() if comm.rank == 0 else None)
    if failed:
        pytest.skip(failed)
    yield place
    alone(comm, lambda: subprocess.run(["umount", "-l", place], check=True))


def test_a_disk_that_is_full_on_one_node_is_met_by_all_ranks_and_the_run_goes_on(
    cluster: Cluster, small_disk: Path, ranks: Callable[[str], Ranks], comm: MPI.Comm
):
    four = ranks("aabb")
    if four.group:
        assert four.save(15, on_full="go on")
    alone(comm, lambda: (small_disk / "filler").write_bytes(bytes(10 << 20)))
    if four.group:
        before = _names(cluster, four.group)
        assert not four.save(16, on_full="go on")
        with pytest.raises(FullError, match="has no room"):
            four.save(17, on_full="stop")
        assert _names(cluster, four.group) == before
        assert four.resume() == 15
    alone(comm, (small_disk / "filler").unlink)
    if four.group:
        assert four.save(18, on_full="go on") and four.resume() == 18


def _names(cluster: Cluster, group: Group) -> list[str]:
    group.barrier()
    found = [str(path) for host in "ab" for path in cluster.files(host) if path.name != "filler"]
    group.barrier()
    return found
