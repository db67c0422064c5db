"""Runs that are asked to stop at any moment of their life, and that mind the end of their time by themselves."""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.launch.test_train import (
    EXIT_REQUEUE,
    assert_whole,
    checkpoints,
    command,
    lines,
    prepared,
    steps_logged,
    until,
)
from tests.support.jobs import Job

GRACE_SECONDS = 20
LONG = ("train.steps=100000", "train.validate_every=3", "checkpoint.every=2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


def listens(process: psutil.Process) -> bool:
    """Whether a process has a handler of its own for USR1."""
    caught = re.search(r"^SigCgt:\t([0-9a-f]+)$", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)


def until_all_listen(job: Job, ranks: int) -> None:
    until(job, lambda: len(job.ranks()) == ranks and all(listens(rank) for rank in job.ranks().values()))


@pytest.mark.parametrize("seed", range(4))
def test_a_run_stops_in_good_order_whenever_a_signal_comes(launch, folder: Path, seed: int) -> None:
    delay = random.Random(seed).uniform(0, 6)  # in its start, which takes some seconds, or in its steps and saves
    job = launch.start(2, *command(*LONG))
    until_all_listen(job, 2)
    time.sleep(delay)
    job.ranks()[seed % 2].send_signal(signal.SIGUSR1)
    done = job.wait(GRACE_SECONDS)
    assert done.returncode == EXIT_REQUEUE, f"after {delay} s\n{done.stderr}"
    made = len(lines(folder))
    when = f"after step {made}" if made else "before the first step"
    assert f"stopped {when}: signal USR1 at rank {seed % 2}; start the same" in done.stderr
    if made:
        assert_whole(folder, made)
    else:
        assert not (folder / "run/checkpoints").exists() or checkpoints(folder) == []


def test_signals_that_go_on_coming_to_all_ranks_change_nothing_until_the_end(launch, folder: Path) -> None:
    wide = ("model.width=256", "train.batch=2", "train.steps=500", "train.validate_every=0", "checkpoint.every=3")
    job = launch.start(2, *command(*wide))
    until(job, steps_logged(folder, 2))
    while job.process.poll() is None:
        for rank in job.ranks().values():
            for number in (signal.SIGTERM, signal.SIGUSR1):
                try:
                    rank.send_signal(number)
                except psutil.NoSuchProcess:
                    continue
        time.sleep(0.01)
    done = job.wait(GRACE_SECONDS)
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert done.stderr.count("stopped after step") == 1
    assert_whole(folder, len(lines(folder)))


def test_a_signal_while_text_is_prepared_leaves_nothing_half_made(launch, folder: Path) -> None:
    for number in range(30):
        (folder / f"corpus/{number:02}.txt").write_text("Ranks meet and tokens flow. " * 200_000)
    program = "from hpctrain.data import prepare; prepare.ROUND_BYTES = 1 << 12\nfrom hpctrain.cli import main; main()"
    job = launch.start(2, "python", "-c", program, *command()[3:])
    data = folder / "run/data"
    until(job, lambda: data.exists() and list(data.iterdir()))
    job.ranks()[1].send_signal(signal.SIGTERM)
    done = job.wait(GRACE_SECONDS)
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert "stopped before the first step: signal TERM at rank 1" in done.stderr
    assert list(data.iterdir()) == [] and "Traceback" not in done.stderr


def test_a_stop_file_that_is_there_at_the_start_stops_before_the_first_step(launch, folder: Path) -> None:
    (folder / "run").mkdir()
    (folder / "run/stop").touch()
    done = launch(2, *command())
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert "stopped before the first step: the file run/stop" in done.stderr
    assert lines(folder) == [] and not (folder / "run/stop").exists() and (folder / "run/no-requeue").exists()


def test_a_run_ends_by_itself_before_its_deadline_and_goes_on_where_it_was(launch, folder: Path) -> None:
    short = ("run.deadline=0:00:06", "run.margin_seconds=1", "train.steps=100000", "train.validate_every=0")
    first = 0
    for _ in range(2):
        done = launch(2, *command(*short))
        assert done.returncode == EXIT_REQUEUE, done.stderr
        before, first = first, len(lines(folder))
        assert re.search(rf"stopped after step {first}: the job's time ends in \S+ s, and a save takes", done.stderr)
        assert first > before
        assert_whole(folder, first)


def test_a_deadline_that_is_over_at_the_start_leaves_time_for_one_step(launch, folder: Path) -> None:
    done = launch(2, *command("run.deadline=0:00:00"))
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert "stopped after step 1: the job's time ends in 0.0 s" in done.stderr
    assert_whole(folder, 1)
