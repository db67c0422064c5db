"""Runs that ``hpctrain submit`` hands in: they finish, come back after a signal, follow each other, and vary."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.conftest import SRUN_MPI, Cluster, library
from tests.slurm.test_train import steps as logged
from tests.support.jobs import ROOT

pytestmark = pytest.mark.slurm

PAGE = ROOT / "docs/how-to/slurm.md"
CONFIG = """
[run]
name = "tiny"
[model]
layers = 1
width = 32
sequence = 32
[data]
text = ["text.txt"]
tokenizer = "bytes"
[train]
batch = 8
microbatch = 2
validate_every = 0
[job]
machine = "lab"
tasks_per_node = 1
cpus_per_task = 2
check = false
environment = {{ SAID = "two words, '{{$HOME}}'" }}
mpi = "{mpi}"
"""
Submit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def submit(cluster: Cluster, tmp_path: Path) -> Submit:
    """``submit("--nodes", 2)`` hands in a small run from the test's folder."""
    (tmp_path / "tiny.toml").write_text(CONFIG.format(mpi=SRUN_MPI[library("main")]))
    (tmp_path / "text.txt").write_text("ranks meet, tokens flow, a loss comes down\n" * 500)

    return lambda *words: type_in(cluster, "hpctrain", "submit", "tiny.toml", "--yes", *words)


def type_in(cluster: Cluster, *words: object, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """A command as a user types it, to its end; jobs that it hands in go on."""
    return subprocess.run(
        [*map(str, words)], env=cluster.environment("main"), cwd=cluster.folder, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip


def handed(done: subprocess.CompletedProcess[str]) -> list[int]:
    """The ids of what was handed in with --json."""
    assert done.returncode == 0, done.stderr
    return [int(id) for id in json.loads(done.stdout)["ids"]]


def output(folder: Path, job: object, run: str = "tiny") -> str:
    path = folder / f"runs/{run}/job-{job}.out"
    return path.read_text() if path.exists() else ""


def wait_for_step(cluster: Cluster, job: int, folder: Path) -> None:
    limit = time.monotonic() + 90
    while not logged(folder) and cluster.state(job) in ("PENDING", "RUNNING") and time.monotonic() < limit:
        time.sleep(0.1)
    assert logged(folder), f"{cluster.state(job)}\n{output(folder, job)}"


def late_ends(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes ranks end one after the other: srun ends those that are late."""
    (folder / "late").mkdir()
    program = "import atexit, os, time\natexit.register(time.sleep, int(os.environ.get('SLURM_PROCID', 0)) / 2)\n"
    (folder / "late/sitecustomize.py").write_text(program)
    return folder / "late"


def shown(cluster: Cluster, job: int) -> dict[str, Any]:
    words = cluster.run(f"scontrol -o show job {job}").stdout.split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_a_run_on_four_nodes_that_is_warned_saves_comes_back_and_finishes(
    cluster, submit: Submit, tmp_path: Path
) -> None:
    late = f"job.environment.PYTHONPATH = '{late_ends(tmp_path)}:$PYTHONPATH'"
    (job,) = handed(submit("--nodes", 4, "--set", late, "--set", "train.steps=40", "--json"))
    wait_for_step(cluster, job, tmp_path)
    cluster.run(f"scancel --batch --signal=USR1 {job}")  # what Slurm does some time before the limit
    done = cluster.wait_for(job, timeout=120)
    said, facts = output(tmp_path, job), shown(cluster, job)
    assert (done.state, done.exit_code, facts["Restarts"]) == ("COMPLETED", 0, "1"), said
    assert (facts["JobName"], facts["NumNodes"], facts["CPUs/Task"]) == ("tiny", "4", "2")
    assert "4 nodes x 1 rank" in said
    assert "start the same command again to go on" in said
    assert said.count("going on from step") == 1
    assert logged(tmp_path) == list(range(1, 41))


def test_jobs_of_a_chain_go_on_and_the_last_finds_nothing_to_do(cluster, submit: Submit, tmp_path: Path) -> None:
    jobs = handed(submit("--chain", 3, "--set", "train.steps=40", "--json"))
    wait_for_step(cluster, jobs[0], tmp_path)
    cluster.run(f"scancel --batch --signal=USR1 {jobs[0]}")
    ends = [cluster.wait_for(job, timeout=120) for job in jobs]
    assert [(end.state, end.exit_code) for end in ends] == [("FAILED", 75), ("COMPLETED", 0), ("COMPLETED", 0)]
    assert "going on from step" in output(tmp_path, jobs[1])
    assert output(tmp_path, jobs[2]) == "runs/tiny/checkpoints/step-00000040.h5 is there: nothing is left to do\n"
    assert logged(tmp_path) == list(range(1, 41))


def test_a_sweep_is_one_array_of_runs_with_folders_of_their_own(cluster, submit: Submit, tmp_path: Path) -> None:
    plain = ("--set", "train.steps=2", "--set", "optim.warmup=0", "--set", "optim.shape=constant")
    (array,) = handed(submit("--array", "optim.rate=1e-3,3e-4", *plain, "--json"))
    ends = [cluster.wait_for(f"{array}_{number}") for number in (0, 1)]
    assert [(end.state, end.exit_code) for end in ends] == [("COMPLETED", 0)] * 2, output(tmp_path, f"{array}_0")
    for rate in ("1e-3", "3e-4"):
        lines = (tmp_path / f"runs/tiny-rate-{rate}/log.jsonl").read_text().splitlines()
        assert [line["rate"] for line in map(json.loads, lines) if "rate" in line] == [float(rate)] * 2


def test_the_template_for_mpirun_trains_by_the_configuration_that_it_is_given(cluster, submit: Submit) -> None:
    few = ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=0")  # the how-to has the template for srun
    script = ROOT / "slurm/train-mpirun.sbatch"
    done = type_in(cluster, "sbatch", "--parsable", *few, script, "tiny.toml", "--set", "train.steps=2")
    end = cluster.wait_for(int(done.stdout))
    assert (end.state, end.exit_code) == ("COMPLETED", 0), end.output
    assert "2 nodes x 1 rank" in end.output


def test_what_slurm_refuses_is_told_in_its_words_with_a_mend(submit: Submit, tmp_path: Path) -> None:
    many = submit("--test-only", "--set", "train.batch=20", "--set", 'job.machine="many.toml"')
    assert many.returncode == 2
    (tmp_path / "many.toml").write_text(
        (ROOT / "configs/machines/lab.toml").read_text().replace("nodes = 4", "nodes = 9")
    )
    many = submit("--test-only", "--nodes", 9, "--set", "train.batch=18", "--machine", "many.toml")
    assert (many.returncode, many.stderr.splitlines()[0].split()[:2]) == (1, ["hpctrain:", "sbatch"])
    assert "node configuration is not available" in many.stderr
    assert "ask for fewer nodes" in many.stderr
    unknown = submit("--partition", "nowhere")
    assert "nvalid partition" in unknown.stderr
    assert "sinfo -s lists the partitions" in unknown.stderr
    assert not (tmp_path / "runs").exists()


def test_asking_alone_tells_when_it_would_start_and_hands_nothing_in(cluster, submit: Submit, tmp_path: Path) -> None:
    done = submit("--test-only", "--nodes", 2, "--json")
    found = json.loads(done.stdout)
    assert len(found["nodes"]) == 2
    assert abs(found["starts_at"] - time.time()) < 3600
    assert not (tmp_path / "runs").exists()
    assert cluster.run("squeue -h -t pending,running").stdout == ""


def test_the_how_to_does_what_it_says(cluster, tmp_path: Path) -> None:
    if library("main") != "Open MPI":
        pytest.skip(f"the page is written for Open MPI, and .venv has {library('main')}")
    (tmp_path / "slurm").symlink_to(ROOT / "slurm")
    blocks = re.findall(r"^```sh slurm\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    done = type_in(cluster, "bash", "-euo", "pipefail", "-c", "".join(blocks), timeout=240)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.search(r"2 train: node\d, node\d", done.stdout)
    assert "going on from step 10" in done.stderr
    assert "#PBS -A catalyst" in done.stdout
