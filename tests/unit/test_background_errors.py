"""What a failure of a save in the background leaves, and who hears of it."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hpctrain.checkpoint import disk, flight, keep
from hpctrain.checkpoint.background import Background
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.saver import Saver
from hpctrain.errors import CheckpointError, DivergedError, FullError
from hpctrain.plan.mesh import Mesh
from tests.support import saving, states
from tests.support.saving import ROWS, behind, each, failing, resume, slow


@pytest.mark.parametrize("rank_that_fails", [0, 1, 3])
def test_a_write_that_fails_on_one_rank_is_raised_on_all_at_the_next_step(tmp_path: Path, monkeypatch, rank_that_fails):
    mesh = Mesh((("dp", 4),))
    saving.save(tmp_path, ROWS, mesh, 1)
    failing(monkeypatch, rank_that_fails, errno.EIO)

    def act(point: Checkpoint, rank: int) -> str:
        point.begin(2, states.filled(ROWS, mesh, rank, 2), {})
        with pytest.raises(CheckpointError) as caught:
            while True:
                assert point.advance() is None
        assert not point.under_way and point.advance() is None
        return str(caught.value)

    (told,) = set(each(tmp_path, mesh, act))
    part = rf"{tmp_path}/\.step-00000002\.h5\..+\.part"
    assert re.fullmatch(rf"rank {rank_that_fails}: writing {part} failed\n  {part}: Input/output error", told)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000001.h5"]
    assert resume(tmp_path, ROWS, mesh) == 1


def test_after_a_failure_the_next_save_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh = Mesh((("dp", 4),))
    failing(monkeypatch, 2, errno.EIO)

    def act(point: Checkpoint, rank: int) -> Path:
        with pytest.raises(CheckpointError, match="rank 2: writing"):
            behind(point, rank, ROWS, mesh, 2)
        return behind(point, rank, ROWS, mesh, 3)

    assert each(tmp_path, mesh, act)[0] == tmp_path / "step-00000003.h5"
    assert resume(tmp_path, ROWS, mesh) == 3


@pytest.mark.parametrize("step", [1, 2])
def test_room_that_cannot_be_set_aside_is_told_on_all_ranks_and_no_rank_goes_on_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
):
    mesh, real = Mesh((("dp", 3),)), disk.reserve
    writes, written = [], disk.write

    def reserve(path: Path) -> None:
        if f"step-{step:08}" in path.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path)

    monkeypatch.setattr(disk, "reserve", reserve)
    monkeypatch.setattr(disk, "write", lambda path, *rest: writes.append(path) or written(path, *rest))

    def act(point: Checkpoint, rank: int) -> None:
        for before in range(1, step):
            behind(point, rank, ROWS, mesh, before)
        writes.clear()
        with pytest.raises(FullError, match=rf"rank 0: laying out step {step} failed\n  .*No space left.*\n  free"):
            behind(point, rank, ROWS, mesh, step)

    each(tmp_path, mesh, act)
    assert writes == []
    assert [name for name in os.listdir(tmp_path) if name.endswith(".part")] == []


def test_bytes_that_never_came_into_the_file_are_found_by_the_ranks_that_share_a_block(tmp_path: Path, monkeypatch):
    mesh, real = Mesh((("dp", 4),)), disk.write

    def write(path: Path, pieces: Any, sync: bool, *more: Any) -> None:
        found = list(pieces)
        lost = found[0].memory[:4].view(torch.float32)[0] == (2 * 1_000_000 + 1) % states.MODULUS
        real(path, found[:0] if lost else found, sync)

    monkeypatch.setattr(disk, "write", write)

    def act(point: Checkpoint, rank: int) -> None:
        with pytest.raises(CheckpointError, match="model/a does not have the bytes that were written"):
            behind(point, rank, ROWS, mesh)
        assert not point.under_way

    each(tmp_path, mesh, act)
    assert os.listdir(tmp_path) == []


def test_a_file_that_a_rank_never_sees_is_an_error_that_names_the_rank(tmp_path: Path, monkeypatch):
    mesh, real = Mesh((("dp", 2),)), flight._opens
    monkeypatch.setattr(flight, "SEEN_SECONDS", 0.1)
    monkeypatch.setattr(flight, "_opens", lambda path: threading.current_thread() in leading and real(path))
    leading: list[threading.Thread] = []
    make = Background._make

    def made(self: Background, *rest: Any) -> None:
        leading.append(threading.current_thread())
        make(self, *rest)

    monkeypatch.setattr(Background, "_make", made)

    def act(point: Checkpoint, rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            behind(point, rank, ROWS, mesh)
        return str(caught.value)

    (told,) = set(each(tmp_path, mesh, act))
    assert re.fullmatch(
        r"rank 1: .+\.part cannot be seen after 0\.1 s\n"
        r"  rank 0 has not made it yet, or this rank's node does not show it\n"
        r"  see whether all nodes mount the run's folder \(run\.dir\), or set checkpoint\.background to false",
        told,
    )
    assert os.listdir(tmp_path) == []


def test_a_disk_that_does_not_answer_ends_the_save_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, go = Mesh((("dp", 2),)), slow(monkeypatch)
    monkeypatch.setattr(flight, "STILL_SECONDS", 0.5)
    monkeypatch.setattr(flight, "CLOSE_SECONDS", 0.1)

    def act(point: Checkpoint, rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            behind(point, rank, ROWS, mesh)
        return str(caught.value)

    try:
        (told,) = set(each(tmp_path, mesh, act))
    finally:
        go.set()
    assert re.fullmatch(
        r"rank [01].*: writing .+\.part does not go on\n"
        r"  for 0\.5 s the file system has not answered a call\n"
        r"  see whether the file system is well",
        told,
    )
    assert os.listdir(tmp_path) == []


def test_an_error_elsewhere_in_a_run_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    mesh, go = Mesh((("dp", 2),)), slow(monkeypatch)

    def act(point: Checkpoint, rank: int) -> None:
        state = states.filled(ROWS, mesh, rank, 1)
        with pytest.raises(ZeroDivisionError), Saver(point, state, {}, lambda line: None) as saver:
            saver.step(2, last=False)
            assert point.under_way
            threading.Timer(0.1, go.set).start()
            raise ZeroDivisionError
        assert not point.under_way
        point.group.barrier()

    each(tmp_path, mesh, act, {"every": 2})
    assert os.listdir(tmp_path) == []


def test_an_error_that_all_ranks_meet_waits_for_the_save_under_way(tmp_path: Path):
    mesh = Mesh((("dp", 2),))

    def act(point: Checkpoint, rank: int) -> list[str]:
        said: list[str] = []
        with pytest.raises(DivergedError), Saver(point, states.filled(ROWS, mesh, rank, 2), {}, said.append) as saver:
            saver.step(2, last=False)
            raise DivergedError("the gradient is no number")
        return said

    assert each(tmp_path, mesh, act, {"every": 2}) == [[f"saved {tmp_path}/step-00000002.h5"]] * 2
    assert resume(tmp_path, ROWS, mesh) == 2


def test_a_disk_that_fills_in_the_background_stops_a_run_or_not_as_the_config_says(tmp_path: Path, monkeypatch, caplog):
    mesh = Mesh((("dp", 4),))
    broken = failing(monkeypatch, 1, errno.ENOSPC)

    def act(point: Checkpoint, rank: int) -> list[str]:
        said: list[str] = []
        with Saver(point, states.filled(ROWS, mesh, rank, 2), {}, said.append) as saver:
            for step in (2, 3, 4):
                saver.step(step, last=False)
            point.group.barrier()
            broken[0] = False
            saver.step(5, last=True)
        return said

    with pytest.raises(FullError, match="rank 1: writing .* failed\n  .*No space left on device\n  free space"):
        each(tmp_path, mesh, act, {"every": 2, "on_full": "stop"})
    assert keep.listing(tmp_path) == []
    broken[0] = True
    said = each(tmp_path, mesh, act, {"every": 2, "on_full": "go on"})[0]
    assert said[-1] == f"saved {tmp_path}/step-00000005.h5" and said[0] == "step 2 was not saved, and training goes on"
    assert "step 2 was not saved: rank 1: writing" in caplog.text and "No space left on device" in caplog.text
    assert [name for name in os.listdir(tmp_path) if name.endswith(".part")] == []
