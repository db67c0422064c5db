"""A training run on the cluster: started by srun, gone on with by other ranks, and stopped in good order."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.jobs import ROOT

pytestmark = pytest.mark.slurm

Command = Callable[..., list[str]]
OVERRIDES = (
    "data.text=['text']",
    "data.tokenizer=bytes",
    "model.layers=1",
    "model.width=32",
    "model.sequence=32",
    "train.batch=8",
    "train.microbatch=2",
    "train.validate_every=0",
)


@pytest.fixture
def train(tmp_path: Path) -> Command:
    """``train("train.steps=4")`` is the command of a small run in the test's folder, with such overrides."""
    (tmp_path / "text").mkdir()
    for number in range(8):
        text = f"print({number}, 'ranks meet, tokens flow, a loss comes down')\n"
        (tmp_path / f"text/{number}.py").write_text(text * 99)

    def command(*overrides: str) -> list[str]:
        sets = [word for override in (*OVERRIDES, *overrides) for word in ("--set", override)]
        return ["python", "-m", "hpctrain", "train", str(ROOT / "configs/tiny.toml"), *sets]

    return command


def steps(folder: Path) -> list[int]:
    """The steps in the log of the run, in its order."""
    log = folder / "runs/tiny/log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return [line["step"] for line in lines if "loss" in line]


def test_a_run_goes_on_with_another_number_of_tasks_and_another_mpi(cluster, train: Command, tmp_path: Path) -> None:
    first = cluster.srun(2, 2, *train("train.steps=4"), venv="mpich", timeout=180)
    assert first.returncode == 0, first.stderr
    second = cluster.srun(1, 2, *train("train.steps=6"), venv="main", timeout=180)
    assert second.returncode == 0, second.stderr
    assert "2 nodes x 2 ranks" in first.stderr
    assert "going on from step 4" in second.stderr
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "runs/tiny/checkpoints/step-00000006.h5").exists()


def test_a_run_of_separate_ranks_is_refused_before_it_writes(cluster, train: Command, tmp_path: Path) -> None:
    done = cluster.srun(2, 2, *train(), mpi="none")
    assert done.returncode == 2
    assert done.stderr.count("but for MPI this process is alone") == 1
    assert "srun --mpi=list" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_a_run_spreads_over_nodes_with_different_numbers_of_tasks(cluster, train: Command, tmp_path: Path) -> None:
    done = cluster.run("srun -N3 -n4 -w node[1-3] --mpi=pmi2", *train("train.steps=2"), timeout=180)
    assert done.returncode == 0, done.stderr
    assert "ranks     4 ranks on 3 nodes (2, 1, 1)" in done.stderr
    assert steps(tmp_path) == [1, 2]


def test_the_parts_of_a_heterogeneous_job_make_one_run(cluster, train: Command, tmp_path: Path) -> None:
    command = " ".join(f'"{word}"' for word in train("train.steps=2"))
    # In the order of their names: with the last node first, MPI_Init hangs under this Slurm's PMI2, in any program.
    parts = ("-N1", "--ntasks-per-node=2", "-w", "node1", ":", "-N2", "--ntasks-per-node=1", "-w", "node[2-3]")
    job = cluster.sbatch(f"srun --mpi=pmi2 --het-group=0,1 {command}", *parts)
    done = cluster.wait_for(job, timeout=180)
    assert (done.state, done.exit_code) == ("COMPLETED", 0), done.output
    assert "ranks     4 ranks on 3 nodes (2, 1, 1)" in done.output
    assert steps(tmp_path) == [1, 2]


def test_two_runs_by_hand_in_allocations_on_one_node_both_finish(cluster, train: Command, tmp_path: Path) -> None:
    start = "salloc -N1 --ntasks-per-node=2 -w node2 srun --mpi=pmi2"
    runs = [cluster.start(start, *train("train.steps=2", f"run.name={name}")) for name in ("a", "b")]
    ends = [run.wait(180) for run in runs]
    assert [end.returncode for end in ends] == [0, 0], ends
    assert [(tmp_path / f"runs/{name}/checkpoints/step-00000002.h5").exists() for name in ("a", "b")] == [True, True]


def test_ranks_that_leave_one_after_another_are_not_killed_for_it(cluster, tmp_path: Path) -> None:
    program = """
import os, time
from hpctrain.cluster.stop import Flag
flag = Flag()
time.sleep(0.5)
flag.ignore()
time.sleep(int(os.environ["SLURM_PROCID"]))
os._exit(75)
"""
    done = cluster.run("srun -N2 -n2 --kill-on-bad-exit=1", "python", "-c", program)
    assert done.returncode == 75, done.stderr


def test_a_stop_file_ends_all_ranks_and_the_script_comes_to_its_end(cluster, train: Command, tmp_path: Path) -> None:
    command = " ".join(f'"{word}"' for word in train("train.steps=1000000"))
    job = cluster.sbatch(f'srun --mpi=pmi2 {command}; echo "srun gave $?"', "-N2", "--ntasks-per-node=2")
    limit = time.monotonic() + 180
    while not steps(tmp_path) and cluster.state(job) in ("PENDING", "RUNNING") and time.monotonic() < limit:
        time.sleep(0.1)
    assert steps(tmp_path), f"{cluster.state(job)}\n{cluster.output(job)}"
    (tmp_path / "runs/tiny/stop").touch()
    done = cluster.wait_for(job, timeout=60)
    last = steps(tmp_path)[-1]
    assert f"stopped after step {last}: the file runs/tiny/stop;" in done.output
    assert "srun gave 75" in done.output
    assert (done.state, done.exit_code) == ("COMPLETED", 0)
    assert (tmp_path / f"runs/tiny/checkpoints/step-{last:08}.h5").exists()
