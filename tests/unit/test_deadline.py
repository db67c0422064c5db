"""When a run has to stop so that its last save fits into the job's time, and how it learns when that ends."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster import deadline as module
from hpctrain.cluster.deadline import CAUTIOUS_BYTES_PER_SECOND, Deadline, Pace, Reserve, after, deadline, pressing
from hpctrain.config import RunConfig, parse
from hpctrain.errors import ConfigError

SECONDS = st.floats(0, 1e6)


def settled(end: Deadline) -> float | None:
    """What is known once the question under way is answered."""
    end.ends_at()
    if end._thread is not None:
        end._thread.join(10)
    every, end._every = end._every, float("inf")
    known, end._every = end.ends_at(), every
    return known


# ---- whether to stop


@given(now=SECONDS, left=SECONDS, step=SECONDS, saves=SECONDS, margin=SECONDS)
def test_a_run_stops_exactly_when_no_further_step_would_leave_room_for_a_save(now, left, step, saves, margin) -> None:
    stops = pressing(now, now + left, Reserve(step, saves, margin)) is not None
    assert stops == ((now + left) - now <= step + saves + margin)


@given(now=SECONDS, step=SECONDS, saves=SECONDS, margin=SECONDS)
def test_a_run_without_an_end_is_never_pressed(now, step, saves, margin) -> None:
    assert pressing(now, None, Reserve(step, saves, margin)) is None


def test_a_person_is_told_how_much_time_there_is_and_how_long_a_save_takes() -> None:
    told = pressing(1000.0, 1095.0, Reserve(step=40.0, saves=31.2, margin=30.0))
    assert told == "the job's time ends in 95 s, and a save takes 31 s"


# ---- what has to fit


def test_the_longest_of_the_last_steps_and_saves_is_kept_free() -> None:
    pace = Pace(margin_seconds=7)
    for seconds in (1.0, 9.0, 2.0):
        pace.stepped(seconds)
        pace.saved(10 * seconds)
    assert pace.reserve() == Reserve(9.0, 90.0, 7)


def test_what_was_long_ago_is_forgotten() -> None:
    pace = Pace()
    pace.stepped(100.0)
    pace.saved(100.0)
    for _ in range(module.STEPS):
        pace.stepped(1.0)
        pace.saved(2.0)
    assert pace.reserve() == Reserve(1.0, 2.0, 0.0)


def test_a_save_that_is_under_way_has_to_end_before_the_last_one_can_be_made() -> None:
    pace = Pace()
    pace.saved(20.0)
    pace.saving = True
    assert pace.reserve().saves == 40.0


def test_until_a_save_was_measured_its_bytes_say_how_long_it_may_take() -> None:
    pace = Pace()
    pace.expect(nbytes=int(60 * CAUTIOUS_BYTES_PER_SECOND), nodes=2)
    assert pace.reserve().saves == 30.0
    pace.saved(3.0)
    assert pace.reserve().saves == 3.0


# ---- when the time ends


def test_what_the_queue_says_later_replaces_what_was_known_at_the_start() -> None:
    answers = iter([200.0, 900.0])
    end = Deadline(100.0, lambda: next(answers), every_seconds=0)
    assert settled(end) == 200.0
    assert settled(end) == 900.0


def test_no_look_at_the_end_waits_for_a_slow_queue() -> None:
    answer = threading.Event()

    def slow() -> float:
        assert answer.wait(60)
        return 900.0

    end = Deadline(100.0, slow, every_seconds=0)
    assert [end.ends_at(), end.ends_at()] == [100.0, 100.0]  # and the second look starts no second question
    assert [thread.name for thread in threading.enumerate()].count("deadline") == 1
    answer.set()
    assert settled(end) == 900.0


def test_a_queue_that_fails_again_is_warned_of_once_and_what_was_known_holds(caplog) -> None:
    def broken() -> float:
        raise OSError("slurm_load_jobs error: Unable to contact slurm controller")

    end = Deadline(100.0, broken, every_seconds=0)
    assert settled(end) == 100.0 and caplog.messages == []
    assert [settled(end) for _ in range(3)] == [100.0] * 3
    (line,) = caplog.messages
    assert "the queue does not say when this job ends, and the run goes on: slurm_load_jobs error" in line


def test_a_queue_that_says_nothing_leaves_what_was_known() -> None:
    assert settled(Deadline(100.0, lambda: None, every_seconds=0)) == 100.0


def test_the_queue_is_asked_no_more_often_than_it_should_be() -> None:
    asked: list[int] = []
    end = Deadline(None, lambda: asked.append(1), every_seconds=3600)
    for _ in range(5):
        settled(end)
    assert len(asked) == 1


@pytest.mark.parametrize(("known", "latest", "end"), [(9.0, 5.0, 5.0), (5.0, 9.0, 5.0), (None, 5.0, 5.0)])
def test_the_earlier_of_two_ends_counts(known: float | None, latest: float, end: float) -> None:
    assert Deadline(known, latest=latest).ends_at() == end


# ---- as the configuration gives it


def test_slurm_tells_the_end_in_a_variable_where_it_has_one(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")  # no tools of Slurm, as in a container
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5000"}
    assert settled(deadline(RunConfig(), environ)) == 5000
    assert settled(deadline(RunConfig(deadline="none"), environ)) is None
    assert settled(deadline(RunConfig(), {})) is None


def test_a_job_whose_end_nobody_tells_says_so_once(monkeypatch, caplog) -> None:
    monkeypatch.setenv("PATH", "")
    assert settled(deadline(RunConfig(), {"SLURM_JOB_ID": "7"})) is None
    (line,) = caplog.messages
    assert line == "when this job ends is not known: no squeue is on PATH; run.deadline can tell it"


def test_a_deadline_counts_from_the_start_and_only_shortens_the_job(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(module.time, "time", lambda: 1000.0)
    run = RunConfig(deadline="0:01:30")
    assert deadline(run, {}).ends_at() == 1090
    for end, first in (("1050", 1050), ("5000", 1090)):
        assert deadline(run, {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": end}).ends_at() == first


@pytest.mark.parametrize(
    ("text", "seconds"), [("1:30:00", 5400), ("0:00:09", 9), ("100:00:00", 360_000), ("2-00:00:01", 172_801)]
)
def test_a_deadline_is_read_as_days_hours_minutes_and_seconds(text: str, seconds: int) -> None:
    assert after(RunConfig(deadline=text).deadline) == seconds


@pytest.mark.parametrize("text", ["90", "1:30", "1:60:00", "soon", "-1:00:00", ""])
def test_any_other_deadline_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.deadline"):
        parse({"run": {"deadline": text}})
