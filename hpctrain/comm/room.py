"""Room: whether shared memory has space for a window, asked before the window is made."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

SPARE_BYTES = 4 << 20  # what is left to others: MPI's own segments come and go in the same place

# Where an MPI library lets a user move the files of its windows to, and where they are else.
BACKING_VARIABLES = ("OMPI_MCA_osc_sm_backing_directory",)
BACKING_FOLDERS = ("/dev/shm", "/tmp")


def fits(wanted_bytes: int, free_bytes: int) -> bool:
    """Whether a window may be made."""
    return wanted_bytes + SPARE_BYTES <= free_bytes


def backing(environ: Mapping[str, str]) -> str:
    """The folder in which MPI puts the files of its windows."""
    named = [environ[name] for name in BACKING_VARIABLES if name in environ]
    return next(folder for folder in (*named, *BACKING_FOLDERS, "/") if Path(folder).is_dir())


def room(folder: str) -> int:
    """Bytes free in ``folder``."""
    return shutil.disk_usage(folder).free
