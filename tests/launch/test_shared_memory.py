"""Ranks of a node share memory under any MPI; too little of it is found before it is written to."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("shared_memory.py")


@pytest.fixture
def small(request, tmp_path):
    """A file system in memory, of as many MiB as the test says, in which Open MPI puts its windows."""
    if os.geteuid():
        pytest.skip("only root mounts a file system")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={request.param}m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("this machine lets no file system be mounted")
    yield {"OMPI_MCA_osc_sm_backing_directory": str(folder)}
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("mpi", ["main", "mpich"])
def test_ranks_of_a_node_share_memory(launch, mpi):
    ended = launch(4, "python", PROGRAM, 100_000, mpi=mpi)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Shared") == 4


@pytest.mark.parametrize("small", [40], indirect=True)
def test_buffers_that_do_not_fit_are_ordinary_memory(launch, small):
    ended = launch(2, "python", PROGRAM, 8_000_000, env=small)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Shared") == 2
    assert ended.stderr.count("MiB of shared memory are wanted") == 1  # of two buffers on two ranks


@pytest.mark.parametrize("small", [1], indirect=True)
def test_without_room_for_a_window_all_goes_by_messages(launch, small):
    ended = launch(2, "python", PROGRAM, 100_000, env=small)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("Plain") == 2
    assert ended.stderr.count("MiB of shared memory are wanted") == 1
