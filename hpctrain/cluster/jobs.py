"""Jobs: which jobs were handed to a scheduler for a run, a line each in ``jobs.jsonl`` in the run's folder.

Whoever hands in a job appends; nobody changes a line. A file ``no-requeue`` beside it says that the run was stopped by
a person: its batch script then does not put itself back into the queue.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FILE = "jobs.jsonl"
NO_REQUEUE = "no-requeue"


@dataclass(frozen=True)
class Handed:
    """A job that was handed in. ``submitted_at`` is in UNIX seconds."""

    id: str
    submitted_at: float
    script: str
    output: str
    """The file of its output, in which ``%j`` and ``%A`` stand for the id and ``%a`` for a number of the array."""
    kind: str = "slurm"

    def outputs(self, task: str | None = None) -> list[Path]:
        """The files of its output that are there; of an array one for each job, of ``task`` alone where that is given.

        The one that was written to last comes last.
        """
        name = self.output.replace("%j", self.id).replace("%A", self.id)
        path = Path(name.replace("%a", task or "*"))
        found = path.parent.glob(path.name) if "%a" in name and task is None else [path]
        return sorted((one for one in found if one.is_file()), key=lambda one: one.stat().st_mtime)


def append(folder: Path, handed: Handed) -> None:
    """Write down a job of the run in ``folder``, which is made where it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(handed)) + "\n")  # one write: two that append at a time do not mix


def read(folder: Path) -> tuple[Handed, ...]:
    """The jobs of a run, the oldest first. Lines that were cut off and keys of later versions are passed over."""
    path = folder / FILE
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    return tuple(handed for line in lines if (handed := _handed(line)))


def newest(jobs: Sequence[Handed]) -> Handed | None:
    """The one that was handed in last."""
    return max(jobs, key=lambda handed: handed.submitted_at, default=None)


def _handed(line: str) -> Handed | None:
    known = {field.name for field in fields(Handed)}
    try:
        return Handed(**{key: value for key, value in json.loads(line).items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None
