"""Which container a process is in, whose MPI library it has there, and what is said of it. All from texts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpctrain.cluster import advice, door
from hpctrain.cluster.advice import GIB, Rank
from hpctrain.cluster.container import IMAGE, Container, here, identify, look, origin
from hpctrain.cluster.doctor import FOUND
from hpctrain.cluster.launcher import Launch
from hpctrain.cluster.mounts import holder
from hpctrain.cluster.probe import Hdf5, Mount, Probe
from hpctrain.errors import LaunchError

APPTAINER = Container("Apptainer", "/images/cpu.sif", "APPTAINER_CONTAINER")
ENROOT = Container("Enroot", "", "/proc/self/mountinfo /.lock")
DOCKER = Container("Docker", "", "/.dockerenv")
LIBRARY = "/usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4"
BOUND = "/usr/lib/x86_64-linux-gnu/bound.so"
DRIVER = "/.singularity.d/libs/libcuda.so.1"
# One image, shown in four ways. Apptainer's usual layer over the image, with the host's MPI and driver bound in:
OVERLAY = """
600 500 0:50 / / ro,nosuid - overlay overlay rw,lowerdir=/image
601 600 0:5 / /dev rw - devtmpfs udev rw
602 600 0:33 /pe /opt/cray/pe rw - lustre 10.0.0.1@o2ib:/fs rw
603 600 254:1 /usr/lib64/libcuda.so.550 /.singularity.d/libs/libcuda.so.1 ro - ext4 /dev/vda1 rw
"""
# Apptainer without a layer: an empty root, into which the image's folders are mounted one by one.
UNDERLAY = """
600 500 0:50 / / ro - tmpfs tmpfs rw
601 600 7:0 /usr /usr ro - squashfs /dev/loop0 ro
602 600 7:0 /.singularity.d /.singularity.d ro - squashfs /dev/loop0 ro
603 600 254:1 /opt/mpi /opt/mpi ro - ext4 /dev/vda1 rw
604 600 254:1 /usr/lib/hosts.so /usr/lib/x86_64-linux-gnu/bound.so ro - ext4 /dev/vda1 rw
"""
MOVED = "605 600 7:0 /usr/lib/old /opt/lib ro - squashfs /dev/loop0 ro\n"
# Enroot: the image is a folder of the node's own disk, and so is what is bound in.
FOLDER = """
600 500 254:1 /data/enroot/image / ro - ext4 /dev/vda1 rw
601 600 254:1 /opt/mpi /opt/mpi ro - ext4 /dev/vda1 rw
602 600 254:1 /data/enroot/image/.lock /.lock ro - ext4 /dev/vda1 rw
"""
HOST = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"


@pytest.mark.parametrize(
    ("environ", "files", "mountinfo", "shown", "source"),
    [
        (
            {"APPTAINER_CONTAINER": "/i/cpu.sif", "SINGULARITY_CONTAINER": "/i/cpu.sif"},
            ["/.singularity.d"],
            OVERLAY,
            "Apptainer (/i/cpu.sif)",
            "APPTAINER_CONTAINER",
        ),
        ({"SINGULARITY_NAME": "cpu.sif"}, ["/.singularity.d"], OVERLAY, "Singularity (cpu.sif)", "SINGULARITY_NAME"),
        ({}, ["/.singularity.d"], OVERLAY, "Apptainer or Singularity", "/.singularity.d"),
        ({}, ["/.dockerenv"], OVERLAY, "Docker", "/.dockerenv"),
        ({}, ["/run/.containerenv"], OVERLAY, "Podman", "/run/.containerenv"),
        ({"SHIFTER_RUNTIME": "1"}, [], OVERLAY, "Shifter (1)", "SHIFTER_RUNTIME"),
        ({"CH_RUNNING": "Weird Al Yankovic"}, [], OVERLAY, "Charliecloud (Weird Al Yankovic)", "CH_RUNNING"),
        ({}, [], FOLDER, "Enroot", "/proc/self/mountinfo /.lock"),
        ({}, ["/.lock"], HOST, "none", "no variable and no file of one"),
        ({"APPTAINER_CONTAINER": ""}, [], HOST, "none", "no variable and no file of one"),
    ],
)
def test_a_container_is_known_by_its_variables_and_its_files(environ, files, mountinfo, shown, source) -> None:
    found = identify(environ, files.__contains__, mountinfo)
    assert (str(found), found.source, bool(found)) == (shown, source, shown != "none")


@pytest.mark.parametrize(
    ("container", "mountinfo", "path", "whose"),
    [
        (APPTAINER, OVERLAY, LIBRARY, IMAGE),
        (APPTAINER, OVERLAY, "/opt/cray/pe/mpich/lib/libmpi.so.12", "the host, by the mount /opt/cray/pe"),
        (APPTAINER, OVERLAY, "/opt/cray/other/libmpi.so.12", IMAGE),
        (APPTAINER, OVERLAY, DRIVER, f"the host, by the mount {DRIVER}"),
        (APPTAINER, UNDERLAY, LIBRARY, IMAGE),
        (APPTAINER, UNDERLAY + MOVED, "/opt/lib/libmpi.so.12", IMAGE),
        (APPTAINER, UNDERLAY, "/opt/mpi/lib/libmpi.so.12", "the host, by the mount /opt/mpi"),
        (APPTAINER, UNDERLAY, BOUND, f"the host, by the mount {BOUND}"),
        (ENROOT, FOLDER, LIBRARY, IMAGE),
        (ENROOT, FOLDER, "/opt/mpi/lib/libmpi.so.12", "the host, by the mount /opt/mpi"),
        (DOCKER, OVERLAY, LIBRARY, IMAGE),
        (Container(), HOST, LIBRARY, "this system"),
    ],
)
def test_a_library_is_the_images_or_the_hosts(container: Container, mountinfo: str, path: str, whose: str) -> None:
    assert origin(path, container, mountinfo) == whose


@pytest.mark.parametrize(
    ("path", "lies"),
    [("/opt/mpi/a.so", "/opt/mpi/a.so"), ("/usr/a.so", "/data/enroot/image/usr/a.so"), ("/opt/mpi", "/opt/mpi")],
)
def test_a_path_is_followed_to_where_it_lies_in_its_file_system(path: str, lies: str) -> None:
    assert holder(path, FOLDER).behind(path) == lies


def test_this_process_is_asked_too() -> None:
    found = look(["/no/lib.so"])
    assert (found.kind, found.image, found.source) == (here().kind, here().image, here().source)
    assert len(found.mpi_from) == 1 and found.source


# ---- what is said of it --------------------------------------------------------------------------------------------


def ranks(container: Container, nodes: int = 1, **changed: object) -> list[Rank]:
    """One healthy rank on each of so many nodes, in this container."""
    mount = Mount("/scratch", "gpfs", 900 * GIB, 1000 * GIB)
    found = Probe(
        host="node1", memory=512 * GIB, memory_source="", shm=mount, folder=mount, hdf5=Hdf5("1.14.5", True),
        mpi_libraries=(LIBRARY,), device_kind="cpu", devices=(), devices_of_node=0, device_mask="", torch="2.13.0",
        threads=None, container=container,
    )  # fmt: skip
    return [Rank(node, node, frozenset(range(16)), replace(found, **changed)) for node in range(nodes)]


def said(given: list[Rank]) -> list[advice.Advice]:
    return advice.all_of(given, (0.0,))


def test_the_facts_name_the_container_and_whose_the_mpi_library_is() -> None:
    (rank,) = ranks(replace(APPTAINER, mpi_from=(IMAGE,)))
    (container, source), (whose, _) = FOUND["container"], FOUND["mpi.from"]
    assert (container(rank), source(rank.probe)) == ("Apptainer (/images/cpu.sif)", "APPTAINER_CONTAINER")
    assert whose(rank) == "the image"


def test_devices_without_the_library_of_their_driver_are_told_once_with_the_option() -> None:
    lost = ranks(replace(APPTAINER, driver_lost=True), devices_of_node=4)
    (only,) = said(lost)
    assert "Apptainer (/images/cpu.sif) on node1 has /dev/nvidia*, but no libcuda.so.1" in only.what
    assert "never in an image" in only.why and "--nv (Apptainer)" in only.mend and "--gpus all" in only.mend


def test_devices_that_torch_does_not_see_for_another_reason_are_still_told() -> None:
    (only,) = said(ranks(APPTAINER, devices_of_node=4))
    assert "4 accelerators in /dev" in only.what


@pytest.mark.parametrize(
    ("container", "nodes", "told"),
    [
        (replace(APPTAINER, mpi_from=(IMAGE,), slingshot="/dev/cxi0"), 2, True),
        (replace(APPTAINER, mpi_from=(IMAGE,), slingshot="/dev/cxi0"), 1, False),
        (replace(APPTAINER, mpi_from=("the host, by the mount /opt/cray/pe",), slingshot="/dev/cxi0"), 2, False),
        (replace(APPTAINER, mpi_from=(IMAGE,)), 2, False),
        (Container(mpi_from=("this system",), slingshot="/dev/cxi0"), 2, False),
    ],
)
def test_the_images_own_mpi_on_a_slingshot_network_is_told(container: Container, nodes: int, told: bool) -> None:
    found = said(ranks(container, nodes))
    assert len(found) == told
    if told:
        assert "image's own, and the nodes have a Slingshot network (/dev/cxi0)" in found[0].what
        assert "2.4 GB/s instead of 12.2" in found[0].why and "Cray MPICH" in found[0].mend


@pytest.mark.parametrize(
    ("launcher", "mend"),
    [
        ("srun", "or build the image with the library that srun can introduce"),
        ("mpirun of Open MPI", "the host's mpirun starts the containers"),
    ],
)
def test_ranks_of_a_container_that_are_each_alone_are_told_the_containers_mend(launcher: str, mend: str) -> None:
    launch = Launch(launcher, size=4, sources=("RANK", "SIZE"))
    with pytest.raises(LaunchError) as outside:
        door.check_size(launch, 1, "MPICH Version: 4.0.2")
    with pytest.raises(LaunchError) as inside:
        door.check_size(launch, 1, "MPICH Version: 4.0.2", APPTAINER)
    assert inside.value.what == outside.value.what and "this process is alone" in inside.value.what
    assert inside.value.mend.startswith(outside.value.mend) and mend in inside.value.mend
    assert mend not in outside.value.mend
