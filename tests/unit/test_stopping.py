"""Jobs of a run are ended by hand: each in the way that suits its state, and none starts again by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpctrain.cluster.jobs import NO_REQUEUE, Handed
from hpctrain.cluster.stop import STOP_FILE, Flag, listening
from hpctrain.cluster.stopping import Stopped, ask_without_queue, stop
from hpctrain.cluster.world import World
from hpctrain.config import RunConfig
from tests.support.queues import Queued, queued


def handed(*ids: str) -> list[Handed]:
    return [Handed(id, float(number), "job.sbatch", "slurm-%j.out") for number, id in enumerate(ids)]


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_job_that_runs_is_asked_by_a_file_and_is_not_requeued(tmp_path: Path) -> None:
    queue = Queued(queued("12"))
    assert stop(tmp_path, queue, handed("12"), now=False) == Stopped(asked=("12",))
    assert queue.cancelled == [] and files(tmp_path) == {STOP_FILE, NO_REQUEUE}
    with listening(RunConfig(dir=str(tmp_path)), World.of(None), Flag(())) as run:
        assert run.agreed()
    assert files(tmp_path) == {NO_REQUEUE}


def test_a_job_that_is_killed_is_not_requeued_by_what_its_script_does_meanwhile(tmp_path: Path) -> None:
    queue = Queued(queued("12"), folder=tmp_path)
    assert stop(tmp_path, queue, handed("12"), now=True) == Stopped(killed=("12",))
    assert queue.cancelled == ["12"]
    assert queue.seen == [[NO_REQUEUE]]  # before it was killed
    assert files(tmp_path) == {NO_REQUEUE}


@pytest.mark.parametrize("state", ["PENDING", "REQUEUED", "REQUEUE_HOLD"])
@pytest.mark.parametrize("now", [False, True])
def test_a_job_that_waits_is_cancelled_and_leaves_no_file_for_the_next_start(
    tmp_path: Path, state: str, now: bool
) -> None:
    queue = Queued(queued("12", state))
    assert stop(tmp_path, queue, handed("12"), now) == Stopped(cancelled=("12",))
    assert queue.cancelled == ["12"] and files(tmp_path) == set()


def test_of_a_chain_the_first_is_asked_and_the_others_are_cancelled(tmp_path: Path) -> None:
    queue = Queued(queued("11", "COMPLETED"), queued("12"), queued("13", "PENDING"), queued("14", "PENDING"))
    done = stop(tmp_path, queue, handed("11", "12", "13", "14"), now=False)
    assert done == Stopped(asked=("12",), cancelled=("13", "14"))
    assert files(tmp_path) == {STOP_FILE, NO_REQUEUE}


def test_a_job_that_is_ending_finds_that_it_is_not_to_be_requeued_and_the_next_finds_no_stop(tmp_path: Path) -> None:
    done = stop(tmp_path, Queued(queued("12", "COMPLETING")), handed("12"), now=False)
    assert done == Stopped(ending=("12",)) and files(tmp_path) == {NO_REQUEUE}


def test_jobs_of_others_and_of_the_past_are_left_alone(tmp_path: Path) -> None:
    queue = Queued(queued("12", "COMPLETED"), queued("99"))
    assert stop(tmp_path, queue, handed("12"), now=True) == Stopped()
    assert queue.cancelled == [] and files(tmp_path) == set()
    assert stop(tmp_path, queue, [], now=True) == Stopped() and queue.cancelled == []


WAITING = {"array_job": "12", "array_tasks": "3-5%2"}


def test_of_an_array_what_waits_is_cancelled_and_what_runs_is_asked(tmp_path: Path) -> None:
    queue = Queued(queued("13", array_job="12", array_tasks="1"), queued("12", "PENDING", **WAITING))
    done = stop(tmp_path, queue, handed("12"), now=False)
    assert done == Stopped(asked=("12_1",), cancelled=("12_[3-5%2]",))
    assert queue.cancelled == ["12_[3-5]"]  # "12" would end what runs, too


def test_of_an_array_of_several_runs_only_this_runs_jobs_are_ended(tmp_path: Path) -> None:
    queue = Queued(queued("13", array_job="12", array_tasks="1"), queued("12", "PENDING", **WAITING))
    assert stop(tmp_path, queue, handed("12_4"), now=True) == Stopped(cancelled=("12_[3-5%2]",))
    assert queue.cancelled == ["12_4"]
    assert stop(tmp_path, queue, handed("12_1"), now=True) == Stopped(killed=("12_1",))
    assert queue.cancelled == ["12_4", "12_1"]


def test_a_run_that_no_queue_knows_is_asked_by_a_file(tmp_path: Path) -> None:
    ask_without_queue(tmp_path)
    assert files(tmp_path) == {STOP_FILE, NO_REQUEUE}
