"""What happens to a run of tests when some ranks fail, hang, skip or see other tests than the rest."""

from __future__ import annotations

import re
import subprocess
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

CONFTEST = 'pytest_plugins = ["hpctrain.testing.plugin"]\n'
HEAD = """
import time
import pytest
from mpi4py import MPI
comm = MPI.COMM_WORLD
pytestmark = pytest.mark.mpi
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(launch, tmp_path: Path) -> Run:
    """``run(body, *options, ranks=2, mpi="main")`` runs tests with this body under the harness."""

    def start(body: str, *options: str, ranks: int = 2, mpi: str = "main") -> subprocess.CompletedProcess[str]:
        (tmp_path / "conftest.py").write_text(CONFTEST)
        (tmp_path / "pytest.ini").write_text("[pytest]\n")
        (tmp_path / "test_it.py").write_text(HEAD + textwrap.dedent(body))
        words = ("python", "-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--only-mpi", *options, "test_it.py")
        return launch(ranks, *words, mpi=mpi)

    return start


def summaries(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The closing lines of pytest."""
    return re.findall(r"=+ (.*) in [\d.:()s ]+=+", done.stdout)


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The failed assertions in the body of the report."""
    return re.findall(r"^E +AssertionError: (.*\S)", done.stdout, re.MULTILINE)


@pytest.mark.parametrize("mpi", ["main", "mpich"])
def test_a_run_that_passes_is_reported_once_and_by_rank_0(run: Run, mpi: str) -> None:
    done = run("def test_sum(): assert comm.allreduce(1) == comm.size\n", ranks=3, mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert summaries(done) == ["1 passed"]
    assert done.stdout.count("test_it.py .") == 1


def test_a_failure_on_one_rank_is_everybodys_and_tells_rank_and_text(run: Run) -> None:
    done = run("""
        def test_uneven():
            print("said by", comm.rank)
            assert comm.rank != 1, "only here"

        def test_after(): comm.barrier()
    """, ranks=3)  # fmt: skip
    assert done.returncode == 1
    assert summaries(done) == ["1 failed, 1 passed"]
    assert "failed on rank 1 of 3" in done.stdout
    assert told(done) == ["only here"]
    assert re.search("^FAILED test_it.py::test_uneven - failed on rank 1 of 3", done.stdout, re.MULTILINE)
    assert "said by 1" in done.stdout and "said by 0" not in done.stdout


def test_a_failure_on_all_ranks_is_shown_once(run: Run) -> None:
    done = run("def test_all(): assert 0, 'the same everywhere'\n")
    assert done.returncode == 1
    assert "failed on ranks 0, 1 of 2" in done.stdout
    assert told(done) == ["the same everywhere"]


@pytest.mark.parametrize("mpi", ["main", "mpich"])
def test_a_rank_that_fails_before_a_collective_ends_the_run_and_shows_its_failure(run: Run, mpi: str) -> None:
    done = run("""
        def test_uneven():
            assert comm.rank, "rank 0 gave up"
            comm.barrier()
    """, "-o", "mpi_patience_seconds=3", mpi=mpi)  # fmt: skip
    assert done.returncode != 0
    assert "test_it.py::test_uneven failed here in its call" in done.stderr
    assert "AssertionError: rank 0 gave up" in done.stderr
    assert re.search(r"rank 0 of 2 on \S+: .*other ranks did not come to its end; the whole job ends here", done.stderr)
    assert re.search(r"--- rank 1, all threads.*in test_uneven", done.stderr, re.DOTALL)


@pytest.mark.parametrize("mpi", ["main", "mpich"])
def test_a_test_that_hangs_ends_the_run_with_the_tracebacks_of_all_ranks(run: Run, mpi: str) -> None:
    done = run("""
        def wait_for_ever(): comm.recv(source=comm.rank)

        def test_hang():
            time.sleep(100) if comm.rank == 0 else wait_for_ever()
    """, "-o", "mpi_limit_seconds=3", mpi=mpi)  # fmt: skip
    assert done.returncode != 0
    assert "test_it.py::test_hang passed its limit of 3 s; the whole job ends here" in done.stderr
    first, second = done.stderr.split("--- rank 0, all threads")[1].split("--- rank 1, all threads")
    assert "in test_hang" in first
    assert "in wait_for_ever" in second


def test_ranks_that_never_let_go_of_the_interpreter_are_ended_too(run: Run) -> None:
    done = run("""
        import ctypes

        @pytest.mark.mpi_limit(2)
        def test_stuck(): ctypes.PyDLL(None).sleep(100)
    """)  # fmt: skip
    assert done.returncode != 0
    assert "Timeout (0:00:12)!" in done.stderr
    assert "in test_stuck" in done.stderr


def test_ranks_that_find_different_tests_do_not_begin(run: Run) -> None:
    done = run("""
        def test_here(): comm.barrier()

        if comm.rank:
            def test_only_there(): comm.barrier()
    """)  # fmt: skip
    assert done.returncode != 0
    assert "the ranks found different tests" in done.stdout


def test_a_set_up_that_skips_on_some_ranks_only_fails(run: Run) -> None:
    done = run("""
        @pytest.mark.skipif(comm.rank == 1, reason="not here")
        def test_half(): comm.barrier()
    """)  # fmt: skip
    assert done.returncode == 1
    assert "skipped before it began, but only on rank 1: skip on all ranks or on none" in done.stdout


def test_a_test_that_ends_early_on_ranks_that_it_does_not_need_passes(run: Run) -> None:
    done = run("""
        def test_alone():
            if comm.rank == 0:
                pytest.skip("rank 1 does it")
    """)  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert summaries(done) == ["1 passed"]


def test_a_run_that_only_skips_is_no_success(run: Run) -> None:
    done = run("""
        @pytest.mark.mpi(min_size=64)
        def test_large(): pass
    """)  # fmt: skip
    assert summaries(done) == ["1 skipped"]
    assert done.returncode == 5
