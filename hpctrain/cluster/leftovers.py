"""What a killed life of a job leaves on a node, and what would keep the next life from starting there.

MPICH (seen with 5.0) names its shared memory after the job and the step, and these keep their numbers when Slurm starts
a job again. Ranks that were killed leave the file, and those of the next life on that node take it for their own:
``MPI_Init`` ends with nonsense, such as an address that cannot be unpacked.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from hpctrain.cluster.wait import within

PLACE, NAMES = Path("/dev/shm"), "mpich_shm_*"
LOCK_SECONDS = 1.0  # for a rank that is removing the file
YOUNG_SECONDS = 5.0  # a file may be there for a moment before the process that made it has mapped it


def clear(place: Path = PLACE) -> list[Path]:
    """Remove this user's shared memory of MPICH that no process has mapped, and give what was removed.

    Ranks may do so at the same time, also while others start: it is the file that was looked at that goes, and not one
    that has its name by then.
    """
    old = [path for path in place.glob(NAMES) if _old(path)]
    mapped = set(_mapped(NAMES.rstrip("*"))) if old else set()
    return [path for path in old if path.name not in mapped and _remove(path)]


def _old(path: Path) -> bool:
    with suppress(OSError):
        seen = path.stat()
        return seen.st_uid == os.getuid() and time.time() - seen.st_ctime > YOUNG_SECONDS
    return False


def _mapped(name: str) -> Iterator[str]:
    """The names of mapped files that begin so."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            lines = (process / "maps").read_text(errors="replace").splitlines()
            yield from (Path(line.split()[5]).name for line in lines if f"/{name}" in line)


def _remove(path: Path) -> bool:
    """Remove a file if it still is the one of its name, which only the holder of its lock may give to another."""
    with suppress(OSError), path.open("rb") as file:
        if within(lambda: _locked(file), LOCK_SECONDS) and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
            path.unlink()
            return True
    return False


def _locked(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
