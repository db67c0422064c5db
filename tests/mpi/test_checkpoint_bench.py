"""The checkpoint benchmark measures every way, and leaves nothing behind."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.bench.ckpt import CUTS, WRITERS, Plan, run
from hpctrain.checkpoint import shared_file
from hpctrain.cluster.world import World

pytestmark = pytest.mark.mpi(min_size=4)

OURS = ["direct", *(["mpio"] if shared_file.available() else [])]
FIO = [("fio", operation) for operation in ("save", "load", "overwrite")] if shutil.which("fio") else []


@pytest.mark.parametrize("cut", CUTS)
def test_every_writer_and_fio_have_a_row_for_saving_and_loading(comm: MPI.Comm, tmp_path: Path, cut: str):
    folder = Path(comm.bcast(str(tmp_path)))
    wanted = [(one, do) for one in OURS for do in ("save", "load", "load cached", "load 4 to 3")]
    fio = FIO if cut == "flat" else []  # which knows nothing of cuts, and takes its time
    plan = Plan(1 / 64, 1, cut=cut, onto=((4, 3),), writers=WRITERS, fio=bool(fio))
    rows = run(folder, World.of(comm), plan)
    behind = [(one, do) for one in ("background", "near") for do in ("stopped", "save", "load", "load cached")]
    assert [(row.writer, row.operation) for row in rows] == [*wanted, *behind, *fio]
    assert all(row.seconds > 0 and row.bytes > 16_000_000 for row in rows)
    assert all((row.of_fio is None) == (not fio) for row in rows)
    assert comm.bcast(os.listdir(folder)) == []


@pytest.fixture
def no_default_group() -> Iterator[None]:
    """Torch's default group, which the peer makes, is of other ranks in other tests."""
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_default_group")
def test_peers_are_timed_on_the_same_state(comm: MPI.Comm, tmp_path: Path):
    folder = Path(comm.bcast(str(tmp_path)))
    plan = Plan(1 / 64, 1, ("dcp", "dcp-async"), "columns", small=5, onto=((2, 4),), fio=False)
    rows = run(folder, World.of(comm), plan)
    peers = [(row.writer, row.operation) for row in rows if row.writer.startswith("dcp")]
    assert peers == [
        *(("dcp", operation) for operation in ("save", "load", "load cached", "load 2 to 4")),
        *(("dcp-async", operation) for operation in ("stopped", "save", "load", "load cached")),
    ]
    assert comm.bcast(os.listdir(folder)) == []
