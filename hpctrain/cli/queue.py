"""``hpctrain status``, ``logs`` and ``cancel``: a run and its jobs, from where a person sits."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import AsJson
from hpctrain.errors import LaunchError, QueueError, UsageError

if TYPE_CHECKING:
    from hpctrain.cli.status import Status
    from hpctrain.cluster.jobs import Handed
    from hpctrain.cluster.queue import Queue
    from hpctrain.cluster.stopping import Stopped

RunFolder = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN_DIR")]
Now = Annotated[bool, typer.Option("--now", help="End it at once: steps since its last checkpoint are lost.")]
ASK_SECONDS = 10.0  # between two questions to the queue: it serves everybody
LOOK_SECONDS = 0.5  # between two looks at a file


def status(
    run: Annotated[
        Path | None, typer.Argument(help="The run's folder; without one, all of your jobs.", metavar="[RUN_DIR]")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again, until its jobs are over.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=1.0)] = ASK_SECONDS,
    as_json: AsJson = False,
) -> None:
    """Say how far a run has come, where its jobs stand in the queue, and when it will be done."""
    from hpctrain.cli.status import look

    handed = () if run is None else jobs_of(run)
    queue = queue_if(needed=run is None)
    with suppress(KeyboardInterrupt), _shown(as_json, watch) as show:
        while True:
            seen = look(run, handed, queue)
            show(seen)
            if seen.over or not watch:
                return
            time.sleep(every)


def logs(
    run: RunFolder,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job is over.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many of the last lines to begin with.", min=0)] = 20,
    job: Annotated[str | None, typer.Option(help="Another job than the newest, such as 12 or 12_3.")] = None,
) -> None:
    """Print what a run's newest job has written."""
    from hpctrain.watch.tail import followed, last_lines

    handed, task = chosen(run, jobs_of(run), job)
    over = _over(handed, job) if follow else lambda: True
    with suppress(KeyboardInterrupt):  # the usual way to leave what goes on
        path = _output(run, handed, task, over)
        _say(f"job {job or handed.id}: {path}")
        for text in followed(path, lines, over, LOOK_SECONDS) if follow else [last_lines(path, lines)[0]]:
            sys.stdout.buffer.write(text)
            sys.stdout.buffer.flush()


def cancel(
    run: RunFolder,
    now: Now = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Stop a run: it saves after the step that it is at, ends, and is not requeued; jobs that wait are cancelled."""
    from hpctrain.cluster.stopping import ask_without_queue, stop

    handed = jobs_of(run)
    queue = queue_if(needed=now)
    if queue is not None and any(job.kind != "slurm" for job in handed):
        queue = None
    _agreed(run, now, yes)
    if queue is None or not handed:
        ask_without_queue(run)
        print(f"{run}/stop is there: a run that is under way in {run} ends after the step that it is at, and saves")
        print("no job of it is known of here; if none runs, remove that file, or the next start stops at once")
        return
    print("\n".join(told(run, stop(run, queue, handed, now))))


# ---- the run, its jobs and the queue


def jobs_of(run: Path) -> tuple[Handed, ...]:
    """The run's jobs, the newest last: those that were handed in, else those whose output lies in its folder."""
    from hpctrain.cluster.jobs import FILE, guessed, read

    if not run.is_dir():
        raise UsageError(f"{run} is no folder", "log.jsonl and checkpoints of a run are in run.dir", "name that folder")
    handed = tuple(sorted(read(run), key=lambda job: job.submitted_at))
    if handed:
        return handed
    handed = guessed(run)
    if handed:
        _say(f"{run} has no {FILE}: by {handed[-1].output} it is job {handed[-1].id}")
    return handed


def queue_if(needed: bool) -> Queue | None:
    """The queue; None where there is none, unless it is needed."""
    from hpctrain.cluster.queue import find_queue

    try:
        return find_queue()
    except LaunchError:
        if needed:
            raise
        return None


def chosen(run: Path, jobs: tuple[Handed, ...], id: str | None) -> tuple[Handed, str | None]:
    """The job that is meant, and the number in the array where one is meant. UsageError where there is none."""
    if not jobs:
        why = "hpctrain submit handed none in, and no slurm-*.out lies there"
        raise UsageError(f"{run} has no jobs", why, "what it printed is where it was started; its log is log.jsonl")
    whole, _, task = (id or jobs[-1].id).partition("_")
    for handed in reversed(jobs):
        if handed.id == (id or jobs[-1].id):
            return handed, None
        if handed.id == whole and task:
            return handed, task
    newest = ", ".join(handed.id for handed in jobs[-8:])
    raise UsageError(f"--job {id}: {run} has no such job", f"its newest are {newest}", "name one of them")


# ---- status


@contextmanager
def _shown(as_json: bool, watch: bool) -> Iterator[Callable[[Status], None]]:
    """How a status is shown: once, line by line, or in place on a terminal."""
    if as_json:
        yield lambda seen: print(json.dumps(seen.to_json(), indent=None if watch else 2), flush=True)
    elif not watch or not sys.stdout.isatty():
        yield lambda seen: print(seen.text() + ("\n" if watch else ""), flush=True)
    else:
        from rich.live import Live
        from rich.text import Text

        with Live(auto_refresh=False) as live:
            yield lambda seen: live.update(Text(seen.text()), refresh=True)


# ---- logs


def _over(handed: Handed, id: str | None) -> Callable[[], bool]:
    """Whether a job is over, asked of the queue now and then. One that the queue does not list is."""
    queue = queue_if(needed=False) if handed.kind == "slurm" else None
    if queue is None:
        _say("no queue was found, so nobody knows when the job ends: press Ctrl-C to leave")
        return lambda: False
    asked: list[float] = []

    def over() -> bool:
        if asked and time.monotonic() - asked[-1] < ASK_SECONDS:
            return False
        asked.append(time.monotonic())
        try:
            return all(job.over for job in queue.jobs([id or handed.id]))
        except QueueError as error:  # a controller that is busy is no reason to leave
            _say(error.what)
            return False

    return over


def _output(run: Path, handed: Handed, task: str | None, over: Callable[[], bool]) -> Path:
    """The file of a job's output. Waits for it while the job is not over; UsageError where it never came."""
    waited = False
    while not (paths := handed.outputs(run, task)):
        if over():
            why = "a job has an output once it has started"
            what = f"there is no output of job {handed.id}, {handed.output}"
            raise UsageError(what, why, f"hpctrain status {run} says where it stands")
        if not waited:
            _say(f"job {handed.id} has not started: waiting for its output")
        waited = True
        time.sleep(LOOK_SECONDS)
    return paths[-1]


# ---- cancel


def _agreed(run: Path, now: bool, yes: bool) -> None:
    """Ask the person; UsageError where there is none to ask, and no --yes."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"nobody can be asked whether {run} is to be stopped", "there is no terminal", "give --yes")
    lost = "kill it now, losing the steps since its last checkpoint" if now else "stop it, keeping what it has trained"
    typer.confirm(f"{run}: {lost}?", abort=True, err=True)


def told(run: Path, done: Stopped) -> list[str]:
    """What was done, in sentences."""
    lines = {
        f"job {{}}: asked to stop; it saves after the step that it is at, and ends ({run}/stop)": done.asked,
        "job {}: waited, and was cancelled": done.cancelled,
        "job {}: killed": done.killed,
        "job {}: was ending already": done.ending,
    }
    found = [line.format(label) for line, labels in lines.items() for label in labels]
    if done.asked or done.killed or done.ending:
        found.append(f"{run}/no-requeue keeps it from the queue until it is handed in anew")
    return found or [f"{run}: all of its jobs are over. A run that was started otherwise stops by touch {run}/stop"]


def _say(text: str) -> None:
    """Tell a person something that is no result."""
    print(f"hpctrain: {text}", file=sys.stderr, flush=True)
