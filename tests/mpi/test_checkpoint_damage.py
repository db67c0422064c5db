"""Damage and full disks by real ranks: what either writer wrote is checked, and a save without room is skipped."""

from __future__ import annotations

import os
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from hpctrain.checkpoint import disk, shared_file
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.format import read_index
from hpctrain.checkpoint.verify import verify
from hpctrain.comm.group import Group
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import IncompleteError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states

pytestmark = pytest.mark.mpi(min_size=4)

SERIAL = pytest.mark.skipif(not shared_file.available(), reason="h5py is serial")
WRITERS = ["direct", pytest.param("mpio", marks=SERIAL)]
MESH = Mesh((("dp", 4),))
LAYOUTS = {
    "model/columns": Layout((300, 701), "float32", (Cut(1, ("dp",)),)),
    "model/copied": Layout((900_000,), "bfloat16"),
    "model/small": Layout((7,), "float32"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
}


@pytest.fixture
def folder(comm: MPI.Comm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture(scope="module")
def four(comm: MPI.Comm) -> Iterator[Group]:
    """Four ranks."""
    group = MpiGroup(comm.Split(comm.rank // 4, comm.rank))
    yield group
    group.close()


def point(folder: Path, group: Group, **config: Any) -> Checkpoint:
    return Checkpoint(CheckpointConfig(**{"sync": False} | config), folder, MESH, group)


def flip(path: Path, at: int, group: Group) -> None:
    """Change one bit, by one rank, while no other looks."""
    group.barrier()
    if group.leads:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 4]))
    group.barrier()


@pytest.mark.parametrize("writer", WRITERS)
def test_any_byte_that_changes_is_found_whichever_writer_wrote_it(folder: Path, four: Group, writer: str):
    saver = point(folder, four, writer=writer)
    path = saver.save(1, states.filled(LAYOUTS, MESH, four.rank, 1), {})
    index, places = read_index(path), random.Random(writer)
    assert verify(path, index, four) == []
    for slot in index.slots:
        for _ in range(3):
            byte = places.randrange(slot.nbytes)
            flip(path, slot.offset + byte, four)
            (damage,) = verify(path, index, four)
            assert damage.tensor == slot.name and damage.first_byte <= byte < damage.end_byte
            with pytest.raises(IncompleteError, match="none of them is whole"):
                saver.resume(states.blank(LAYOUTS, MESH, four.rank))
            flip(path, slot.offset + byte, four)
    state = states.blank(LAYOUTS, MESH, four.rank)
    assert saver.resume(state) == 1
    assert states.wrong(state, MESH, four.rank, 1) == []


@pytest.fixture
def small_disk(folder: Path, four: Group) -> Iterator[Path]:
    """A file system of 24 MiB."""
    place = folder / "small"

    def mount() -> str:
        if os.geteuid():
            return "mounting a small tmpfs needs root"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place]
        return subprocess.run(command, capture_output=True, text=True).stderr

    failed = four.share(mount() if four.leads else None)
    if failed:
        pytest.skip(failed)
    yield place
    four.barrier()
    if four.leads:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_run_goes_on_over_a_full_disk_and_saves_again_when_there_is_room(
    small_disk: Path, four: Group, monkeypatch: pytest.MonkeyPatch
):
    layouts = {"model/a": Layout((4, 500_000), "float32", (Cut(0, ("dp",)),))}  # 8 MB
    saver = point(small_disk, four, on_full="go on", keep=1)

    def save(step: int) -> Path | None:
        return saver.save_if_room(step, states.filled(layouts, MESH, four.rank, step), {})

    assert save(1) == small_disk / "step-00000001.h5"
    if four.leads:
        (small_disk / "filler").write_bytes(bytes(12 << 20))
    assert save(2) is None  # told by the room that is left

    def fill(path: Path) -> None:
        left = os.statvfs(small_disk)
        (small_disk / "more").write_bytes(bytes(left.f_bavail * left.f_frsize - (2 << 20)))

    if four.leads:
        (small_disk / "filler").unlink()
    monkeypatch.setattr(disk, "reserve", fill)
    assert save(3) is None  # told by a write that failed
    monkeypatch.undo()
    assert four.share(sorted(os.listdir(small_disk))) == ["latest", "more", "step-00000001.h5"]
    if four.leads:
        (small_disk / "more").unlink()
    assert save(4) == small_disk / "step-00000004.h5"
    state = states.blank(layouts, MESH, four.rank)
    assert saver.resume(state) == 4
    assert states.wrong(state, MESH, four.rank, 4) == []
