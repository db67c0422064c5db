"""Shared file: a laid-out file that all ranks have open at once, each to write by its own calls of parallel HDF5."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from hpctrain.checkpoint.disk import Begun, Piece, Seen, cut, order, unseen
from hpctrain.checkpoint.hdf5 import h5d, h5py, h5s
from hpctrain.plan.layout import ITEMSIZE, Box

# In one call, whole blocks, after which the disk is told to begin; with more, some saves took half as long again.
CALL_BYTES = 1 << 20


def available() -> bool:
    """Whether this h5py can open one file from many ranks."""
    return bool(h5py.get_config().mpi)


class SharedFile:
    """A laid-out file that all ranks of ``comm`` have open to write. Opening and closing are collective, no more.

    ``plain`` is the file as this rank alone has it open, to tell the disk to begin; who opened it closes it.
    """

    def __init__(self, path: Path, plain: BinaryIO, comm: Any, hints: Mapping[str, str | int]) -> None:
        self._begin = Begun(plain.fileno())
        info = comm.Get_info()
        for key, value in hints.items():
            info.Set(key, str(value))
        self._file = h5py.File(path, "r+", driver="mpio", comm=comm, info=info, libver="earliest", locking=False)
        info.Free()

    def write(self, pieces: Iterable[Piece], seen: Seen = unseen, begin: float = 0) -> None:
        """Write each piece, whose ``of`` is its tensor's slot, to its place; ``seen`` and ``begin`` as for the disk."""
        for piece in cut(order(pieces, begin), CALL_BYTES):
            host = replace(piece, memory=piece.memory.cpu())
            seen(host)
            self._put(host)
            self._begin(piece.at, piece.memory.numel())

    def _put(self, piece: Piece) -> None:
        """Box by box: HDF5 is quick at a selection of one."""
        slot, data, size = piece.of, piece.memory.numpy(), ITEMSIZE[piece.of.dtype]
        dataset = h5d.open(self._file.id, slot.name.encode())
        # The same type on both sides: HDF5 moves the bytes as they are, and never converts.
        space, kind = dataset.get_space(), dataset.get_type()
        first = (piece.at - slot.offset) // size
        for box in Box((0,) * len(slot.shape), slot.shape).part(first, first + data.size // size):
            if box.shape:
                space.select_hyperslab(box.start, box.shape)
            taken, data = data[: box.size * size], data[box.size * size :]
            dataset.write(h5s.create_simple((box.size,)), space, taken, kind)

    def hints(self) -> dict[str, str]:
        """The hints that MPI-IO was given."""
        return dict(self._file.id.get_access_plist().get_fapl_mpio()[1])

    def close(self) -> None:
        """Close the file."""
        self._file.close()
