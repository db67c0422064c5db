"""Whole jobs, started as a user starts them and watched from outside: ``launch`` and ``cluster`` give them to tests."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NoReturn

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
VENVS = {"main": ROOT / ".venv", "mpich": ROOT / ".venv-mpich"}
MARK = "HPCTRAIN_TEST_JOB"  # in the environment of everything that a job starts, so that all of it can be found


class Job:
    """A job that was started: its processes, its output so far, and its end."""

    def __init__(self, command: list[str], env: Mapping[str, str], folder: Path, cwd: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.out, self.err = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        with self.out.open("wb") as out, self.err.open("wb") as err:  # files: no reader can be late, no pipe stays open
            self.process = subprocess.Popen(
                command, env={**env, MARK: self.mark}, cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                start_new_session=True,
            )  # fmt: skip

    @property
    def stdout(self) -> str:
        """What the job printed so far."""
        return self.out.read_text(errors="replace")

    @property
    def stderr(self) -> str:
        """What the job said on its error stream so far."""
        return self.err.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """Every live process that this job started, on this machine."""
        return [process for process in psutil.process_iter() if self._owns(process)]

    def ranks(self) -> dict[int, psutil.Process]:
        """The live processes that the MPI launcher itself started, by rank."""
        ranked = [process for process in self.processes() if _rank(process) is not None]
        return {_rank(process): process for process in ranked if _rank(process.parent()) is None}

    def wait(self, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """The job's end; one that does not end in time is stopped with its tracebacks, and fails the test."""
        if not _until(lambda: self.process.poll() is not None, timeout):
            self.stop()
            self._fail(f"did not end in {timeout} s")
        if not _until(lambda: not self.processes(), seconds=15):
            names = ", ".join(f"{process.pid} {process.name()}" for process in self.processes())
            self.stop()
            self._fail(f"left processes behind: {names}")
        return subprocess.CompletedProcess(self.process.args, self.process.returncode, self.stdout, self.stderr)

    def stop(self) -> None:
        """End every process of the job: first so that Python prints its tracebacks, then for certain."""
        for number, seconds in ((signal.SIGABRT, 5), (signal.SIGKILL, 10)):
            for process in self.processes():
                _signal(process, number)
            if _until(lambda: not self.processes(), seconds):
                break
        self.process.wait()

    def _owns(self, process: psutil.Process) -> bool:
        return _environ(process).get(MARK) == self.mark

    def _fail(self, why: str) -> NoReturn:
        command = " ".join(map(str, self.process.args))
        pytest.fail(f"{command}\n{why}\n--- stdout\n{self.stdout[-8000:]}\n--- stderr\n{self.stderr[-16000:]}")


class Launch:
    """``launch(ranks, "python", "-c", "...")`` runs a job to its end; ``launch.start(...)`` leaves it running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: list[Job] = []

    def __call__(
        self,
        ranks: int,
        *argv: object,
        env: Mapping[str, str] | None = None,
        timeout: float = 120,
        mpi: str = "main",
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a job and give its exit code and its output. ``ranks`` 0 starts it alone, with no MPI launcher.

        A first word of ``python`` or ``hpctrain`` is the one of the environment; ``mpi`` is ``main`` (the MPI that
        set-up chose) or ``mpich``.
        """
        return self.start(ranks, *argv, env=env, mpi=mpi, cwd=cwd).wait(timeout)

    def start(
        self,
        ranks: int,
        *argv: object,
        env: Mapping[str, str] | None = None,
        mpi: str = "main",
        cwd: Path | None = None,
    ) -> Job:
        """Start a job and leave it running; what is left of it when the test ends is ended then."""
        venv = VENVS[mpi]
        if not (venv / "bin/python").exists():
            pytest.skip(f"no {venv.name}: make test makes it")
        job = Job(_command(ranks, argv), _environment(venv, env or {}), self.folder, cwd or self.folder)
        self.jobs.append(job)
        return job

    def close(self) -> None:
        """End what still runs."""
        for job in self.jobs:
            job.stop()


def _command(ranks: int, argv: tuple[object, ...]) -> list[str]:
    words = [str(word) for word in argv]
    return [str(ROOT / ".ci/mpirun"), str(ranks), *words] if ranks else words


def _environment(venv: Path, extra: Mapping[str, str]) -> dict[str, str]:
    path = f"{venv / 'bin'}:{os.environ['PATH']}"
    own = {"HPCTRAIN_VENV": str(venv), "PATH": path, "PYTHONPATH": str(ROOT), "PYTHONFAULTHANDLER": "1"}
    return {**os.environ, **own, **extra}


def _environ(process: psutil.Process | None) -> dict[str, str]:
    try:
        return process.environ() if process and process.status() != psutil.STATUS_ZOMBIE else {}
    except (psutil.Error, OSError):
        return {}


def _rank(process: psutil.Process | None) -> int | None:
    variables = _environ(process)
    rank = variables.get("OMPI_COMM_WORLD_RANK", variables.get("PMI_RANK"))
    return None if rank is None else int(rank)


def _signal(process: psutil.Process, number: int) -> None:
    try:
        process.send_signal(number)
    except psutil.NoSuchProcess:
        pass


def _until(done: Callable[[], bool], seconds: float) -> bool:
    """Whether ``done`` became true within ``seconds``."""
    limit = time.monotonic() + seconds
    while not done():
        if time.monotonic() > limit:
            return False
        time.sleep(0.05)
    return True
