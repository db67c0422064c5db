"""Collective: a laid-out file as all ranks have it open at once, through parallel HDF5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.hdf5 import h5d, h5p, h5py, h5s


def parallel() -> bool:
    """Whether this h5py can open one file from many ranks."""
    return bool(h5py.get_config().mpi)


class Shared:
    """A laid-out file that all ranks of ``comm`` have open to write together. Opening and closing are collective."""

    def __init__(self, path: Path, comm: Any, hints: Mapping[str, str | int]) -> None:
        info = comm.Get_info()
        for key, value in hints.items():
            info.Set(key, str(value))
        self._file = h5py.File(path, "r+", driver="mpio", comm=comm, info=info, libver="earliest", locking=False)
        info.Free()
        self._how = {together: h5p.create(h5p.DATASET_XFER) for together in (False, True)}
        self._how[True].set_dxpl_mpio(h5py.h5fd.MPIO_COLLECTIVE)

    def write(self, name: str, boxes: Sequence[Any], data: np.ndarray, together: bool) -> None:
        """Write ``data``, the bytes of ``boxes`` in row-major order.

        With ``together`` all ranks call it, one with no boxes too, and MPI-IO gathers what they have into long writes.
        """
        dataset = h5d.open(self._file.id, name.encode())
        space = dataset.get_space()
        count = sum(box.size for box in boxes)
        _select(space, boxes)
        memory = h5s.create_simple((max(count, 1),))
        if not count:
            memory.select_none()
        # The same type on both sides: HDF5 moves the bytes as they are, and never converts.
        kind = dataset.get_type()
        dataset.write(memory, space, data if count else np.zeros(kind.get_size(), np.uint8), kind, self._how[together])

    def hints(self) -> dict[str, str]:
        """The hints that MPI-IO was given."""
        return dict(self._file.id.get_access_plist().get_fapl_mpio()[1])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _select(space: h5s.SpaceID, boxes: Sequence[Any]) -> None:
    space.select_none()
    for box in boxes:
        if box.shape:
            space.select_hyperslab(box.start, box.shape, op=h5s.SELECT_OR)
        else:
            space.select_all()
