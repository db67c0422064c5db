"""Status: how a run stands, put together from its folder and from the queue, for a person or for a program."""

from __future__ import annotations

import getpass
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpctrain.errors import EXIT_REQUEUE, CheckpointError, QueueError

if TYPE_CHECKING:
    from hpctrain.cluster.jobs import Handed
    from hpctrain.cluster.queue import Queue, QueuedJob
    from hpctrain.watch.run import Progress, Saved

FOLDER_ALONE = "this is what the run's folder tells"
SHOWN_JOBS = 20


@dataclass(frozen=True)
class Seen:
    """A job of the run, and what the queue says of it now; None where the queue does not list it."""

    id: str
    job: QueuedJob | None


@dataclass(frozen=True)
class Status:
    """How a run stands ``at`` a time, in UNIX seconds. Without a ``run``, how all of a user's jobs stand."""

    run: Path | None
    at: float
    progress: Progress | None
    steps: int | None
    saved: Saved | None
    seen: tuple[Seen, ...]
    note: str | None
    """What could not be looked at."""

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: no job is left, or all steps are made."""
        if self.seen and self.note is None:
            return all(seen.job is None or seen.job.over for seen in self.seen)
        return self.steps is not None and self.progress is not None and self.progress.step >= self.steps

    @property
    def left_seconds(self) -> float | None:
        """How long the steps that are left take at the present pace."""
        return None if self.progress is None or self.steps is None else self.progress.left_seconds(self.steps)

    def to_json(self) -> dict[str, Any]:
        """For a program: times in UNIX seconds, null where nothing is known."""
        progress, saved = self.progress, self.saved
        keys = ("step", "loss", "tokens_per_second", "seconds_per_step", "logged_at")
        return {
            "run": None if self.run is None else str(self.run),
            "time": round(self.at, 3),
            **{key: getattr(progress, key, None) for key in keys},
            "steps": self.steps,
            "left_seconds": self.left_seconds,
            "log_moves": None if progress is None else progress.moves(self.at),
            "checkpoint": saved and {"file": str(saved.path), "step": saved.step, "saved_at": saved.saved_at},
            "jobs": [_job_json(seen) for seen in self.seen],
            "note": self.note,
        }

    def text(self) -> str:
        """For a person."""
        lines = [] if self.run is None else [*_run_lines(self)]
        for seen in self.seen[-SHOWN_JOBS:]:
            lines.append(f"{f'job {seen.id}':<11} {_job_text(seen.job, self.at, self.run is None)}")
        if self.run is None and not self.seen:
            lines.append("you have no jobs in the queue")
        return "\n".join([*lines, *([self.note] if self.note else [])])


def look(run: Path | None, jobs: Iterable[Handed], queue: Queue | None) -> Status:
    """How the run stands now, with these ``jobs``."""
    from hpctrain.watch.run import newest_checkpoint, progress

    if run is None:
        mine = [job for job in queue.jobs(user=getpass.getuser()) if not job.over]
        return Status(None, time.time(), None, None, None, tuple(Seen(job.label, job) for job in mine), None)
    handed = tuple(jobs)
    seen, note = _seen(handed, queue)
    saved = newest_checkpoint(run)
    return Status(run, time.time(), progress(run), _steps(run, handed, saved), saved, seen, note)


def _seen(handed: tuple[Handed, ...], queue: Queue | None) -> tuple[tuple[Seen, ...], str | None]:
    """The run's jobs that are not over; where all are, the newest that ran."""
    if note := _unasked(handed, queue):
        return (), f"{note}: {FOLDER_ALONE}"
    try:
        found = queue.jobs([one.id for one in handed])
    except QueueError as error:
        return (), f"{error.what} ({error.why.splitlines()[0]}): {FOLDER_ALONE}"
    live = [Seen(job.label, job) for job in found if not job.over]
    if live:
        return tuple(live), None
    last = max(found, key=lambda job: (bool(job.nodes), job.ends_at or 0), default=None)
    return (Seen(last.label if last else handed[-1].id, last),), None


def _unasked(handed: tuple[Handed, ...], queue: Queue | None) -> str | None:
    """Why the queue is not asked of this run."""
    newest = f" (its newest is {handed[-1].id})" if handed else ""
    others = {one.kind for one in handed} - {"slurm"}
    if others:
        return f"jobs of {', '.join(sorted(others))} are not asked for{newest}"
    if queue is None:
        return f"no queue was found{newest}"
    return None if handed else "no job was handed in for it"


def _steps(run: Path, handed: tuple[Handed, ...], saved: Saved | None) -> int | None:
    """How many steps the run is to make: as its newest output says, else as its newest checkpoint does."""
    from hpctrain.watch.run import steps_of

    for one in reversed(handed):
        for path in reversed(one.outputs(run)):
            if steps := steps_of(path):
                return steps
    return None if saved is None else _steps_in(saved.path)


def _steps_in(checkpoint: Path) -> int | None:
    from hpctrain.checkpoint.format import read_attributes

    try:
        return int(read_attributes(checkpoint)["config"]["train"]["steps"])
    except (CheckpointError, OSError, KeyError, TypeError, ValueError):
        return None  # an imported file, or one that was pruned meanwhile


# ---- for a person


def _run_lines(status: Status) -> Iterable[str]:
    from hpctrain.watch.run import age

    progress, saved = status.progress, status.saved
    if progress is None:
        yield f"{status.run}: no step yet"
    else:
        yield f"{status.run}: {_standing(progress, status.steps)}"
        yield f"log         {_pulse(status, progress)}"
        if status.left_seconds:
            goes_on = progress.moves(status.at) and not status.over
            until = f", until {date(status.at + status.left_seconds)}" if goes_on else ""
            yield f"left        {clock(status.left_seconds)} at {progress.seconds_per_step:.3g} s a step{until}"
    if saved is None:
        yield "checkpoint  none yet"
    else:
        yield f"checkpoint  step {saved.step:,}, {clock(age(saved.saved_at, status.at))} ago: {saved.path.name}"


def _pulse(status: Status, progress: Progress) -> str:
    """Whether the log moves on."""
    from hpctrain.watch.run import age

    old = f"its last line is {clock(age(progress.logged_at, status.at))} old"
    if status.over:
        return old
    usual = "" if progress.seconds_per_line is None else f", one comes every {progress.seconds_per_line:.3g} s"
    return f"{'moves on' if progress.moves(status.at) else 'stands still'}: {old}{usual}"


def _standing(progress: Progress, steps: int | None) -> str:
    parts = [f"step {progress.step:,}" + ("" if steps is None else f" of {steps:,}")]
    parts += [] if progress.loss is None else [f"loss {progress.loss:.4f}"]
    parts += [] if progress.tokens_per_second is None else [f"{progress.tokens_per_second:,.0f} tokens/s"]
    return ", ".join(parts)


def _job_text(job: QueuedJob | None, now: float, named: bool) -> str:
    """A job in a line; with its name where several runs are listed."""
    if job is None:
        return "the queue does not list it: it is over, or was handed in elsewhere (sacct -j tells)"
    parts = [f"{job.name}: "] if named else []
    parts.append(_waiting(job, now) if job.waits else _ended(job, now) if job.over else _running(job, now))
    times = {0: "", 1: "; restarted once"}.get(job.restarts, f"; restarted {job.restarts} times")
    return "".join(parts) + times


def _waiting(job: QueuedJob, now: float) -> str:
    why = f" ({job.reason})" if job.reason else ""
    since = "" if job.submitted_at is None else f", {clock(max(now - job.submitted_at, 0))} since it was handed in"
    if job.started_at is None or job.started_at < now:
        return f"waits{why}{since}; when it starts is not known yet"
    return f"waits{why}{since}; expected to start in {clock(job.started_at - now)}, {date(job.started_at)}"


def _running(job: QueuedJob, now: float) -> str:
    from hpctrain.cluster.slurm import fold_nodes

    nodes = (
        f"{len(job.nodes)} node{'s' if len(job.nodes) > 1 else ''}, {fold_nodes(job.nodes)}" if job.nodes else "no node"
    )
    since = "" if job.started_at is None else f", for {clock(max(now - job.started_at, 0))}"
    if job.ends_at is None or job.limit_seconds is None:
        return f"{job.state.lower()} on {nodes}{since}, without a time limit"
    return (
        f"{job.state.lower()} on {nodes}{since}; {clock(max(job.ends_at - now, 0))} left of {clock(job.limit_seconds)}"
    )


def _ended(job: QueuedJob, now: float) -> str:
    when = "" if job.ends_at is None else f" {clock(max(now - job.ends_at, 0))} ago"
    if job.exit_code == EXIT_REQUEUE:
        return f"stopped in good order{when}"
    code = f", exit status {job.exit_code}" if job.exit_code else ""
    sign = f", by signal {job.exit_signal}" if job.exit_signal else ""
    return f"{job.state.lower().replace('_', ' ')}{when}{code}{sign}"


def clock(seconds: float) -> str:
    """``7 s``, ``1:07``, ``5:02:11`` or ``2 days 5:02:11``."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    told = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days} day{'s' if days > 1 else ''} {told}" if days else told


def date(at: float) -> str:
    """A time as a person reads it, here."""
    return time.strftime("%a %d %b %H:%M", time.localtime(at))


# ---- for a program


def _job_json(seen: Seen) -> dict[str, Any]:
    keys = (
        "name", "state", "reason", "node_count", "tasks", "partition", "submitted_at", "started_at", "ends_at",
        "limit_seconds", "restarts", "exit_code", "exit_signal",
    )  # fmt: skip
    nodes = list(seen.job.nodes) if seen.job else []
    return {"id": seen.id, **{key: getattr(seen.job, key, None) for key in keys}, "nodes": nodes}
