"""``hpctrain logs`` and ``cancel``: what a run's jobs print, and how they are ended."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli import queue as commands
from hpctrain.cluster.jobs import Handed, append
from hpctrain.cluster.queue import QueuedJob
from hpctrain.errors import LaunchError, QueueError
from tests.support.queues import hand, queued, write

Run = Callable[..., tuple[int, str, str]]


# ---- logs


def test_the_end_of_the_newest_jobs_output_is_printed(run: Run, queue, folder: Path) -> None:
    hand(folder, "12", "13")
    write(folder, "12", "old")
    write(folder, "13", *map(str, range(100)))
    code, out, err = run("logs", folder, "-n", 3)
    assert (code, out) == (0, "97\n98\n99\n") and f"job 13: {folder}/slurm-13.out" in err
    assert run("logs", folder, "--job", "12")[1] == "old\n"


@pytest.mark.usefixtures("no_queue")
def test_output_is_printed_without_a_queue(run: Run, folder: Path) -> None:
    hand(folder, "12")
    write(folder, "12", "a line")
    assert run("logs", folder)[:2] == (0, "a line\n")


def test_following_goes_on_until_the_job_is_over(
    run: Run, queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(folder, "12")
    states = iter(["PENDING", "RUNNING", "RUNNING", "COMPLETED"])
    found = queue()

    def jobs(*_: object) -> tuple[QueuedJob, ...]:
        """As a job would, write a line before it is over."""
        state = next(states)
        if state != "PENDING":
            with (folder / "slurm-12.out").open("a") as file:
                file.write(f"{state}\n")
        return (queued("12", state),)

    monkeypatch.setattr(found, "jobs", jobs)
    monkeypatch.setattr(commands, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.001)
    code, out, err = run("logs", folder, "--follow")
    assert (code, out) == (0, "RUNNING\nRUNNING\nCOMPLETED\n")
    assert "job 12 has not started: waiting for its output" in err


def test_a_busy_controller_does_not_end_the_following(
    run: Run, queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand(folder, "12")
    write(folder, "12", "a line")
    answers = iter([QueueError("squeue --json did not answer in 60 s"), (queued("12", "COMPLETED"),)])

    def jobs(*_: object) -> tuple[QueuedJob, ...]:
        answer = next(answers)
        if isinstance(answer, QueueError):
            raise answer
        return answer

    monkeypatch.setattr(queue(), "jobs", jobs)
    monkeypatch.setattr(commands, "ASK_SECONDS", 0.0)
    monkeypatch.setattr(commands, "LOOK_SECONDS", 0.001)
    code, out, err = run("logs", folder, "-f")
    assert (code, out) == (0, "a line\n") and "did not answer" in err


def test_a_job_of_an_array_is_chosen_by_its_number(run: Run, queue, tmp_path: Path) -> None:
    append(tmp_path, Handed("12", 1.0, "", str(tmp_path / "slurm-%A_%a.out")))
    for number in (1, 2):
        (tmp_path / f"slurm-12_{number}.out").write_text(f"of {number}\n")
    queue()
    assert run("logs", tmp_path, "--job", "12_1")[1] == "of 1\n"
    os.utime(tmp_path / "slurm-12_1.out", (1, 1))
    assert run("logs", tmp_path)[1] == "of 2\n"


@pytest.mark.parametrize(
    ("ids", "words", "said"),
    [
        ([], [], ("has no jobs", "submit", "log.jsonl")),
        (["12", "13"], ["--job", "14"], ("--job 14", "12, 13", "name one")),
        (["12"], [], ("no output of job 12", "once it has started", "hpctrain status")),
    ],
)
def test_what_cannot_be_printed_is_refused_with_what_to_do(
    run: Run, queue, tmp_path: Path, ids: list[str], words: list[str], said: tuple[str, ...]
) -> None:
    hand(tmp_path, *ids)
    queue()
    code, _, err = run("logs", tmp_path, *words)
    assert code == 2 and all(part in err for part in said)


# ---- cancel


class Terminal(io.StringIO):
    """What a person types."""

    def isatty(self) -> bool:
        return True


def test_a_run_is_asked_to_stop_and_what_was_done_is_told(run: Run, queue, folder: Path) -> None:
    hand(folder, "12", "13")
    found = queue(queued("12"), queued("13", "PENDING"))
    code, out, _ = run("cancel", folder, "--yes")
    assert code == 0 and found.cancelled == ["13"]
    assert f"job 12: asked to stop; it saves after the step that it is at, and ends ({folder}/stop)" in out
    assert "job 13: waited, and was cancelled" in out
    assert f"{folder}/no-requeue keeps it from the queue" in out


def test_a_run_is_ended_at_once_with_now(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    found = queue(queued("12"))
    code, out, _ = run("cancel", folder, "--now", "-y")
    assert code == 0 and found.cancelled == ["12"] and "job 12: killed" in out
    assert not (folder / "stop").exists()


def test_nothing_is_done_where_nobody_can_be_asked(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    found = queue(queued("12"))
    code, _, err = run("cancel", folder)
    assert code == 2 and "give --yes" in err
    assert found.cancelled == [] and not (folder / "stop").exists()


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_a_person_is_asked_first(
    run: Run, queue, folder: Path, monkeypatch: pytest.MonkeyPatch, answer: str, code: int
) -> None:
    hand(folder, "12")
    queue(queued("12"))
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert run("cancel", folder)[0] == code
    assert (folder / "stop").exists() == (code == 0)


def test_a_run_whose_jobs_are_over_is_left_alone(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    queue(queued("12", "COMPLETED"))
    code, out, _ = run("cancel", folder, "--yes")
    assert code == 0 and "all of its jobs are over" in out and not (folder / "stop").exists()


@pytest.mark.usefixtures("no_queue")
def test_without_a_queue_a_run_is_asked_by_its_file_and_that_is_said(run: Run, folder: Path) -> None:
    code, out, _ = run("cancel", folder, "--yes")
    assert code == 0 and f"{folder}/stop is there" in out and "if none runs, remove that file" in out
    assert (folder / "stop").exists()


@pytest.mark.usefixtures("no_queue")
def test_without_a_queue_nothing_can_be_ended_at_once(run: Run, folder: Path) -> None:
    code, _, err = run("cancel", folder, "--now", "--yes")
    assert code == LaunchError.exit_code and "no queue was found" in err and not (folder / "stop").exists()
