"""Submission: the files of a job in its run's folder, and how it is handed in.

Each submission has a number. Its script and the configuration that it reads are ``job-NUMBER.sbatch`` and
``job-NUMBER.toml`` and are never changed, so a job that waits does what it was handed in to do; ``job.sbatch`` and
``job.toml`` lead to the newest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.cluster.jobs import NO_REQUEUE, Handed, append
from hpctrain.cluster.queue import Queue
from hpctrain.cluster.request import Place, Request
from hpctrain.cluster.script import ENDINGS, SCRIPTS
from hpctrain.config import Config
from hpctrain.config.write import toml


@dataclass(frozen=True)
class Submission:
    """A job, ready to be handed in: ``script`` is the text of ``request``, ``config`` that of what it reads."""

    request: Request
    script: str
    config: str

    @property
    def folder(self) -> Path:
        """Where the job starts."""
        return Path(self.request.place.folder)

    @property
    def files(self) -> dict[Path, str]:
        """The files that the job needs, each with its text."""
        place = self.request.place
        return {self.folder / place.config: self.config, self.folder / place.script: self.script}

    @property
    def output(self) -> str:
        """Where the job's output goes, as ``Handed`` has it."""
        name = "job-%A_%a.out" if self.request.elements else "job-%j.out"
        return str(self.folder / self.request.place.run / name)


def place(folder: Path, run: Path, system: str, source: str, programs: str | None) -> Place:
    """The place of a run's next submission; ``run``, its folder, is seen from ``folder``, where the job starts."""
    number, ending = _number(folder / run), ENDINGS.get(system, "sbatch")
    return Place(str(folder), str(run), f"{run}/job-{number}.toml", f"{run}/job-{number}.{ending}", source, programs)


def prepare(request: Request, config: Config) -> Submission:
    """The texts of a job's files. Writes none."""
    head = f"# What {request.place.script} trains by, made of {request.place.source}.\n\n"
    return Submission(request, SCRIPTS[request.system](request), head + toml(config))


def write(submission: Submission) -> None:
    """Write the files, and let ``job.sbatch`` and ``job.toml`` lead to them."""
    for path, text in submission.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        _lead(path.parent / f"job{path.suffix}", path.name)


def hand_in(submission: Submission, queue: Queue, times: int = 1) -> Iterator[str]:
    """Hand the job in, ``times`` in a chain; gives the id of each as soon as it has one.

    Each job of a chain starts when the one before is over, however it ended: one that ran out of time, or lost a node,
    has left a checkpoint to go on from. What an earlier request to stop left behind is taken away.
    """
    for run in _runs(submission.request):
        (submission.folder / run / NO_REQUEUE).unlink(missing_ok=True)
    before = None
    for _ in range(times):
        options = [f"--dependency=afterany:{before}"] if before else []
        before = queue.submit(submission.script, submission.folder, options)
        _note(submission, before)
        yield before


def _note(submission: Submission, id: str) -> None:
    """Write the job down in the run's folder, and each one of an array in that of its own run."""
    request = submission.request
    script = str(submission.folder / request.place.script)
    handed = Handed(id, time.time(), script, submission.output)
    append(submission.folder / request.place.run, handed)
    for number, element in enumerate(request.elements):
        output = submission.output.replace("%A_%a", f"{id}_{number}")
        append(submission.folder / element.run, replace(handed, id=f"{id}_{number}", output=output))


def _runs(request: Request) -> Iterator[str]:
    yield request.place.run
    yield from (element.run for element in request.elements)


def _number(run: Path) -> int:
    """The first number that no file of an earlier submission has."""
    taken = [path.stem.removeprefix("job-") for path in run.glob("job-*.toml")]
    return max((int(number) for number in taken if number.isdigit()), default=0) + 1


def _lead(link: Path, name: str) -> None:
    """Make ``link`` lead to ``name`` in its folder, at once; a file of that name that is no link stays."""
    if link.exists() and not link.is_symlink():
        return
    aside = link.with_name(f".{link.name}.{os.getpid()}")
    aside.symlink_to(name)
    aside.replace(link)
