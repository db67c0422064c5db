"""Stripes: over how many servers of a file system a file lies, which is settled when it is made."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from hpctrain.errors import CheckpointError

STRIPES = ("striping_factor", "striping_unit")
"""The hints that MPI-IO heeds where it makes a file: the number of stripes, and the bytes of each (MPI 4.1, 14.2.8)."""


def make(path: Path, hints: Mapping[str, str | int]) -> bool:
    """Make an empty file by MPI-IO where the hints ask for stripes, and say whether; one process calls it, with MPI.

    Who fills it must not make it anew: emptied, it keeps its stripes.
    """
    wanted = {name: str(hints[name]) for name in STRIPES if name in hints}
    if not wanted:
        return False
    from mpi4py import MPI

    info = MPI.Info.Create(wanted)
    try:
        MPI.File.Open(MPI.COMM_SELF, path, MPI.MODE_CREATE | MPI.MODE_EXCL | MPI.MODE_WRONLY, info).Close()
    except MPI.Exception as error:
        told = ", ".join(f"{name} = {value}" for name, value in wanted.items())
        what = f"{path} cannot be made with checkpoint.hints {told}"
        raise CheckpointError(what, str(error), 'set them to what the file system takes, or writer to "auto"') from None
    finally:
        info.Free()
    return True
