"""What the doctor warns of, with faked finds for what this machine does not have, and what it finds here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from hpctrain.cluster import advice, probe
from hpctrain.cluster.advice import GIB, Rank
from hpctrain.cluster.doctor import Report, show
from hpctrain.cluster.fact import Fact
from hpctrain.cluster.probe import Hdf5, Mount, Probe
from hpctrain.cluster.sysfs import Near

HEALTHY = Probe(
    host="node1",
    memory=512 * GIB,
    memory_source="/proc/meminfo",
    shm=Mount("/dev/shm", "tmpfs", 200 * GIB, 256 * GIB),
    folder=Mount("/scratch", "gpfs", 900 * GIB, 1000 * GIB),
    hdf5=Hdf5("1.14.5", True),
    mpi_libraries=("/opt/mpi/lib/libmpi.so.40.40.1",),
    device_kind="cuda",
    devices=("a", "b", "c", "d"),
    devices_of_node=4,
    device_mask="CUDA_VISIBLE_DEVICES=0,1,2,3",
    torch="2.13.0",
    threads=None,
)


def node(count: int = 4, number: int = 0, cores_each: int = 16, **changed: object) -> list[Rank]:
    """Ranks of one node, each with its own cores, that found the same but for what is changed."""
    found = replace(HEALTHY, host=f"node{number + 1}", **changed)
    return [Rank(r, number, frozenset(range(r * cores_each, (r + 1) * cores_each)), found) for r in range(count)]


def only(ranks: list[Rank], clocks: tuple[float, ...] = (0.0,)) -> advice.Advice:
    """The one thing that is said of these ranks."""
    said = advice.all_of(ranks, clocks)
    assert len(said) == 1, said
    assert said[0].what and said[0].why and said[0].mend
    return said[0]


def test_nothing_is_said_of_a_healthy_job() -> None:
    assert advice.all_of(node() + node(number=1), (0.0, 0.01)) == []


def test_ranks_that_share_a_core_are_told() -> None:
    crowded = [replace(rank, cores=frozenset({0, 1})) for rank in node()]
    assert "4 ranks on node1 share 2 cores" in only(crowded).what


def test_a_rank_kept_far_from_its_device_is_told_with_both_places() -> None:
    near = (Near(3, frozenset(range(48, 64))),)
    said = only(node(1, near=near, devices=("a",)))
    assert "rank 0 on node1 computes on cores 0-15, and its device is near 48-63" in said.what
    assert advice.all_of(node(1, near=(Near(0, frozenset({8})),), devices=("a",)), (0.0,)) == []


def test_more_threads_than_cores_are_told() -> None:
    assert "OMP_NUM_THREADS = 32 for 4 ranks on node1, which may use 64 cores" in only(node(threads="32")).what
    assert advice.all_of(node(threads="16"), (0.0,)) == []


def test_a_tiny_shared_memory_is_told_where_several_ranks_use_it() -> None:
    tiny = Mount("/dev/shm", "tmpfs", 2**26, 2**26)
    assert "/dev/shm on node1 has 64 MiB" in only(node(shm=tiny)).what
    assert "--shm-size" in only(node(shm=tiny)).mend
    assert advice.all_of(node(count=1, shm=tiny), (0.0,)) == []


def test_ranks_that_see_one_device_each_are_told_how_to_see_all() -> None:
    masked = [replace(r, probe=replace(r.probe, devices=(name,))) for r, name in zip(node(), "abcd", strict=True)]
    said = only(masked)
    assert "each of 4 ranks on node1 sees one device only" in said.what and "slow paths" in said.why
    assert "--gpus-per-node" in said.mend and "--gpu-bind=none" in said.mend


def test_a_node_whose_devices_torch_does_not_see_is_told() -> None:
    assert "node1 has 4 accelerators in /dev, and torch 2.13.0 sees none" in only(node(devices=())).what


def test_two_mpi_libraries_in_one_process_are_told() -> None:
    two = ("/opt/mpi/lib/libmpi.so.40", "/usr/lib/libmpi.so.12")
    assert "two MPI libraries are loaded" in only(node(mpi_libraries=two)).what


def test_little_space_is_told_with_the_place() -> None:
    full = Mount("/scratch", "gpfs", 3 * GIB, 1000 * GIB)
    assert "3.0 GiB are free on /scratch" in only(node(folder=full)).what


def test_a_folder_of_one_node_is_told_when_there_are_several() -> None:
    local = Mount("/tmp", "ext4", 500 * GIB, 600 * GIB)
    said = only(node(folder=local) + node(number=1, folder=local), (0.0, 0.0))
    assert "ext4 (/tmp)" in said.what and "run.dir" in said.mend
    assert advice.all_of(node(folder=local), (0.0,)) == []


@pytest.mark.parametrize(("kind", "word"), [("nfs4", "one server"), ("lustre", "striping")])
def test_a_shared_folder_comes_with_its_note(kind: str, word: str) -> None:
    shared = Mount("/scratch", kind, 500 * GIB, 600 * GIB)
    assert word in only(node(folder=shared) + node(number=1, folder=shared), (0.0, 0.0)).why


def test_clocks_that_disagree_are_told_with_the_node() -> None:
    assert "clocks are 3.5 s apart; node 1 is -3.5 s" in only(node() + node(number=1), (0.0, -3.5)).what


def test_the_same_fault_on_many_nodes_is_told_once() -> None:
    assert "node1" in only(node(threads="32") + node(number=1, threads="32"), (0.0, 0.0)).what


@pytest.mark.parametrize(("srun", "mend"), [(True, "srun --cpus-per-task=8"), (False, "--bind-to none")])
def test_processors_that_were_asked_for_and_lost_are_told_with_the_option(srun: bool, mend: str) -> None:
    said = advice.lost_cores(8, 1, srun)
    assert "8 processors were asked for each task" in said[0].what and mend in said[0].mend


@pytest.mark.parametrize(("asked", "cpus"), [(None, 1), (1, 1), (8, 8), (8, 4)])
def test_processors_that_were_not_lost_are_not_told(asked: int | None, cpus: int) -> None:
    assert advice.lost_cores(asked, cpus, True) == []


def test_fewer_ranks_than_asked_for_are_told() -> None:
    assert "SLURM_NTASKS_PER_NODE = 2, but 1 of the ranks run on this node" in advice.lost_tasks(2, 1)[0].what
    assert advice.lost_tasks(2, 2) == advice.lost_tasks(None, 1) == []


def test_ranks_outside_the_list_of_nodes_are_told() -> None:
    assert advice.strangers({"node1", "node2"}, ["node1", "node2.site.org", "node1#2"]) == []
    assert "login1" in advice.strangers({"node1"}, ["node1", "login1"])[0].what


# ---- what a process finds out --------------------------------------------------------------------------------------

MOUNTS = r"""
22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
23 22 0:21 / /dev/shm rw,nosuid shared:2 - tmpfs tmpfs rw
24 22 0:30 / /scratch rw shared:3 - lustre 10.0.0.1@o2ib:/fs rw
25 24 0:31 / /scratch/my\040files rw shared:4 - nfs4 server:/export rw
26 22 0:32 / /opt/old rw - ext4 /dev/vdb rw
27 22 0:33 / /opt/old rw - overlay overlay rw
""".strip()


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/home/me", ("/", "ext4")),
        ("/scratch", ("/scratch", "lustre")),
        ("/scratch/run/1", ("/scratch", "lustre")),
        ("/scratchy", ("/", "ext4")),
        ("/scratch/my files/run", ("/scratch/my files", "nfs4")),
        ("/opt/old/x", ("/opt/old", "overlay")),
    ],
)
def test_a_path_lies_on_the_innermost_mount_above_it(path: str, found: tuple[str, str]) -> None:
    assert probe.find_mount(path, MOUNTS) == found


def test_a_folder_that_does_not_exist_yet_is_looked_for_above(tmp_path: Path) -> None:
    found, above = (replace(probe.mount_of(path), free_bytes=0) for path in (tmp_path / "runs" / "one", tmp_path))
    assert found == above  # but for what is free, which other programs change meanwhile
    assert 0 < probe.mount_of(tmp_path).free_bytes <= probe.mount_of(tmp_path).total_bytes


def test_the_memory_limit_is_no_more_than_the_node_has_and_says_where_it_stands() -> None:
    limit, source = probe.memory_limit()
    assert 0 < limit <= psutil.virtual_memory().total and source.startswith(("/proc", "/sys"))


def test_only_the_mpi_library_itself_counts_as_one() -> None:
    maps = "\n".join(
        f"7f00-7f01 r-xp 0 0 0 {path}"
        for path in (
            "/l/libmpi.so.40.30.4",
            "/l/libmpi_cray.so.12",
            "/l/libmpi_cxx.so.40",
            "/l/libmpi_mpifh.so.40",
            "/l/libm.so",
        )
    )
    assert probe.mpi_libraries(maps) == ("/l/libmpi.so.40.30.4", "/l/libmpi_cray.so.12")


def test_a_mask_is_shown_as_it_stands() -> None:
    assert probe.mask({"CUDA_VISIBLE_DEVICES": "0,1", "HOME": "/"}) == "CUDA_VISIBLE_DEVICES=0,1"


# ---- the report ----------------------------------------------------------------------------------------------------


def test_a_report_shows_value_and_source_and_every_mend() -> None:
    report = Report((Fact("size", 4, "MPI_COMM_WORLD"),), (advice.Advice("this", "because", "do that"),))
    assert show(report) == "size  4  MPI_COMM_WORLD\n\nwarning: this\n  because\n  do that"
    assert "nothing to mend" in show(replace(report, warnings=()))
    assert json.loads(json.dumps(report.to_json()))["facts"][0]["source"] == "MPI_COMM_WORLD"
