"""The folder of checkpoints: what is taken, what is published, what goes."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from hpctrain.checkpoint import format, keep
from hpctrain.cluster import aside
from hpctrain.errors import CheckpointError, IncompleteError


def whole(folder: Path, step: int) -> Path:
    """A whole checkpoint of no tensors."""
    path = folder / keep.file_name(step)
    format.lay_out(path, [], step, {})
    format.mark_complete(path, [], np.empty(0, np.uint64))
    return path


def broken(folder: Path, step: int) -> Path:
    """One whose writing did not end, under a finished one's name."""
    path = folder / keep.file_name(step)
    format.lay_out(path, [], step, {})
    return path


def steps(folder: Path) -> list[int]:
    return sorted(int(name[5:-3]) for name in os.listdir(folder) if name.startswith("step-"))


def newest(folder: Path) -> int | None:
    found = keep.newest(folder, keep.listing(folder))
    return found and found[1].step


def test_the_newest_is_the_one_of_the_highest_step_whatever_its_digits(tmp_path: Path):
    for step in (9, 100_000_000, 99_999_999):
        whole(tmp_path, step)
    assert newest(tmp_path) == 100_000_000


def test_other_files_are_left_alone(tmp_path: Path):
    for name in ("step-1.h5", "step-00000009.h5.bak", "notes.txt", ".step-00000009.h5.part", "latest"):
        (tmp_path / name).write_text("mine")
    assert newest(tmp_path) is None
    whole(tmp_path, 3)
    keep.sweep(tmp_path, keep.listing(tmp_path))
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1), 3)
    assert len(os.listdir(tmp_path)) == 6
    assert newest(tmp_path) == 3


def test_a_folder_that_is_not_there_has_nothing_and_one_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch):
    assert keep.listing(tmp_path / "none") == []

    def fail(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(OSError, match="Input/output error"):
        keep.listing(tmp_path)


def test_what_is_not_whole_is_passed_over_and_named(tmp_path: Path, caplog):
    whole(tmp_path, 1)
    broken(tmp_path, 2)
    assert newest(tmp_path) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith(f"skipped: {tmp_path}/step-00000002.h5 is incomplete; its writing did not")


def test_nothing_whole_is_an_error_that_says_how_to_begin_again(tmp_path: Path):
    broken(tmp_path, 1)
    broken(tmp_path, 2)
    with pytest.raises(IncompleteError) as caught:
        newest(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has 2 checkpoints and none of them is whole\n"
        "  the log names each and its fault\n  remove them to start from the beginning"
    )


@pytest.mark.parametrize("sync", [True, False])
def test_publishing_gives_the_name_moves_the_pointer_and_replaces_an_older_file_of_the_step(tmp_path: Path, sync: bool):
    broken(tmp_path, 4)
    part = tmp_path / keep.part_name(keep.file_name(4))
    whole(tmp_path, 7).rename(part)
    keep.publish(part, tmp_path / keep.file_name(4), sync)
    assert sorted(os.listdir(tmp_path)) == ["latest", "step-00000004.h5"]
    assert (tmp_path / "latest").read_text() == "step-00000004.h5\n"
    assert newest(tmp_path) == 7  # the content is the new one's


def test_the_newest_so_many_stay(tmp_path: Path):
    for step in (10, 20, 30, 40):
        whole(tmp_path, step)
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(2), 40)
    assert steps(tmp_path) == [30, 40]


def test_a_broken_file_does_not_count_as_one_that_is_kept(tmp_path: Path):
    for step in (10, 20, 40):
        whole(tmp_path, step)
    broken(tmp_path, 30)
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(2), 40)
    assert steps(tmp_path) == [20, 30, 40]


def test_what_was_just_saved_stays_though_later_steps_are_there(tmp_path: Path):
    for step in (10, 20, 90):
        whole(tmp_path, step)
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1), 20)
    assert steps(tmp_path) == [20, 90]


def test_files_aside_of_the_dead_go_and_those_of_the_living_stay(tmp_path: Path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    here = socket.gethostname()
    names = {
        "mine": keep.part_name(keep.file_name(1)),
        "dead": f".step-00000001.h5.{here}.{gone.pid}.0badcafe.part",
        "dead pointer": f".latest.{here}.{gone.pid}.0badcafe.part",
        "elsewhere": ".step-00000001.h5.another-host.example.1.0badcafe.part",
        "elsewhere, long ago": ".step-00000002.h5.another-host.example.1.0badcafe.part",
        "mine, long ago": keep.part_name(keep.file_name(2)),
    }
    for name in names.values():
        (tmp_path / name).write_text("half")
    long_ago = time.time() - aside.STALE_SECONDS - 60
    for key in ("elsewhere, long ago", "mine, long ago"):
        os.utime(tmp_path / names[key], (long_ago, long_ago))
    keep.sweep(tmp_path, keep.listing(tmp_path))
    assert sorted(os.listdir(tmp_path)) == sorted([names["mine"], names["elsewhere"]])


def test_no_two_files_aside_have_one_name():
    assert len({keep.part_name("step-00000001.h5") for _ in range(100)}) == 100
    assert re.fullmatch(keep.PART_FILE, keep.part_name("step-00000001.h5"))
    assert re.fullmatch(keep.PART_FILE, keep.part_name("latest"))


def test_room_is_asked_for_where_the_folder_will_be(tmp_path: Path):
    keep.check_room(tmp_path / "not" / "yet", 1)
    with pytest.raises(CheckpointError) as caught:
        keep.check_room(tmp_path / "not" / "yet", 1 << 60)
    assert re.fullmatch(
        rf"{tmp_path}/not/yet: a checkpoint needs {1 << 60} bytes and \d+ are free\n"
        "  the newest one stays until the next is whole, so there must be room for both\n"
        r"  free space there, give another folder \(run.dir\), or lower checkpoint.keep",
        str(caught.value),
    )


def test_steps_that_keep_every_divides_stay_for_good(tmp_path: Path):
    for step in range(10, 80, 10):
        whole(tmp_path, step)
        keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1, every=30), step)
    assert steps(tmp_path) == [30, 60, 70]


def test_one_every_so_many_hours_is_put_on_the_list_and_stays(tmp_path: Path):
    kept = tmp_path / "kept"
    for step, hours_since_the_last in ((10, None), (20, 1), (30, 2.5), (40, 0), (50, 2), (60, 0.1)):
        if hours_since_the_last is not None:
            os.utime(kept, (time.time() - hours_since_the_last * 3600,) * 2)
        whole(tmp_path, step)
        keep.hold(tmp_path, keep.file_name(step), hours=2)
        keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1), step)
    assert kept.read_text().split() == [keep.file_name(step) for step in (10, 30, 50)]
    assert steps(tmp_path) == [10, 30, 50, 60]


def test_a_name_that_a_person_puts_on_the_list_stays_and_one_taken_off_goes(tmp_path: Path):
    for step in (10, 20, 30):
        whole(tmp_path, step)
    (tmp_path / "kept").write_text("step-00000010.h5\n")
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1), 30)
    assert steps(tmp_path) == [10, 30]
    (tmp_path / "kept").write_text("")
    keep.prune(tmp_path, keep.listing(tmp_path), keep.Keep(1), 30)
    assert steps(tmp_path) == [30]


def test_without_hours_no_list_is_made(tmp_path: Path):
    whole(tmp_path, 10)
    keep.hold(tmp_path, keep.file_name(10), hours=0)
    assert os.listdir(tmp_path) == ["step-00000010.h5"]
