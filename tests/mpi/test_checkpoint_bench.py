"""The checkpoint benchmark measures every way, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.bench.ckpt import run
from hpctrain.checkpoint import format
from hpctrain.cluster.world import World

pytestmark = pytest.mark.mpi(min_size=4)


def test_every_writer_and_fio_have_a_row_for_saving_and_loading(comm: MPI.Comm, tmp_path: Path):
    folder = Path(comm.bcast(str(tmp_path)))
    rows = run(folder, World.of(comm), gib=1 / 64, rounds=1)
    writers = ["direct", *(["mpio"] if format.parallel() else []), *(["fio"] if shutil.which("fio") else [])]
    assert [(row.writer, row.operation) for row in rows] == [(one, do) for one in writers for do in ("save", "load")]
    assert all(row.seconds > 0 and row.bytes > 16_000_000 for row in rows)
    assert all((row.of_fio is None) == ("fio" not in writers) for row in rows)
    assert comm.bcast(os.listdir(folder)) == []
