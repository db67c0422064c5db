"""What can go wrong with a checkpoint: every rank meets it, and what was there before stays."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

import pytest
import torch

from hpctrain.checkpoint import disk, format, keep, shared_file
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.save import writer
from hpctrain.checkpoint.state import Held
from hpctrain.comm.group import SoloGroup
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, FullError, IncompleteError
from hpctrain.plan.layout import Cut, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import each, resume, save


def test_two_layouts_of_one_name_are_an_error_on_all_ranks(tmp_path: Path):
    mesh = Mesh((("dp", 3),))

    def act(point: Checkpoint, rank: int) -> str:
        layouts = {"model/same": Layout((4,), "float32"), "model/odd": Layout((4 + (rank == 2),), "float32")}
        with pytest.raises(CheckpointError) as caught:
            point.save(1, states.filled(layouts, mesh, rank), {})
        return str(caught.value)

    (told,) = set(each(tmp_path, mesh, act))
    assert told.startswith("model/odd: ranks 0 and 2 have different layouts for it\n  rank 0: {")
    assert told.endswith("give one name one global shape, dtype and cut on all ranks")
    assert not tmp_path.joinpath("latest").exists()


def test_a_tensor_that_is_cut_over_ranks_that_do_not_hold_it_is_an_error(tmp_path: Path):
    mesh = Mesh((("dp", 4),))
    layout = Layout((8,), "float32", (Cut(0, ("dp",)),))

    def act(point: Checkpoint, rank: int) -> None:
        held = {"model/a": layout} if rank else {}
        with pytest.raises(CheckpointError, match="model/a: 3 of 4 ranks along dp hold it\n  its layout cuts it over"):
            point.save(1, states.filled(held, mesh, rank), {})

    each(tmp_path, mesh, act)


def test_holders_that_are_no_grid_are_an_error(tmp_path: Path):
    mesh = Mesh((("pp", 2), ("dp", 2)))

    def act(point: Checkpoint, rank: int) -> None:
        layouts = {"model/a": Layout((8,), "float32")} if rank < 3 else {}
        with pytest.raises(CheckpointError, match=r"model/a: ranks \[0, 1, 2\] hold it, which is no sub-grid"):
            point.save(1, states.filled(layouts, mesh, rank), {})

    each(tmp_path, mesh, act)


def test_a_tensor_of_another_size_than_its_layout_is_an_error_on_all_ranks(tmp_path: Path):
    mesh = Mesh((("dp", 2),))

    def act(point: Checkpoint, rank: int) -> None:
        held = Held(Layout((8,), "float32"), torch.zeros(8 - rank))
        with pytest.raises(CheckpointError) as caught:
            point.save(1, {"model/a": held}, {})
        assert caught.value.what == (
            "rank 1: model/a: a tensor of 7 float32, where the layout has 8 float32"
        )

    each(tmp_path, mesh, act)


def test_everything_that_does_not_fit_is_told_at_once(tmp_path: Path):
    alone = Mesh((("dp", 1),))
    same = {"model/a": Layout((3,), "float32")}
    save(tmp_path, same | {"model/b": Layout((4,), "float32"), "optim/c": Layout((2,), "float32")}, alone)
    wanted = same | {"model/b": Layout((4,), "bfloat16"), "model/d": Layout((9, 2), "int64")}
    with pytest.raises(CheckpointError) as caught:
        resume(tmp_path, wanted, alone)
    assert str(caught.value) == (
        f"{tmp_path}/step-00000001.h5 does not fit this run: 3 tensors differ\n"
        "  model/b: float32 [4] in the file, this run wants bfloat16 [4]\n"
        "  model/d: not in the file, this run wants int64 [9, 2]\n"
        "  optim/c: in the file alone\n"
        "  start with the configuration it was saved with (hpctrain ckpt inspect shows it), or begin a new run from"
        f" its weights: another run.name, and checkpoint.start_from = '{tmp_path}/step-00000001.h5'"
    )


def test_a_disk_too_small_is_told_before_anything_is_written(tmp_path: Path, monkeypatch, caplog):
    mesh = Mesh((("dp", 2),))
    layouts = {"model/a": Layout((100_000,), "float32")}
    save(tmp_path, layouts, mesh, 1, keep=1)
    real = os.statvfs(tmp_path)
    scarce = os.statvfs_result((real.f_bsize, 1024, 300, 300, 300, *tuple(real)[5:]))
    monkeypatch.setattr(os, "statvfs", lambda path: scarce)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, layouts, mesh, 2, keep=1)
    needed = format.needed_bytes([format.Slot("model/a", (100_000,), "float32", 0)])
    assert caught.value.what == f"{tmp_path}: a checkpoint needs {needed} bytes and {300 * 1024} are free"
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    assert resume(tmp_path, layouts, mesh) == 1
    assert f"a checkpoint needs {needed} bytes" in caplog.text  # said at the start of a run, before the first step


@pytest.mark.parametrize("failing", [0, 1, 3])
def test_a_write_that_fails_on_one_rank_fails_on_all_and_leaves_the_last_one(tmp_path: Path, monkeypatch, failing: int):
    mesh = Mesh((("dp", 4),))
    layouts = {"model/a": Layout((4, 1000, 1000), "float32", (Cut(0, ("dp",)),))}
    save(tmp_path, layouts, mesh, 1)
    real = disk.write

    def write(path: Path, pieces, *rest) -> None:
        found = list(pieces)
        if found[0].memory.view(torch.float32)[0] == (failing * 1_000_000 + 2) % states.MODULUS:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, found, *rest)

    monkeypatch.setattr(disk, "write", write)

    def act(point: Checkpoint, rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            point.save(2, states.filled(layouts, mesh, rank, 2), {})
        return str(caught.value)

    (told,) = set(each(tmp_path, mesh, act))
    part = rf"{tmp_path}/\.step-00000002\.h5\..+\.part"
    assert re.fullmatch(
        rf"rank {failing}: writing {part} failed\n"
        rf"  {part}: No space left on device\n"
        r"  free space there, or give another folder \(run.dir\)",
        told,
    )
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    assert resume(tmp_path, layouts, mesh) == 1


def test_a_lock_that_cannot_be_had_is_told_with_the_place_and_a_remedy(tmp_path: Path, monkeypatch):
    def refuse(path: Path) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK), str(path))

    monkeypatch.setattr(disk, "reserve", refuse)
    with pytest.raises(CheckpointError) as caught:
        save(tmp_path, {"model/a": Layout((8,), "float32")}, Mesh((("dp", 2),)))
    assert re.fullmatch(
        rf"laying out step 1 failed\n  {tmp_path}/\.step-00000001\.h5\..*\.part: No locks available\n"
        "  the file system has no lock service: mount it with locks, or set checkpoint.writer to direct",
        str(caught.value),
    )


def test_attributes_that_are_no_json_are_an_error_and_leave_nothing(tmp_path: Path):
    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError, match="laying out step 1 failed\n  TypeError: .* not JSON serializable"):
            point.save(1, {}, {"a": object()})

    each(tmp_path, Mesh((("dp", 2),)), act)
    assert os.listdir(tmp_path) == []


def test_a_broken_newest_file_is_passed_over_with_one_line(tmp_path: Path, caplog):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((100_000,), "float32")}
    for step in (1, 2, 3):
        path = save(tmp_path, layouts, mesh, step, keep=3)
    os.truncate(path, 300_000)
    tmp_path.joinpath("step-00000009.h5").write_text("not HDF5")
    assert resume(tmp_path, layouts, mesh) == 2
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("skipped")]
    assert len(lines) == 2
    assert "step-00000009.h5 is not an HDF5 file" in lines[0]
    assert "step-00000003.h5 is incomplete" in lines[1]
    save(tmp_path, layouts, mesh, 3)
    assert resume(tmp_path, layouts, mesh) == 3


def test_a_folder_with_nothing_whole_is_an_error_and_an_empty_one_is_a_beginning(tmp_path: Path):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((10,), "float32")}
    assert resume(tmp_path / "new", {}, mesh) == 0
    os.truncate(save(tmp_path, layouts, mesh), 100)
    with pytest.raises(IncompleteError, match="has 1 checkpoints and none of them is whole"):
        resume(tmp_path, layouts, mesh)


def test_one_rank_lists_the_folder_once(tmp_path: Path, monkeypatch):
    mesh, layouts = Mesh((("dp", 4),)), {"model/a": Layout((10,), "float32")}
    save(tmp_path, layouts, mesh)
    listed, real = [], os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listed.append(path) or real(path))
    assert resume(tmp_path, layouts, mesh) == 1
    assert listed == [tmp_path]


def test_a_folder_that_cannot_be_listed_is_an_error_on_all_ranks_and_no_new_beginning(tmp_path: Path, monkeypatch):
    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(keep.os, "listdir", fail)

    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError) as caught:
            point.resume({})
        assert str(caught.value) == f"looking for checkpoints in {tmp_path} failed\n  {tmp_path}: Input/output error"
        with pytest.raises(CheckpointError, match="Input/output error"):
            point.newest()

    each(tmp_path, Mesh((("dp", 3),)), act)


def test_a_file_that_may_not_be_read_is_an_error_and_no_older_one_is_taken(tmp_path: Path, monkeypatch):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((10,), "float32")}
    save(tmp_path, layouts, mesh, 1)
    save(tmp_path, layouts, mesh, 2)
    real = os.open

    def refuse(path, *rest, **more):
        if str(path).endswith("step-00000002.h5"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(CheckpointError, match="looking for .* failed\n  .*step-00000002.h5: Permission denied"):
        resume(tmp_path, layouts, mesh)


def test_due_is_every_so_many_steps_and_never_at_the_start():
    point = Checkpoint(CheckpointConfig(every=5), Path("x"), Mesh((("dp", 1),)), SoloGroup())
    assert [step for step in range(21) if point.due(step)] == [5, 10, 15, 20]
    assert not any(Checkpoint(CheckpointConfig(), Path("x"), Mesh(()), SoloGroup()).due(step) for step in range(9))


def test_mpio_without_parallel_hdf5_says_what_to_do(monkeypatch):
    for parallel, why in ((False, "this h5py is a serial build"), (True, "these ranks talk by SoloGroup")):
        monkeypatch.setattr(shared_file, "available", lambda parallel=parallel: parallel)
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(CheckpointConfig(writer="mpio"), Path("x"), Mesh((("dp", 1),)), SoloGroup())
        assert str(caught.value) == (
            'checkpoint.writer = "mpio" cannot be used here\n'
            f"  {why}; mpio needs h5py built with HDF5_MPI=ON, and ranks that talk by MPI\n"
            '  leave checkpoint.writer "auto", or set it to "direct": the file is the same'
        )
    assert writer("auto", SoloGroup()) is writer("direct", SoloGroup())


def test_the_newest_is_a_path_or_none(tmp_path: Path):
    point = Checkpoint(CheckpointConfig(sync=False), tmp_path, Mesh(()), SoloGroup())
    assert point.newest() is None
    path = point.save(7, {}, {"a": 1})
    assert point.newest() == path == tmp_path / "step-00000007.h5"
    assert format.read_attributes(path) == {"a": 1}


@pytest.mark.parametrize("on_full", ["stop", "go on"])
def test_a_full_disk_stops_the_run_or_skips_the_save_as_the_config_says(
    tmp_path: Path, monkeypatch, caplog, on_full: str
):
    mesh, layouts = Mesh((("dp", 2),)), {"model/a": Layout((100_000,), "float32", (Cut(0, ("dp",)),))}
    save(tmp_path, layouts, mesh, 1)
    real, full = disk.reserve, [True]

    def reserve(path: Path) -> None:
        if full[0]:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), str(path))
        real(path)

    monkeypatch.setattr(disk, "reserve", reserve)

    def act(point: Checkpoint, rank: int) -> Path | None:
        return point.save_if_room(2, states.filled(layouts, mesh, rank, 2), {})

    if on_full == "stop":
        told = r"laying out step 2 failed\n  .*Disk quota exceeded\n  your quota is used up there: free space"
        with pytest.raises(FullError, match=told):
            each(tmp_path, mesh, act, {"on_full": on_full})
    else:
        assert each(tmp_path, mesh, act, {"on_full": on_full}) == [None, None]
        (line,) = [record.getMessage() for record in caplog.records]
        assert line.startswith("step 2 was not saved: laying out step 2 failed; ") and "quota exceeded" in line
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    full[0] = False
    assert each(tmp_path, mesh, act, {"on_full": on_full}) == [tmp_path / "step-00000002.h5"] * 2
    assert resume(tmp_path, layouts, mesh) == 2


def test_a_save_that_fails_for_another_reason_stops_the_run_whatever_a_full_disk_does(tmp_path: Path, monkeypatch):
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(disk, "reserve", fail)

    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError, match="Input/output error"):
            point.save_if_room(2, {}, {})

    each(tmp_path, Mesh((("dp", 2),)), act, {"on_full": "go on"})
