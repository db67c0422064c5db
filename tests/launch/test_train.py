"""Whole training runs: from nothing to a checkpoint, stopped, killed, wrong, and side by side."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hpctrain.checkpoint import keep
from hpctrain.data import tokens
from tests.support.jobs import ROOT, Job, Launch

STEPS = 24
CONFIG = f"""
[run]
dir = "run"

[model]
layers = 1
width = 16
heads = 2
sequence = 16
dropout = 0.1

[data]
text = ["corpus"]
validation = 0.2

[train]
steps = {STEPS}
batch = 64
microbatch = 1          # many of them, so that a step takes long enough to be met by a signal
validate_every = 8
validate_batches = 1

[optim]
rate = 1e-2
warmup = 3

[log]
peak_tflops = 0.1
"""
LINE = {
    "step", "time", "loss", "norm", "rate", "tokens", "seconds", "tokens_per_second", "flops_per_second", "mfu",
    "phases", "peak_bytes",
}  # fmt: skip
PHASES = {"data", "forward", "backward", "communication", "optimizer"}
EXIT_REQUEUE = 75


def prepared(folder: Path) -> Path:
    """A folder with a configuration and text to train on."""
    (folder / "corpus").mkdir()
    for number in range(30):
        text = "Ranks meet and tokens flow. " * (3 + number % 5)
        (folder / "corpus" / f"{number:02}.txt").write_text(text[number % 7 :])
    (folder / "small.toml").write_text(CONFIG)
    return folder


def command(*overrides: str) -> list[str]:
    sets = [word for override in overrides for word in ("--set", override)]
    return ["python", "-m", "hpctrain", "train", "small.toml", *sets]


def lines(folder: Path) -> list[dict]:
    """What log.jsonl holds in whole lines."""
    path = folder / "run/log.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]


def checkpoints(folder: Path) -> list[str]:
    """Everything in the folder of checkpoints, hidden files too."""
    return sorted(path.name for path in (folder / "run/checkpoints").iterdir())


def assert_whole(folder: Path, step: int) -> None:
    """The newest checkpoint is of this step, complete, and nothing half-written lies about."""
    place = folder / "run/checkpoints"
    path, index = keep.newest(place, keep.listing(place))
    assert index.step == step
    assert [name for name in checkpoints(folder) if not name.startswith("step-")] == ["latest"]


def until(job: Job, what: Callable[[], object]) -> None:
    """Return when ``what`` is true; the job must not end before."""
    limit = time.monotonic() + 120
    while not what():
        assert job.process.poll() is None and time.monotonic() < limit, job.stderr
        time.sleep(0.001)


def steps_logged(folder: Path, count: int) -> Callable[[], bool]:
    return lambda: len(lines(folder)) >= count


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return prepared(tmp_path)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.CompletedProcess[str], Path]]:
    """A run from nothing to its end on two ranks, and its folder."""
    folder = prepared(tmp_path_factory.mktemp("unbroken"))
    launch = Launch(folder)
    yield launch(2, *command()), folder
    launch.close()


# ---- to the end


def test_a_run_goes_from_text_to_a_checkpoint(unbroken) -> None:
    done, folder = unbroken
    assert done.returncode == 0, done.stderr
    assert_whole(folder, STEPS)
    assert losses(folder)[-1] < 0.8 * losses(folder)[0]


def test_every_step_has_a_line_with_the_documented_keys(unbroken) -> None:
    _, folder = unbroken
    logged = lines(folder)
    assert [line["step"] for line in logged] == list(range(1, STEPS + 1))
    for line in logged:
        validated = {"validation_loss"} if line["step"] % 8 == 0 else set()
        saved = {"save_seconds"} if line["step"] == STEPS else set()
        assert set(line) == LINE | validated | saved
        assert set(line["phases"]) == PHASES and set(line["peak_bytes"]) == {"host"}
        assert sum(line["phases"].values()) <= line["seconds"]
        assert line["tokens"] == 64 * 16
        assert line["mfu"] == pytest.approx(line["flops_per_second"] / (2 * 0.1e12))
    page = (ROOT / "docs/reference/log.md").read_text()
    assert [key for key in LINE | PHASES | {"validation_loss", "save_seconds", "host"} if f"`{key}`" not in page] == []


def test_a_person_is_told_once_what_is_done_what_was_made_and_what_to_try(unbroken) -> None:
    done, _ = unbroken
    told = done.stderr.splitlines()
    assert [line for line in told if line.startswith("ranks ")] == ["ranks     1 node x 2 ranks"]
    assert len([line for line in told if line.startswith(f"step {STEPS}/{STEPS}  loss ")]) == 1
    made, more = told[-2:]
    path = f"run/checkpoints/step-{STEPS:08}.h5"
    assert made == f"made {path}: step {STEPS} of run, its log in run/log.jsonl"
    assert more == f"try: hpctrain ckpt inspect {path}, or train on with --set train.steps={2 * STEPS}"
    assert done.stdout == ""


def test_a_run_that_is_done_says_so_again_and_trains_on_with_more_steps(unbroken, launch) -> None:
    _, folder = unbroken
    before = losses(folder)
    again = launch(2, *command(), cwd=folder)
    assert again.returncode == 0 and f"made run/checkpoints/step-{STEPS:08}.h5: step {STEPS}" in again.stderr
    more = launch(2, *command(f"train.steps={STEPS + 2}"), cwd=folder)
    assert more.returncode == 0 and f"going on from step {STEPS}" in more.stderr
    assert losses(folder)[:STEPS] == before and len(losses(folder)) == STEPS + 2


@pytest.mark.parametrize(("ranks", "mpi"), [(2, "mpich"), (0, "main")], ids=["through MPICH", "alone"])
def test_another_start_gives_the_same_losses(ranks: int, mpi: str, unbroken, launch, folder: Path) -> None:
    done = launch(ranks, *command("train.microbatch=16"), mpi=mpi)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == pytest.approx(losses(unbroken[1])[:STEPS], rel=1e-4)


def test_two_runs_at_the_same_moment_do_not_disturb_each_other(unbroken, launch, folder: Path) -> None:
    jobs = [launch.start(2, *command("train.steps=8", f"run.dir={name}", "optim.warmup=3")) for name in "ab"]
    ends = [job.wait() for job in jobs]
    assert [end.returncode for end in ends] == [0, 0], ends
    first, second = ([line["loss"] for line in map(json.loads, (folder / n / "log.jsonl").open())] for n in "ab")
    assert first == second


# ---- stopped


def stop_by_signal(folder: Path, job: Job) -> str:
    """As Slurm does before the time is up, but to one rank alone; gives what the run says of it."""
    job.ranks()[1].send_signal(signal.SIGTERM)
    return "signal TERM at rank 1"


def stop_by_file(folder: Path, job: Job) -> str:
    (folder / "run/stop").touch()
    return "the file run/stop"


@pytest.mark.parametrize(("stop", "left"), [(stop_by_signal, []), (stop_by_file, ["run/no-requeue"])])
def test_a_run_that_is_asked_to_stop_saves_once_and_goes_on_bit_for_bit(
    stop, left: list[str], unbroken, launch, folder: Path
) -> None:
    job = launch.start(2, *command())
    until(job, steps_logged(folder, 2))
    why = stop(folder, job)
    done = job.wait()
    assert done.returncode == EXIT_REQUEUE, done.stderr
    last = len(lines(folder))
    assert f"stopped after step {last}: {why}; start the same command again to go on\n" in done.stderr
    assert checkpoints(folder) == ["latest", f"step-{last:08}.h5"]
    assert_whole(folder, last)
    assert [name for name in ("run/stop", "run/no-requeue") if (folder / name).exists()] == left

    again = launch(2, *command())
    assert again.returncode == 0, again.stderr
    assert f"going on from step {last}\n" in again.stderr
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    assert losses(folder) == losses(unbroken[1])[:STEPS]


def test_a_signal_in_the_middle_of_a_save_stops_the_run_in_good_order(launch, folder: Path) -> None:
    wide = ("model.width=512", "train.batch=2", "train.steps=500", "train.validate_every=0")
    job = launch.start(2, *command(*wide, "checkpoint.every=1"))
    place = folder / "run/checkpoints"
    until(job, lambda: place.exists() and any(name.name.endswith(".part") for name in place.iterdir()))
    stop_by_signal(folder, job)
    done = job.wait()
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert_whole(folder, len(lines(folder)))


def test_a_signal_in_the_middle_of_a_validation_ends_it_and_the_run_saves(launch, folder: Path) -> None:
    for number in range(30):
        with (folder / f"corpus/{number:02}.txt").open("a") as text:
            text.write("Ranks meet and tokens flow. " * 20_000)
    # A step of two samples and a validation of half of a long text, which takes minutes.
    long = ("train.batch=2", "train.steps=500", "train.validate_every=1", "train.validate_batches=1000000")
    job = launch.start(2, *command(*long, "data.validation=0.5"))
    until(job, lambda: "ranks     " in job.stderr)
    time.sleep(2)
    stop_by_signal(folder, job)
    done = job.wait(20)
    assert done.returncode == EXIT_REQUEUE, done.stderr
    assert [(line["step"], "validation_loss" in line) for line in lines(folder)] == [(1, False)]
    assert_whole(folder, 1)


def test_a_run_whose_ranks_were_killed_logs_each_step_once(unbroken, launch, folder: Path) -> None:
    job = launch.start(2, *command("checkpoint.every=3"))
    until(job, steps_logged(folder, 5))
    job.ranks()[1].kill()
    assert job.wait().returncode != 0
    again = launch(2, *command("checkpoint.every=3"))
    assert again.returncode == 0, again.stderr
    assert re.search(r"going on from step \d+\n", again.stderr)
    assert [line["step"] for line in lines(folder)] == list(range(1, STEPS + 1))
    assert losses(folder) == losses(unbroken[1])[:STEPS]


# ---- wrong


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.step=5", "hpctrain: small.toml: train.step is not a known key\n  did you mean train.steps?\n"),
        ("parallel.dp=3", "hpctrain: parallel.dp x pp x tp = 3 x 1 x 1 is not the number of ranks, 2\n"),
        ("train.batch=63", "hpctrain: train.batch = 63 does not divide over 2 data-parallel ranks\n"),
        ("data.validation=0.0", "hpctrain: train.validate_every = 8, and there is no sample to validate with\n"),
        ("log.tensorboard=1", "hpctrain: small.toml: log.tensorboard = 1 cannot be\n  it should be true or false\n"),
    ],
)
def test_a_run_that_cannot_be_exits_with_2_and_says_why_once(override: str, message: str, launch, folder) -> None:
    done = launch(2, *command(override))
    assert done.returncode == 2, done.stderr
    assert done.stderr.count(message) == 1 and done.stderr.count("hpctrain: ") == 1
    assert "Traceback" not in done.stderr
    assert not (folder / "run/checkpoints").exists()


def test_a_wrong_option_exits_with_2_and_is_told_once(launch, folder: Path) -> None:
    done = launch(3, *command(), "--nope")
    assert done.returncode == 2
    assert done.stderr.count("No such option") == done.stderr.count("Usage: ") == 1


def test_a_configuration_that_one_rank_alone_cannot_read_is_told_by_that_rank(launch, folder: Path) -> None:
    program = """
import os
from hpctrain.cli import main
if os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK")) == "1":
    os.chdir("corpus")
main()
"""
    done = launch(2, "python", "-c", program, *command()[3:])
    assert done.returncode not in (0, EXIT_REQUEUE)
    assert re.search(r"rank 1 on \S+: hpctrain\.errors\.ConfigError: small\.toml cannot be read\n", done.stderr)


def test_a_folder_that_cannot_be_made_is_told_once(launch, folder: Path) -> None:
    done = launch(2, *command("run.dir=small.toml/run"))
    assert done.returncode == 1
    message = "hpctrain: making the run's folder failed\n  small.toml/run: Not a directory\n  look at the folder's name"
    assert done.stderr.count(message) == 1 and "Traceback" not in done.stderr


def test_a_token_that_one_rank_alone_meets_ends_the_job_with_its_traceback(launch, folder: Path) -> None:
    # One document holds a token that the embedding has no row for; within the run each document is met.
    documents = [[number] * 16 for number in range(40)]
    documents[11][7] = 200
    tokens.write(folder / "pair", documents, "uint16")
    small = ("model.vocabulary=100", "data.validation=0.0", "train.batch=2", "train.validate_every=0")
    done = launch(2, *command('data.sources=[{path="pair"}]', *small))
    assert done.returncode not in (0, EXIT_REQUEUE)
    assert 0 < len(lines(folder)) < STEPS
    told = re.search(r"rank (\d) on \S+: hpctrain\.errors\.DataError: pair holds token 200\n", done.stderr)
    assert told and f"rank {told[1]} on" in done.stderr and "Traceback (most recent call last)" in done.stderr
    assert done.stderr.count("pair holds token 200") == 1


def test_a_run_that_diverges_ends_before_it_spoils_its_weights(launch, folder: Path) -> None:
    done = launch(2, *command("optim.rate=1e30", "optim.warmup=0", "checkpoint.every=1", "train.batch=2"))
    assert done.returncode == 1, done.stderr
    last = len(lines(folder))
    assert re.search(rf"hpctrain: the gradient of step {last + 1} has the norm (nan|inf), at a loss of ", done.stderr)
    assert done.stderr.count("hpctrain: ") == 1 and "Traceback" not in done.stderr
    assert_whole(folder, last)


# ---- seen


def test_a_terminal_shows_a_bar_also_through_mpirun(folder: Path) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [str(ROOT / ".ci/mpirun"), "2", *command("train.steps=2", "train.batch=2", "train.validate_every=0")]
    with subprocess.Popen(words, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs) as job:
        os.close(theirs)
        ending = threading.Timer(120, job.kill)
        ending.start()
        shown = b""
        with suppress(OSError):  # a terminal's way to say that all writers have gone
            while part := os.read(ours, 4096):
                shown += part
        ending.cancel()
    os.close(ours)
    assert job.returncode == 0, shown.decode()
    bar, _, tried = shown.decode().rpartition("made run/checkpoints")
    assert "━" in bar and "2/2" in bar
    assert "prepare" in bar and "prepare 100%" not in bar  # that is the line of a log
    assert "try: hpctrain ckpt inspect" in tried and "━" not in tried
