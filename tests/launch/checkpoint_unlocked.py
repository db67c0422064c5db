"""Saves, goes on and reads with every part of the project that opens a checkpoint, where no lock is to be had."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
from mpi4py import MPI

from hpctrain.checkpoint import shared_file
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.convert import Change, convert
from hpctrain.checkpoint.diff import diff
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states

LAYOUTS = {
    "model/rows": Layout((300, 101), "float32", (Cut(0, ("dp",)),)),
    "model/columns": Layout((300, 101), "float32", (Cut(1, ("dp",)),)),
}


def main(folder: Path) -> None:
    """Each writer saves twice; what it wrote is gone on from, checked, converted and compared."""
    group = MpiGroup(MPI.COMM_WORLD)
    mesh = Mesh((("dp", group.size),))
    for writer in ["direct", *(["mpio"] if shared_file.available() else [])]:
        point = Checkpoint(CheckpointConfig(writer=writer, keep=1), folder / writer, mesh, group)
        for step in (1, 2):
            path = point.save(step, states.filled(LAYOUTS, mesh, group.rank, step), {})
        state = states.blank(LAYOUTS, mesh, group.rank)
        assert point.resume(state) == 2 and states.wrong(state, mesh, group.rank, 2) == []
        index, out = read_index(path), folder / f"{writer}.h5"
        assert verify(path, index, group) == []
        convert(path, index, out, group, Change())
        assert diff((path, index), (out, read_index(out)), group) == []
    if group.leads:
        _lock(path)
    group.close()


def _lock(path: Path) -> None:
    """What any other program gets that asks for a lock there."""
    try:
        h5py.File(path, "r", locking=True)
    except OSError as error:
        print(f"with a lock: {error}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
