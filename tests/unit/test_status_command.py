"""``hpctrain status``: how a run and its jobs stand, and what cannot be seen."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpctrain.cli import queue as commands
from hpctrain.cli import status
from hpctrain.errors import QueueError
from tests.support.queues import NOW, hand, queued, write

Run = Callable[..., tuple[int, str, str]]


def test_a_run_that_trains_is_told_with_its_job_and_the_time_that_is_left(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    write(folder, "12", "step 10/110  loss 3.0")
    queue(queued("12", started_at=NOW - 100, ends_at=NOW + 500, limit_seconds=600, restarts=1, nodes=("n1", "n2")))
    code, out, err = run("status", folder)
    assert (code, err) == (0, "")
    assert f"{folder}: step 10 of 110, loss 3.0000, 4,000 tokens/s" in out
    assert "log         moves on: its last line is 2 s old, one comes every 1 s\n" in out
    assert "left        1:40 at 1 s a step, until " in out
    assert "checkpoint  step 8, 4 s ago: step-00000008.h5\n" in out
    assert "job 12      running on 2 nodes, n[1-2], for 1:40; 8:20 left of 10:00; restarted once\n" in out


def test_the_same_is_told_to_programs(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    write(folder, "12", "step 10/110  loss 3.0")
    queue(queued("12"))
    code, out, _ = run("status", folder, "--json")
    told = json.loads(out)
    assert code == 0
    assert (told["step"], told["steps"], told["loss"], told["left_seconds"]) == (10, 110, 3.0, pytest.approx(100))
    assert told["log_moves"] is True and told["note"] is None
    assert told["checkpoint"]["step"] == 8 and told["checkpoint"]["file"].endswith("step-00000008.h5")
    (job,) = told["jobs"]
    assert (job["id"], job["state"], job["nodes"], job["started_at"]) == ("12", "RUNNING", ["node1"], 1100)


JOBS = {
    "waits (Priority), 2:30:00 since it was handed in; expected to start in 33:20, ": queued(
        "12", "PENDING", reason="Priority", started_at=12_000
    ),
    "waits (Resources), 2:30:00 since it was handed in; when it starts is not known yet": queued(
        "12", "PENDING", reason="Resources"
    ),
    "waits (BeginTime), 2:30:00 since it was handed in; when it starts is not known yet; restarted 3 times": queued(
        "12", "PENDING", reason="BeginTime", started_at=9_000, restarts=3
    ),
    "running on 1 node, node1, for 2:28:20, without a time limit": queued("12"),
    "completing on 1 node, node1, for 2:28:20; 10:00 left of 2 days 0:00:00": queued(
        "12", "COMPLETING", ends_at=10_600, limit_seconds=172_800
    ),
    "failed 1:40 ago, exit status 3": queued("12", "FAILED", ends_at=9_900, exit_code=3),
    "stopped in good order 1:40 ago": queued("12", "FAILED", ends_at=9_900, exit_code=75),
    "out of memory 1:40 ago, by signal 9": queued("12", "OUT_OF_MEMORY", ends_at=9_900, exit_signal=9),
    "completed 1 s ago": queued("12", "COMPLETED", ends_at=9_999),
}


@pytest.mark.parametrize("line", JOBS)
def test_each_state_of_a_job_is_told_in_a_line(queue, folder: Path, line: str) -> None:
    hand(folder, "12")
    seen = status.look(folder, commands.jobs_of(folder), queue(JOBS[line]))
    assert seen.text().splitlines()[-1].startswith(f"job 12      {line}")


def test_of_a_chain_all_that_is_not_over_is_told(run: Run, queue, folder: Path) -> None:
    hand(folder, "11", "12", "13")
    queue(queued("11", "COMPLETED"), queued("12"), queued("13", "PENDING"))
    out = run("status", folder)[1]
    assert re.findall(r"^job (\d+)", out, re.MULTILINE) == ["12", "13"]


def test_where_all_jobs_are_over_the_last_that_ran_is_told(run: Run, queue, folder: Path) -> None:
    hand(folder, "11", "12", "13")
    queue(
        queued("11", "TIMEOUT", ends_at=10), queued("12", "FAILED", ends_at=20),
        queued("13", "CANCELLED", ends_at=20, nodes=()),
    )  # fmt: skip
    out = run("status", folder)[1]
    assert re.findall(r"^job (\d+) +(\w+)", out, re.MULTILINE) == [("12", "failed")]
    assert "moves on" not in out


def test_a_job_that_the_queue_has_forgotten_is_told_so(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    queue()
    assert re.search(r"job 12 +the queue does not list it: it is over", run("status", folder)[1])


def test_a_log_that_stands_still_is_told(run: Run, queue, folder: Path) -> None:
    (folder / "log.jsonl").write_text(json.dumps({"step": 1, "time": NOW - 4000, "seconds": 2.0}) + "\n")
    hand(folder, "12")
    queue(queued("12"))
    out = run("status", folder)[1]
    assert "stands still: its last line is 1:06:40 old" in out and "until" not in out


@pytest.mark.usefixtures("no_queue")
def test_without_a_queue_the_folder_alone_is_told(run: Run, folder: Path) -> None:
    hand(folder, "12")
    code, out, _ = run("status", folder)
    assert code == 0 and f"{folder}: step 10, loss 3.0000" in out
    assert out.endswith("no queue was found (its newest is 12): this is what the run's folder tells\n")


@pytest.mark.usefixtures("no_queue")
def test_without_a_queue_all_of_your_jobs_cannot_be_told(run: Run) -> None:
    code, out, err = run("status")
    assert (code, out) == (2, "") and "no queue was found" in err


def test_a_run_that_was_not_handed_in_is_told_from_its_folder(run: Run, queue, folder: Path) -> None:
    queue()
    assert "no job was handed in for it: this is what" in run("status", folder)[1]


def test_a_run_of_another_scheduler_is_told_from_its_folder(run: Run, queue, folder: Path) -> None:
    hand(folder, "12.server", kind="pbs")
    queue()
    assert "jobs of pbs are not asked for (its newest is 12.server)" in run("status", folder)[1]


def test_a_controller_that_is_down_does_not_hide_the_folder(run: Run, queue, folder: Path) -> None:
    hand(folder, "12")
    queue(fault=QueueError("squeue --json failed", "Unable to contact slurm controller\n  (connect failure)"))
    code, out, _ = run("status", folder)
    assert code == 0 and "step 10" in out
    assert "squeue --json failed (Unable to contact slurm controller): this is what" in out


def test_a_job_that_was_handed_in_otherwise_is_found_by_its_output_and_that_is_said(
    run: Run, queue, folder: Path
) -> None:
    write(folder, "12", "step 10/20")
    queue(queued("12"))
    _, out, err = run("status", folder)
    assert f"{folder} has no jobs.jsonl: by {folder}/slurm-12.out it is job 12" in err
    assert "step 10 of 20" in out and "job 12      running" in out


def test_before_the_first_step_there_is_little_to_tell(run: Run, queue, tmp_path: Path) -> None:
    hand(tmp_path, "12")
    queue(queued("12", "PENDING"))
    out = run("status", tmp_path)[1].splitlines()
    assert out[:2] == [f"{tmp_path}: no step yet", "checkpoint  none yet"] and out[2].startswith("job 12      waits")


def test_the_number_of_steps_is_taken_from_the_checkpoint_where_no_output_tells(
    run: Run, queue, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hpctrain.checkpoint import format

    queue()
    assert json.loads(run("status", folder, "--json")[1])["steps"] is None  # the file is none
    monkeypatch.setattr(format, "read_attributes", lambda path: {"config": {"train": {"steps": 50}}})
    assert json.loads(run("status", folder, "--json")[1])["steps"] == 50


def test_all_of_your_jobs_are_told_by_name(run: Run, queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOGNAME", "user1")
    queue(queued("12", name="llama"), queued("13", "COMPLETED"), queued("14", user="user2"))
    assert re.findall(r"^job (\d+) +(\w+): running", run("status")[1], re.MULTILINE) == [("12", "llama")]
    queue()
    assert "you have no jobs in the queue" in run("status")[1]


def test_watching_ends_when_the_jobs_are_over(run: Run, queue, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand(folder, "12")
    states = iter([queued("12", "PENDING"), queued("12"), queued("12", "COMPLETED")])
    found = queue()
    monkeypatch.setattr(found, "jobs", lambda *_: (next(states),))
    monkeypatch.setattr(commands.time, "sleep", lambda seconds: None)
    out = run("status", folder, "--watch", "--json")[1]
    assert [json.loads(line)["jobs"][0]["state"] for line in out.splitlines()] == ["PENDING", "RUNNING", "COMPLETED"]


@pytest.mark.parametrize("command", ["status", "logs", "cancel"])
def test_what_is_no_folder_is_refused(run: Run, queue, tmp_path: Path, command: str) -> None:
    queue()
    code, _, err = run(command, tmp_path / "nowhere")
    assert code == 2 and "nowhere is no folder" in err and "run.dir" in err


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0, "0 s"), (59.4, "59 s"), (60, "1:00"), (3599, "59:59"), (3600, "1:00:00"), (90_061, "1 day 1:01:01"),
     (266_400, "3 days 2:00:00")],
)  # fmt: skip
def test_lengths_of_time_are_written_for_people(seconds: float, said: str) -> None:
    assert status.clock(seconds) == said
