"""Window: memory of a node that all its ranks map, and the table of a group's windows.

Windows are MPI's (``Win.Allocate_shared``). Where they do not fit, writing to them would kill the process with
SIGBUS, so the room is looked at before: most libraries back them by files in /dev/shm, which is 64 MiB in many
containers.
"""

from __future__ import annotations

import logging
import os
from typing import NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.room import backing, fits, room

LINE_BYTES = 64  # no two ranks write to one cache line
SMALL = (
    "%s has %.1f MiB free, and %.1f MiB of shared memory are wanted: slower ways take its place; "
    "give the container more (--shm-size, or bind the host's /dev/shm)"
)

_log = logging.getLogger(__name__)
_said: set[str] = set()


class Place(NamedTuple):
    """Where a tensor lies: in which window of the group, and how far in."""

    window: int
    offset: int


class Window:
    """``own_bytes`` of each rank, or with ``shared`` one stretch for all. Making one is collective over ``comm``."""

    def __init__(self, comm: MPI.Comm, own_bytes: int, shared: bool = False) -> None:
        wanted = -(-own_bytes // LINE_BYTES) * LINE_BYTES + LINE_BYTES  # MPI does not promise where a stretch begins
        apart = MPI.Info.Create({"alloc_shared_noncontig": "true"})  # each stretch on pages of its own rank's memory
        self.shared = shared
        self.win = MPI.Win.Allocate_shared(0 if shared and comm.rank else wanted, 1, apart, comm)
        apart.Free()
        self.win.Lock_all(MPI.MODE_NOCHECK)  # opens the epoch in which Sync is defined
        queried = [self.win.Shared_query(0 if shared else rank)[0] for rank in range(comm.size)]
        self.stretches = [_aligned(memory)[: wanted - LINE_BYTES] for memory in queried]
        self.start = self.stretches[comm.rank].data_ptr()
        self.end = self.start + wanted - LINE_BYTES

    def free(self) -> None:
        """Collective. Tensors in the window are memory no more."""
        self.win.Unlock_all()
        self.win.Free()


def _aligned(memory: MPI.buffer) -> Tensor:
    """The memory from its first whole cache line on: the same one for every rank, since ranks map whole pages."""
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % LINE_BYTES :]


class Windows:
    """The windows that a group made for tensors, in the order of their making, which is the same on all ranks."""

    def __init__(self, comm: MPI.Comm) -> None:
        self._comm = comm
        self._made: list[Window] = []
        self.any_shared = False

    def make(self, own_bytes: int, shared: bool = False) -> Tensor | None:
        """This rank's stretch of a new window, zeroed; None on all ranks of the node where there is no room."""
        window = make(self._comm, own_bytes, shared)
        if window is None:
            return None
        self._made.append(window)
        self.any_shared |= shared
        return window.stretches[self._comm.rank][:own_bytes].zero_()

    def find(self, x: Tensor) -> Place | None:
        """The place of ``x``, which is flat; None where it is in no window."""
        start = x.data_ptr()
        for index, window in enumerate(self._made):
            if window.start <= start < window.end:
                offset = start - window.start
                return Place(index, offset) if offset % x.itemsize == 0 else None
        return None

    def shared(self, place: Place) -> bool:
        """Whether the place is one memory for all ranks."""
        return self._made[place.window].shared

    def view(self, place: Place, rank: int, numel: int, dtype: torch.dtype) -> Tensor:
        """What ``rank`` of the node has in a place."""
        stretch = self._made[place.window].stretches[rank]
        return stretch[place.offset : place.offset + numel * dtype.itemsize].view(dtype)

    def free(self) -> None:
        for window in self._made:
            window.free()
        self._made.clear()


def make(comm: MPI.Comm, own_bytes: int, shared: bool = False) -> Window | None:
    """A window, or None on all ranks of ``comm`` where one of them sees too little room for it, which is said once."""
    wanted = own_bytes * (1 if shared else comm.size)
    folder = backing(os.environ)
    free = comm.allreduce(room(folder), MPI.MIN)
    if fits(wanted, free):
        return Window(comm, own_bytes, shared)
    if comm.rank == 0 and folder not in _said:
        _said.add(folder)
        _log.warning(SMALL, folder, free / 2**20, wanted / 2**20)
    return None
