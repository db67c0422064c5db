"""What one process finds out about its node: memory, file systems, libraries, devices. Nothing here talks to others."""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from hpctrain.cluster.devices import VISIBLE, visible_devices
from hpctrain.cluster.sysfs import Near

MPI_LIBRARY = re.compile(r"/libmpi(ch)?(_cray|_gnu|_intel|_abi|\d)*\.so")  # and not its C++ or Fortran part
DEVICE_FILE = re.compile(r"nvidia\d+|renderD\d+")


@dataclass(frozen=True)
class Mount:
    """A mounted file system."""

    point: str
    kind: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Hdf5:
    """What h5py is and what it is linked to; ``version`` is None where it cannot be imported, for the reason told."""

    version: str | None
    parallel: bool = False
    reason: str = ""


@dataclass(frozen=True)
class Probe:
    """What one rank found. Sizes are in bytes; ``devices`` are physical ids, ``devices_of_node`` a count."""

    host: str
    memory: int
    memory_source: str
    shm: Mount
    folder: Mount
    hdf5: Hdf5
    mpi_libraries: tuple[str, ...]
    device_kind: str
    devices: tuple[str, ...]
    devices_of_node: int
    device_mask: str
    torch: str
    threads: str | None
    near: tuple[Near, ...] = ()
    """What is near each of ``devices``, as far as Linux tells it."""


def probe(folder: Path) -> Probe:
    """Look around on this node. Imports torch and h5py."""
    import torch

    memory, source = memory_limit()
    devices = visible_devices()
    hdf5 = _hdf5()  # before the list of libraries: h5py may bring its own
    return Probe(
        socket.gethostname(),
        memory,
        source,
        mount_of(Path("/dev/shm")),
        mount_of(folder),
        hdf5,
        mpi_libraries(Path("/proc/self/maps").read_text()),
        devices.kind,
        devices.ids,
        _devices_of_node(),
        mask(os.environ),
        torch.__version__,
        os.environ.get("OMP_NUM_THREADS"),
        devices.near,
    )


def mask(environ: Mapping[str, str]) -> str:
    """The variables that hide devices here, as they stand."""
    return ", ".join(f"{name}={environ[name]}" for name in VISIBLE if name in environ) or "no mask in a variable"


def mount_of(path: Path) -> Mount:
    """The file system of a path, or of the nearest folder above it that exists."""
    path = path.resolve()
    while not path.exists():
        path = path.parent
    point, kind = find_mount(str(path), Path("/proc/self/mountinfo").read_text())
    size = os.statvfs(path)
    return Mount(point, kind, size.f_bavail * size.f_frsize, size.f_blocks * size.f_frsize)


def find_mount(path: str, mountinfo: str) -> tuple[str, str]:
    """Mount point and type of the file system that holds an absolute path; of two on one point, the later one."""
    best = ("/", "unknown")
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = _unescaped(before.split()[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best[0]):
            best = (point, after.split()[0])
    return best


def mpi_libraries(maps: str) -> tuple[str, ...]:
    """The MPI libraries that a process has loaded, by its memory map."""
    found = {line.split()[-1] for line in maps.splitlines() if line}
    return tuple(sorted(path for path in found if MPI_LIBRARY.search(path)))


def memory_limit() -> tuple[int, str]:
    """How much memory this process and its kin may use, and where that is written: a control group, or the node."""
    total = psutil.virtual_memory().total
    limits = {total: "/proc/meminfo"}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        limits |= _limits(controllers, path)
    lowest = min(limits)
    return lowest, limits[lowest]


def _limits(controllers: str, path: str) -> dict[int, str]:
    """The limits of a control group and of those above it; version 2 has no controllers in its name."""
    if controllers not in ("", "memory"):
        return {}
    root = Path("/sys/fs/cgroup", controllers)
    name = "memory.limit_in_bytes" if controllers else "memory.max"
    group = root / path.strip("/")
    files = [folder / name for folder in (group, *group.parents) if folder.is_relative_to(root)]
    texts = {file: file.read_text().strip() for file in files if file.is_file()}
    return {int(text): str(file) for file, text in texts.items() if text.isdigit()}


def _hdf5() -> Hdf5:
    try:
        import h5py
    except (ImportError, OSError, RuntimeError) as error:
        return Hdf5(None, reason=(str(error).splitlines() or [type(error).__name__])[0])
    return Hdf5(f"{h5py.version.hdf5_version} (h5py {h5py.version.version})", bool(h5py.get_config().mpi))


def _devices_of_node() -> int:
    """How many accelerators the node has, seen from the outside of what hides them from this process."""
    names = [path.name for folder in (Path("/dev"), Path("/dev/dri")) if folder.is_dir() for path in folder.iterdir()]
    kinds = [name.rstrip("0123456789") for name in names if DEVICE_FILE.fullmatch(name)]
    return max((kinds.count(kind) for kind in set(kinds)), default=0)


def _unescaped(text: str) -> str:
    """Blanks and the like stand in mountinfo as a backslash and three octal digits."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def python() -> str:
    """This interpreter's version and place."""
    return f"{sys.version.split()[0]} ({sys.executable})"
