"""Shared memory that a killed life of a job has left goes; what a process still uses stays."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cluster import leftovers
from hpctrain.cluster.leftovers import clear


@pytest.fixture(autouse=True)
def old(monkeypatch) -> None:
    """No file is too young."""
    monkeypatch.setattr(leftovers, "YOUNG_SECONDS", -1.0)


def memory(folder: Path, name: str = "mpich_shm_1a2b_0") -> Path:
    path = folder / name
    path.write_bytes(bytes(4096))
    return path


def test_what_no_process_has_mapped_goes_and_other_files_stay(tmp_path: Path) -> None:
    left, other = memory(tmp_path), memory(tmp_path, "vader_segment.node1.0")
    assert clear(tmp_path) == [left]
    assert list(tmp_path.iterdir()) == [other]


def test_what_this_process_has_mapped_stays(tmp_path: Path) -> None:
    path = memory(tmp_path)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert clear(tmp_path) == [] and path.exists()
    assert clear(tmp_path) == [path]


def test_what_another_process_has_mapped_stays_until_it_is_killed(tmp_path: Path) -> None:
    path = memory(tmp_path)
    program = (
        "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print(1, flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        user.stdout.readline()
        assert clear(tmp_path) == []
        user.kill()
    assert clear(tmp_path) == [path]


def test_a_file_that_was_just_made_stays(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(leftovers, "YOUNG_SECONDS", 60.0)
    assert memory(tmp_path).exists() and clear(tmp_path) == []


def test_a_file_that_got_the_name_meanwhile_stays(tmp_path: Path, monkeypatch) -> None:
    path = memory(tmp_path)

    def another_rank(file: object, how: int) -> None:
        path.unlink()  # removed and made anew between the look and the lock
        memory(tmp_path)

    monkeypatch.setattr(fcntl, "flock", another_rank)
    assert clear(tmp_path) == [] and path.exists()


def test_a_file_that_another_rank_is_removing_is_left_to_it(tmp_path: Path) -> None:
    path = memory(tmp_path)
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert clear(tmp_path) == [] and path.exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_what_belongs_to_another_user_stays(tmp_path: Path) -> None:
    path = memory(tmp_path)
    os.chown(path, 12345, -1)
    assert clear(tmp_path) == [] and path.exists()
