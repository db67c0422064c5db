"""Checkpoints by real ranks: two writers and one file, other numbers of ranks, and errors that all ranks meet."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from mpi4py import MPI

from hpctrain.checkpoint import disk, shared_file, stripes
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.comm.group import Group
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, FullError
from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states

pytestmark = pytest.mark.mpi(min_size=4)

SERIAL = pytest.mark.skipif(not shared_file.available(), reason="h5py is serial")
WRITERS = ["direct", pytest.param("mpio", marks=SERIAL)]
UNEVEN = {
    f"optim/exp_avg/{'x'.join(map(str, shape)) or 'scalar'}": Layout(shape, "float32")
    for shape in ((), (0,), (1,), (3,), (5,), (7,), (129,), (1000,), (7, 1, 129), (3, 0, 5))
}
MIXED = UNEVEN | {
    "model/rows": Layout((2000, 301), "bfloat16", (Cut(0, ("dp",)),)),
    "model/columns": Layout((60, 101), "float32", (Cut(1, ("dp",)),)),
    "model/replicated": Layout((1100, 1000), "float32"),
    "model/codes": Layout((999,), "float8_e4m3fn", (Cut(0, ("dp",)),)),
    "model/mask": Layout((37, 3), "bool"),
    "optim/exp_avg/flat": Layout((500, 301), "float64", (), Flat(("dp",), 3, 500 * 301 + 10)),
}


@pytest.fixture
def folder(comm: MPI.Comm, tmp_path: Path) -> Path:
    """One folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


@pytest.fixture(scope="module")
def groups(comm: MPI.Comm, first: Callable[[int], MPI.Comm | None]) -> Iterator[dict[int, Group | None]]:
    """A group of the first n ranks, for n from 1 to 4; None on the others."""
    parts = {ranks: first(ranks) for ranks in (1, 2, 3)} | {4: comm.Split(comm.rank // 4, comm.rank)}
    made = {ranks: MpiGroup(part) if part and part.size == ranks else None for ranks, part in parts.items()}
    yield made
    for group in made.values():
        if group:
            group.close()


@pytest.fixture
def four(groups: dict[int, Group | None]) -> Group:
    """Four ranks."""
    return groups[4]


def mesh(ranks: int) -> Mesh:
    return Mesh((("dp", ranks),))


def point(folder: Path, group: Group, **config: Any) -> Checkpoint:
    return Checkpoint(CheckpointConfig(**{"sync": False} | config), folder, mesh(group.size), group)


def put(folder: Path, group: Group, layouts: dict[str, Layout], step: int = 1, **config: Any) -> Path:
    """Save elements that count up from ``step``."""
    state = states.filled(layouts, mesh(group.size), group.rank, step)
    return point(folder, group, **config).save(step, state, {"run": "tiny"})


def put_behind(folder: Path, group: Group, layouts: dict[str, Layout], step: int = 1, **config: Any) -> Path:
    """As ``put``, in the background, while every tensor changes."""
    state = states.filled(layouts, mesh(group.size), group.rank, step)
    saving = point(folder, group, **config)
    assert saving.begin(step, state, {"run": "tiny"}) is None
    while not (path := saving.advance()):
        for held in state.values():
            held.tensor.zero_()
    return path


def taken(folder: Path, group: Group, layouts: dict[str, Layout]) -> tuple[int, list[str]]:
    """The step gone on from, and the names that came back wrong on this rank."""
    state = states.blank(layouts, mesh(group.size), group.rank)
    step = point(folder, group).resume(state)
    return step, states.wrong(state, mesh(group.size), group.rank, step)


def flat(layouts: dict[str, Layout]) -> dict[str, Layout]:
    """The same tensors, one after another in a flat buffer that is cut over dp."""
    total, offset, made = sum(layout.size for layout in layouts.values()), 0, {}
    for name, layout in layouts.items():
        made[name] = Layout(layout.shape, layout.dtype, (), Flat(("dp",), offset, total))
        offset += layout.size
    return made


def listed(folder: Path, group: Group) -> list[str]:
    """What is in the folder, as rank 0 sees it."""
    return group.share(sorted(os.listdir(folder)))


@pytest.mark.parametrize("writer", WRITERS)
def test_what_four_ranks_write_is_the_file_of_one_rank(folder: Path, groups: dict, four: Group, writer: str):
    path = put(folder / "four", four, MIXED, writer=writer)
    if groups[1]:
        alone = put(folder / "alone", groups[1], MIXED)
        assert path.read_bytes() == alone.read_bytes()
    assert taken(folder / "four", four, MIXED) == (1, [])


def test_what_four_ranks_write_in_the_background_is_the_file_of_a_save_that_is_waited_for(folder: Path, four: Group):
    waited, behind = put(folder / "waited", four, MIXED), put_behind(folder / "behind", four, MIXED)
    assert behind.read_bytes() == waited.read_bytes()
    assert listed(folder / "behind", four) == ["latest", "step-00000001.h5"]


@SERIAL
def test_the_mpio_writer_saves_at_once_instead_of_in_the_background(folder: Path, four: Group):
    state = states.filled(MIXED, mesh(4), four.rank, 1)
    path = point(folder, four, writer="mpio").begin(1, state, {"run": "tiny"})
    assert path == folder / "step-00000001.h5"
    assert taken(folder, four, MIXED) == (1, [])


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_checkpoint_of_four_ranks_goes_on_with_fewer(
    folder: Path, groups: dict, four: Group, ranks: int, writer: str
):
    put(folder, four, flat(UNEVEN), writer=writer)
    if group := groups[ranks]:
        assert taken(folder, group, flat(UNEVEN)) == (1, [])
        put(folder, group, flat(UNEVEN), 2, writer=writer)
    four.barrier()
    assert taken(folder, four, flat(UNEVEN)) == (2, [])


@pytest.mark.parametrize("writer", WRITERS)
def test_stages_with_other_names_and_a_rank_with_none_make_one_file(folder: Path, four: Group, writer: str):
    names = (["model/blocks.0", "model/blocks.1"], ["model/blocks.2"], ["model/blocks.3"], [])
    layouts = {name: Layout((300, 50 + four.rank), "float32") for name in names[four.rank]}
    path = put(folder, four, layouts, writer=writer)
    with h5py.File(path, locking=False) as file:
        found = {name: states.bits(torch.from_numpy(dataset[...])) for name, dataset in file["model"].items()}
    assert list(found) == [f"blocks.{number}" for number in range(4)]
    widths = {"blocks.0": 50, "blocks.1": 50, "blocks.2": 51, "blocks.3": 52}
    wanted = {name: states.bits(states.whole(Layout((300, width), "float32"), 1)) for name, width in widths.items()}
    assert found == wanted
    assert taken(folder, four, layouts) == (1, [])


@SERIAL
@pytest.mark.parametrize("call_bytes", [BLOCK_BYTES, shared_file.CALL_BYTES])
def test_no_call_of_parallel_hdf5_is_above_the_limit(
    folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch, call_bytes: int
):
    layouts = {
        "model/odd": Layout((5,), "float32", (Cut(0, ("dp",)),)),
        "model/cube": Layout((7, 111, 907), "bfloat16", (), Flat(("dp",), 3, 7 * 111 * 907 + 100)),
        "model/columns": Layout((301, 2100), "float64", (Cut(1, ("dp",)),)),
        "model/few.columns": Layout((400, 3), "float32", (Cut(1, ("dp",)),)),  # none for the last rank
    }
    calls, real = [], shared_file.SharedFile._put

    def counted(self: shared_file.SharedFile, piece: disk.Piece) -> None:
        calls.append(piece.memory.numel())
        real(self, piece)

    monkeypatch.setattr(shared_file, "CALL_BYTES", call_bytes)
    monkeypatch.setattr(shared_file.SharedFile, "_put", counted)
    path = put(folder / "mpio", four, layouts, writer="mpio")
    assert 0 < max(calls) <= call_bytes
    assert path.read_bytes() == put(folder / "direct", four, layouts).read_bytes()
    assert taken(folder / "mpio", four, layouts) == (1, [])


@SERIAL
def test_a_rank_that_cannot_open_the_file_leaves_no_other_waiting(
    folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch
):
    real = Path.open

    def refuse(self: Path, mode: str = "r", *rest: Any, **more: Any) -> Any:
        if mode == "r+b":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return real(self, mode, *rest, **more)

    if four.rank == 2:
        monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(CheckpointError, match=r"rank 2: opening .* failed\n.*Permission denied"):
        put(folder, four, MIXED, writer="mpio")
    assert [name for name in listed(folder, four) if name.startswith("step")] == []


@SERIAL
def test_hints_reach_mpi_io(folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch):
    given, real = [], shared_file.SharedFile.close

    def close(self: shared_file.SharedFile) -> None:
        given.append(self.hints())
        real(self)

    monkeypatch.setattr(shared_file.SharedFile, "close", close)
    put(folder, four, MIXED, writer="mpio", hints={"cb_nodes": 2, "romio_cb_write": "enable"})
    assert given[0].items() >= {"cb_nodes": "2", "romio_cb_write": "enable"}.items()
    assert taken(folder, four, MIXED) == (1, [])


@SERIAL
def test_a_file_with_stripes_is_made_by_mpi_io_and_filled(folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch):
    made, real = [], stripes.make

    def make(path: Path, hints: dict[str, Any]) -> bool:
        there = real(path, hints)
        made.append((there, path.stat().st_ino if there else None))
        return there

    monkeypatch.setattr(stripes, "make", make)
    path = put(folder, four, MIXED, writer="mpio", hints={"striping_factor": 2, "striping_unit": 1 << 20})
    assert made == ([(True, path.stat().st_ino)] if four.leads else [])
    assert taken(folder, four, MIXED) == (1, [])
    striped, plain = path.read_bytes(), put(folder, four, MIXED, writer="mpio").read_bytes()
    assert striped == plain
    assert [there for there, _ in made] == ([True, False] if four.leads else [])


@pytest.mark.parametrize("save", [put, put_behind])
def test_only_rank_0_looks_at_the_folder_so_a_stale_view_hurts_nobody(
    folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch, save: Callable[..., Path]
):
    put(folder, four, MIXED)
    looked: list[Any] = []

    def stale(path=".", *rest, **more):
        looked.append(path)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    for name in ("listdir", "scandir", "stat", "lstat", "statvfs", "mkdir"):
        monkeypatch.setattr(os, name, stale) if four.rank else None
    save(folder, four, MIXED, 2)
    found = taken(folder, four, MIXED)
    monkeypatch.undo()
    assert found == (2, [])
    assert [path for path in looked if str(folder) in str(path)] == []


def test_a_rank_that_cannot_read_is_named_on_all_ranks(folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch):
    path = put(folder, four, MIXED)

    def fail(opened, into, at):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    if four.rank == 2:
        monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(CheckpointError) as caught:
        taken(folder, four, MIXED)
    assert str(caught.value) == f"rank 2: reading {path} failed\n  {path}: Input/output error"


def test_a_file_that_is_cut_off_while_it_is_read_ends_the_load_on_all_ranks(
    folder: Path, four: Group, monkeypatch: pytest.MonkeyPatch
):
    path, real = put(folder, four, MIXED), disk.read

    def read(path: Path, pieces: Any, *rest: Any) -> None:
        os.truncate(path, 100_000)
        real(path, pieces, *rest)

    monkeypatch.setattr(disk, "read", read)
    with pytest.raises(CheckpointError, match=f"rank 0 .*: {path} ends at byte 100000, before its tensors do"):
        taken(folder, four, MIXED)


def test_another_program_may_have_a_finished_file_open(folder: Path, four: Group):
    path = put(folder, four, MIXED)
    reader = h5py.File(path) if four.rank == 3 else None  # with HDF5's own locks, as anybody opens it
    four.barrier()
    assert taken(folder, four, MIXED) == (1, [])
    put(folder, four, MIXED, 1)
    put(folder, four, MIXED, 2, keep=1)
    if reader:
        assert reader["model/mask"].shape == (37, 3)
        reader.close()
    assert taken(folder, four, MIXED) == (2, [])


@pytest.fixture
def small_disk(folder: Path, four: Group) -> Iterator[Path]:
    """A file system of 64 MiB."""
    place = folder / "small"

    def mount() -> str:
        if os.geteuid() or os.path.ismount(place):
            return "mounting a small tmpfs needs root"
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", place]
        return subprocess.run(command, capture_output=True, text=True).stderr

    failed = four.share(mount() if four.leads else None)
    if failed:
        pytest.skip(failed)
    yield place
    four.barrier()
    if four.leads:
        subprocess.run(["umount", "-l", place], check=True)


def test_a_disk_that_fills_in_mid_save_in_the_background_is_told_on_all_ranks(
    small_disk: Path, four: Group, monkeypatch: pytest.MonkeyPatch
):
    layouts = {"model/a": Layout((600, 8000), "float32", (Cut(0, ("dp",)),))}  # 19 MB
    put(small_disk, four, layouts, 1)

    def fill(path: Path) -> None:
        left = os.statvfs(small_disk)
        (small_disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - (4 << 20)))

    monkeypatch.setattr(disk, "reserve", fill)
    with pytest.raises(FullError, match=r"rank \d.*\.step-00000002\.h5\..*\.part.*\n.*No space left") as caught:
        put_behind(small_disk, four, layouts, 2)
    assert len(set(four.collect(str(caught.value)))) == 1
    assert listed(small_disk, four) == ["filler", "latest", "step-00000001.h5"]
    assert taken(small_disk, four, layouts) == (1, [])
    monkeypatch.undo()
    if four.leads:
        (small_disk / "filler").unlink()
    put_behind(small_disk, four, layouts, 2)
    assert taken(small_disk, four, layouts) == (2, [])


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("dim", [0, 1])
def test_a_disk_that_fills_in_mid_save_leaves_the_last_checkpoint_whole(
    small_disk: Path, four: Group, monkeypatch: pytest.MonkeyPatch, writer: str, dim: int
):
    layouts = {"model/a": Layout((600, 8000), "float32", (Cut(dim, ("dp",)),))}  # 19 MB
    put(small_disk, four, layouts, 1, writer=writer)

    def fill(path: Path) -> None:
        """Somebody else takes what was free, on a file system that sets nothing aside."""
        left = os.statvfs(small_disk)
        (small_disk / "filler").write_bytes(bytes(left.f_bavail * left.f_frsize - (4 << 20)))

    monkeypatch.setattr(disk, "reserve", fill)
    with pytest.raises(FullError, match=r"rank \d.*\.step-00000002\.h5\..*\.part") as caught:
        put(small_disk, four, layouts, 2, writer=writer)
    assert "No space left on device" in caught.value.why
    assert "free space there" in caught.value.mend
    assert len(set(four.collect(str(caught.value)))) == 1
    assert listed(small_disk, four) == ["filler", "latest", "step-00000001.h5"]
    assert taken(small_disk, four, layouts) == (1, [])
    monkeypatch.undo()
    if four.leads:
        (small_disk / "filler").unlink()
    put(small_disk, four, layouts, 2, writer=writer)
    assert taken(small_disk, four, layouts) == (2, [])


def test_a_disk_that_fills_before_room_is_set_aside_is_told_before_any_rank_writes(
    small_disk: Path, four: Group, monkeypatch: pytest.MonkeyPatch
):
    layouts = {"model/a": Layout((4, 2_400_000), "float32", (Cut(0, ("dp",)),))}  # 38 MB
    real, writes = disk.reserve, []

    def reserve(path: Path) -> None:
        (small_disk / "filler").write_bytes(bytes(30 << 20))
        real(path)

    monkeypatch.setattr(disk, "reserve", reserve)
    monkeypatch.setattr(disk, "write", lambda *rest: writes.append(rest))
    with pytest.raises(CheckpointError, match=r"laying out step 1 failed\n  .*No space left on device\n  free space"):
        put(small_disk, four, layouts)
    assert writes == []
    assert listed(small_disk, four) == ["filler"]


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(small_disk: Path, four: Group):
    layouts = {"model/a": Layout((4, 8_000_000), "float32", (Cut(0, ("dp",)),))}
    with pytest.raises(CheckpointError, match=r"a checkpoint needs \d+ bytes and \d+ are free"):
        put(small_disk, four, layouts)
    assert listed(small_disk, four) == []
