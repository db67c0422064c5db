"""A run on a real cluster is looked at, followed and stopped by hpctrain's own commands."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cluster.jobs import NO_REQUEUE, Handed, append
from hpctrain.cluster.queue import find_queue
from tests.slurm.test_train import OVERRIDES
from tests.support.jobs import ROOT, VENVS

pytestmark = pytest.mark.slurm

PATIENCE_SECONDS = 120.0
# As the scripts of hpctrain are: a run that stopped in good order goes back into the queue, unless a person said no.
SCRIPT = """#!/bin/bash
#SBATCH -N2 --ntasks-per-node=1 --time=60 --open-mode=append --output=runs/tiny/slurm-%j.out
srun --mpi=pmi2 {command}
status=$?
if [[ $status == 75 ]] && ! [[ -e runs/tiny/no-requeue ]]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit $status
"""

Hpctrain = Callable[..., str]


@pytest.fixture
def hpctrain(cluster, lab: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hpctrain:
    """``hpctrain("status", "runs/tiny")`` gives what the command prints, in a folder with a text to train on."""
    monkeypatch.setenv("SLURM_CONF", str(lab))
    (tmp_path / "text").mkdir()
    for number in range(8):
        text = f"print({number}, 'ranks meet, tokens flow, a loss comes down')\n"
        (tmp_path / f"text/{number}.py").write_text(text * 99)

    def run(*words: str) -> str:
        command = [sys.executable, "-m", "hpctrain", *words]
        done = subprocess.run(
            command, cwd=tmp_path, env=cluster.environment("mpich"), stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


def hand_in(folder: Path, *options: str, steps: int = 1_000_000) -> str:
    """Hand in a training run of so many steps, and write it down; gives the job's id."""
    overrides = [word for one in (*OVERRIDES, f"train.steps={steps}") for word in ("--set", one)]
    train = [str(VENVS["mpich"] / "bin/python"), "-m", "hpctrain", "train", str(ROOT / "configs/tiny.toml"), *overrides]
    (folder / "runs/tiny").mkdir(parents=True, exist_ok=True)
    id = find_queue().submit(
        SCRIPT.format(command=shlex.join(train)), folder, [*options, f"--export=ALL,PYTHONPATH={ROOT}"]
    )
    append(folder / "runs/tiny", Handed(id, time.time(), "job.sbatch", "runs/tiny/slurm-%j.out"))
    return id


def until(look: Callable[[], object], what: str) -> None:
    """Return as soon as this holds."""
    limit = time.monotonic() + PATIENCE_SECONDS
    while not look():
        assert time.monotonic() < limit, f"after {PATIENCE_SECONDS} s not yet: {what}"
        time.sleep(0.2)


def steps(folder: Path) -> list[int]:
    log = folder / "runs/tiny/log.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def test_a_run_is_looked_at_and_stopped_in_good_order_and_a_job_behind_it_does_not_start(
    hpctrain: Hpctrain, cluster, tmp_path: Path
) -> None:
    id = hand_in(tmp_path)
    behind = hand_in(tmp_path, f"--dependency=afterany:{id}")
    until(lambda: steps(tmp_path), "a step is made")

    told = json.loads(hpctrain("status", "runs/tiny", "--json"))
    assert told["steps"] == 1_000_000 and told["step"] >= 1 and told["log_moves"] is True
    assert [(job["id"], job["state"]) for job in told["jobs"]] == [(id, "RUNNING"), (behind, "PENDING")]
    assert len(told["jobs"][0]["nodes"]) == 2 and told["jobs"][1]["reason"] == "Dependency"
    assert f"job {id}" in hpctrain("status")

    said = hpctrain("cancel", "runs/tiny", "--yes")
    assert f"job {id}: asked to stop" in said and f"job {behind}: waited, and was cancelled" in said
    done = cluster.wait_for(int(id))
    assert (done.state, done.exit_code) == ("FAILED", 75)  # as the script says, and not requeued
    last = steps(tmp_path)[-1]
    assert (tmp_path / f"runs/tiny/checkpoints/step-{last:08}.h5").exists()
    assert find_queue().job(behind).state == "CANCELLED"
    assert not (tmp_path / "runs/tiny/stop").exists() and (tmp_path / "runs/tiny" / NO_REQUEUE).exists()

    told = json.loads(hpctrain("status", "runs/tiny", "--json"))
    assert told["checkpoint"]["step"] == told["step"] == last
    output = hpctrain("logs", "runs/tiny", "--job", id, "-n", "400")
    assert f"stopped after step {last}: the file runs/tiny/stop;" in output


def test_a_run_is_followed_from_the_queue_to_its_end(hpctrain: Hpctrain, tmp_path: Path) -> None:
    hand_in(tmp_path, "--begin=now+2", steps=5)
    said = hpctrain("logs", "runs/tiny", "--follow")
    assert "step 1/5" in said and said.rstrip().splitlines()[-1].startswith("try: ")
    assert "completed" in hpctrain("status", "runs/tiny")


def test_a_run_that_is_ended_at_once_stays_ended(hpctrain: Hpctrain, cluster, tmp_path: Path) -> None:
    id = hand_in(tmp_path)
    until(lambda: steps(tmp_path), "a step is made")
    assert f"job {id}: killed" in hpctrain("cancel", "runs/tiny", "--now", "--yes")
    assert cluster.wait_for(int(id)).state == "CANCELLED"
    assert find_queue().job(id).restarts == 0


def test_a_run_that_stopped_by_itself_goes_back_into_the_queue(hpctrain: Hpctrain, tmp_path: Path) -> None:
    """So that what keeps it from there after a cancel is the cancel."""
    id = hand_in(tmp_path)
    until(lambda: steps(tmp_path), "a step is made")
    find_queue().signal(id, "USR1")
    until(lambda: find_queue().job(id).restarts == 1, "it is requeued")
    told = hpctrain("cancel", "runs/tiny", "--yes", "--now")
    assert f"job {id}: " in told
