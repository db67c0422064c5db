"""A real Slurm cluster on this machine, and jobs in it that are started as a user starts them."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, VENVS, Job

LAB = ROOT / "slurm/lab"
EX_UNAVAILABLE = 69
UP_SECONDS = 600  # apt may have to wait for another apt
OVER = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "PREEMPTED"}
# Each MPI library understands one way in which srun can introduce its ranks.
SRUN_MPI = {"Open MPI": "pmix", "MPICH": "pmi2"}
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "PYTHONFAULTHANDLER": "1",
}


@dataclass(frozen=True)
class Batch:
    """A batch job that is over."""

    id: int | str
    state: str
    exit_code: int
    output: str


class Cluster:
    """The cluster as one test sees it: its jobs start in the test's folder, and end with the test."""

    def __init__(self, conf: Path, folder: Path) -> None:
        self.conf, self.folder = conf, folder
        self._jobs: list[Job] = []

    def srun(
        self,
        nodes: int,
        tasks_per_node: int,
        *argv: object,
        venv: str = "mpich",
        mpi: str | None = None,
        options: str = "",
        timeout: float = 90,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on so many nodes and tasks, to its end; ``mpi`` None is the one that suits ``venv``."""
        layout = f"-N{nodes} --ntasks-per-node={tasks_per_node} --mpi={mpi or SRUN_MPI[library(venv)]}"
        return self.run(f"srun {layout} {options}", *argv, venv=venv, timeout=timeout)

    def run(
        self, start: str, *argv: object, venv: str = "mpich", timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        """Run a command with ``start`` before it, such as ``srun -n3`` or ``salloc -N2``, to its end."""
        return self.start(start, *argv, venv=venv).wait(timeout)

    def start(self, start: str, *argv: object, venv: str = "mpich") -> Job:
        """Start such a command and leave it running; what is left of it when the test ends is ended then."""
        command = [*shlex.split(start), *map(str, argv)]
        job = Job(command, self.environment(venv), self.folder, self.folder)
        self._jobs.append(job)
        return job

    def sbatch(self, script: str, *options: str, venv: str = "mpich") -> int:
        """Hand in a batch script; gives the number of its job, which writes to ``slurm-NUMBER.out``."""
        text = f"#!/bin/bash\n{script}\n"
        return int(self.ask("sbatch", "--parsable", *options, text=text, env=self.environment(venv)))

    def wait_for(self, job: int | str, timeout: float = 90) -> Batch:
        """The end of a batch job, or of one of an array, such as ``12_0``.

        It is asked for: ``sbatch --wait`` looks so seldom that it costs ten seconds.
        """
        limit = time.monotonic() + timeout
        while (state := self.state(job)) not in OVER:
            if time.monotonic() > limit:
                text = self.output(job)
                self.ask("scancel", "--signal=KILL", str(job))
                pytest.fail(f"job {job} is {state} after {timeout} s\n{text}")
            time.sleep(0.1)
        shown = self.ask("scontrol", "-o", "show", "job", str(job))
        return Batch(job, state, int(shown.split("ExitCode=")[1].split(":")[0]), self.output(job))

    def state(self, job: int | str) -> str:
        """Where a job stands, such as ``RUNNING``; a heterogeneous one where its first part stands."""
        return self.ask("squeue", "-h", "-t", "all", "-o", "%T", "-j", str(job)).partition("\n")[0]

    def output(self, job: int | str) -> str:
        """What a batch job printed so far."""
        path = self.folder / f"slurm-{job}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def environment(self, venv: str) -> dict[str, str]:
        """What a user's shell would hold that works with this virtual environment."""
        path = f"{VENVS[venv] / 'bin'}:{os.environ['PATH']}:/usr/bin:/usr/sbin"
        outside = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "PMI", "OMPI_"))}
        own = {"SLURM_CONF": str(self.conf), "PATH": path, "HPCTRAIN_VENV": str(VENVS[venv])}
        return {**outside, **ENVIRONMENT, **own}

    def close(self) -> None:
        """End what still runs."""
        self.ask("scancel", "--signal=KILL", "--state=RUNNING", "--user=root")
        self.ask("scancel", "--user=root")
        for job in self._jobs:
            job.stop()

    def ask(self, *command: str, text: str | None = None, env: Mapping[str, str] | None = None) -> str:
        done = subprocess.run(
            command, input=text, env=env or {**os.environ, "SLURM_CONF": str(self.conf)}, cwd=self.folder,
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout.strip()


@functools.cache
def library(venv: str) -> str:
    """The name of the MPI library of a virtual environment."""
    python = VENVS[venv] / "bin/python"
    if not python.exists():
        pytest.skip(f"no {VENVS[venv].name}: make test makes it")
    program = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.get_vendor()[0])"
    said = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return said.stdout.strip()


def follow(page: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Do in a folder what the blocks of a page that are marked ``sh slurm`` say, in one shell."""
    if library("main") != "Open MPI":
        pytest.skip(f"the page is written for Open MPI, and .venv has {library('main')}")
    for name in (".venv", "configs", "hpctrain", "slurm"):
        (folder / name).symlink_to(ROOT / name)
    blocks = re.findall(r"^```sh slurm\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "".join(blocks)], cwd=folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.fixture(scope="session")
def lab() -> Iterator[Path]:
    """The slurm.conf of a cluster of four nodes; the tests that need it are skipped where it cannot be had."""
    up = subprocess.run([LAB / "up"], capture_output=True, text=True, timeout=UP_SECONDS, check=False)
    if up.returncode == EX_UNAVAILABLE:
        pytest.skip(up.stderr.strip())
    assert up.returncode == 0, up.stderr
    conf = Path(up.stdout.split("SLURM_CONF='")[1].split("'")[0])
    yield conf
    subprocess.run([LAB / "down", conf.parent], timeout=60, check=True)


@pytest.fixture
def cluster(lab: Path, tmp_path: Path) -> Iterator[Cluster]:
    """Starts jobs in the cluster."""
    cluster = Cluster(lab, tmp_path)
    yield cluster
    cluster.close()
