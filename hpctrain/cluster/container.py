"""What contains this process: a container of which kind, with whose MPI library and whose driver.

A container's files are an image with files of the host mounted over it. Whose a library is decides what it can do: the
host's MPI knows the machine's network and its launcher, the image's own may know neither.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster.mounts import holder, mounts

IMAGE, HOST = "the image", "the host"
MARK = "/.singularity.d"  # every image that Apptainer or Singularity made has this folder
# Kind of container -> the variables that name its image, the first ones believed first.
NAMED = {
    "Apptainer": ("APPTAINER_CONTAINER", "APPTAINER_NAME"),
    "Singularity": ("SINGULARITY_CONTAINER", "SINGULARITY_NAME"),
    "Shifter": ("SHIFTER_IMAGE", "SHIFTER_RUNTIME"),
    "Charliecloud": ("CH_RUNNING",),
}
# Kind of container -> a file that it puts there. Enroot's is its lock, which it mounts on itself.
LEFT = {"Apptainer or Singularity": MARK, "Podman": "/run/.containerenv", "Docker": "/.dockerenv"}
LOCKED = {"Enroot": "/.lock"}


@dataclass(frozen=True)
class Container:
    """The container of a process. ``source`` is the variable or file that tells of it."""

    kind: str = "none"
    image: str = ""
    source: str = ""
    mpi_from: tuple[str, ...] = ()
    """Of each MPI library that is loaded, whose it is: the image's, or the host's and by which mount."""
    driver_lost: bool = False
    """Whether there are NVIDIA devices and no library of their driver."""
    slingshot: str = ""
    """A device of a Slingshot network, where there is one."""

    def __bool__(self) -> bool:
        return self.kind != "none"

    def __str__(self) -> str:
        return f"{self.kind} ({self.image})" if self.image else self.kind

    @property
    def own_mpi(self) -> bool:
        """Whether the only MPI library is the image's own."""
        return bool(self) and set(self.mpi_from) == {IMAGE}


def here() -> Container:
    """The container of this process."""
    return identify(os.environ, os.path.exists, _mountinfo())


def look(libraries: Sequence[str]) -> Container:
    """The container of this process, with what hurts in one; ``libraries`` are the paths of the MPI ones loaded."""
    found = here()
    return replace(
        found,
        mpi_from=tuple(origin(path, found, _mountinfo()) for path in libraries),
        driver_lost=bool(found) and any(Path("/dev").glob("nvidia[0-9]*")) and not _loads("libcuda.so.1"),
        slingshot=next((str(path) for path in sorted(Path("/dev").glob("cxi[0-9]*"))), ""),
    )


def identify(environ: Mapping[str, str], exists: Callable[[str], bool], mountinfo: str) -> Container:
    """Which container this is, by the variables that its maker sets and the files that it leaves."""
    for kind, names in NAMED.items():
        if name := next((name for name in names if environ.get(name)), None):
            return Container(kind, environ[name], name)
    for kind, path in LEFT.items():
        if exists(path):
            return Container(kind, "", path)
    points = {mounted.point for mounted in mounts(mountinfo)}
    for kind, path in LOCKED.items():
        if path in points:
            return Container(kind, "", f"/proc/self/mountinfo {path}")
    return Container(source="no variable and no file of one")


def origin(path: str, container: Container, mountinfo: str) -> str:
    """Whose the file at an absolute path is: the image's, when it lies in the image's folder of its file system.

    Some containers show the image as one mount, others folder by folder, and it may be a folder of the host's own file
    system: so neither the mount nor the device alone tells.
    """
    if not container:
        return "this system"
    mark = MARK if container.kind.startswith(("Apptainer", "Singularity")) else "/"
    root, lies = holder(mark, mountinfo), holder(path, mountinfo)
    image = root.behind(mark).removesuffix(mark)
    if lies.device == root.device and lies.behind(path).startswith(image + "/"):
        return IMAGE
    return f"{HOST}, by the mount {lies.point}"


def _mountinfo() -> str:
    return Path("/proc/self/mountinfo").read_text()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
