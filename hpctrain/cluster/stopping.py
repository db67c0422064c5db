"""Stopping: end a run's jobs by hand, in good order or at once, so that they do not start again by themselves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.jobs import NO_REQUEUE, Handed
from hpctrain.cluster.queue import Queue, QueuedJob
from hpctrain.cluster.stop import STOP_FILE


@dataclass(frozen=True)
class Stopped:
    """What was done about a run's jobs, by their labels."""

    asked: tuple[str, ...] = ()
    """They run, and end after the step that they are at, when they have saved."""
    cancelled: tuple[str, ...] = ()
    """They waited, and were taken out of the queue."""
    killed: tuple[str, ...] = ()
    ending: tuple[str, ...] = ()
    """They were ending already."""


def stop(folder: Path, queue: Queue, jobs: Sequence[Handed], now: bool) -> Stopped:
    """End all jobs of the run in ``folder``: those that wait are cancelled, others asked to stop, or killed ``now``.

    A job that is asked looks for a file ``stop`` after each step, as all runs do, and takes it away when it ends. So
    that its script does not requeue it, the file ``no-requeue`` lies there before anything is asked of it.
    """
    leave(folder, NO_REQUEUE)
    ids = [handed.id for handed in jobs]
    there = [job for job in queue.jobs(ids) if not job.over] if ids else []
    waiting = [job for job in there if job.waits]
    ending = [job for job in there if job.state == "COMPLETING"]
    running = [job for job in there if job not in waiting and job not in ending]
    if running and not now:
        leave(folder, STOP_FILE)
    for job in [*waiting, *(running if now else ())]:
        for id in _cancelled_as(job, ids):
            queue.cancel(id)
    if not running and not ending:
        (folder / NO_REQUEUE).unlink(missing_ok=True)  # it would only keep a script handed in by hand from its requeue
    asked, killed = ((), running) if now else (running, ())
    return Stopped(_labels(asked), _labels(waiting), _labels(killed), _labels(ending))


def _cancelled_as(job: QueuedJob, ids: Sequence[str]) -> list[str]:
    """What cancels this job and no other; of the tasks of an array that wait, those that belong to the run."""
    own = [id for id in ids if "_" in id and job.named([id])]
    return own or [re.sub(r"%\d+\]$", "]", job.label)]


def ask_without_queue(folder: Path) -> None:
    """Ask a run that no queue is known of, such as one that mpirun started, to stop after the step that it is at."""
    leave(folder, NO_REQUEUE)
    leave(folder, STOP_FILE)


def leave(folder: Path, name: str) -> None:
    """Lay an empty file into the run's folder."""
    (folder / name).touch()


def _labels(jobs: Sequence[QueuedJob]) -> tuple[str, ...]:
    return tuple(job.label for job in jobs)
