"""Jobs: which jobs were handed to a scheduler for a run, a line each in ``jobs.jsonl`` in the run's folder.

Whoever hands in a job appends; nobody changes a line. A file ``no-requeue`` beside it says that the run was stopped by
a person: its batch script then does not put itself back into the queue.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

FILE = "jobs.jsonl"
NO_REQUEUE = "no-requeue"

# An output that Slurm named, or the one who wrote the script: slurm-12.out, job-12_3.out.
_OUTPUT = re.compile(r"(?:slurm|job)-(\d+(?:_\d+)?)\.out")
_SAID = re.compile(r"\bSLURM_JOB_ID=(\d+)")
HEAD_BYTES = 1 << 14


@dataclass(frozen=True)
class Handed:
    """A job that was handed in. ``submitted_at`` is in UNIX seconds."""

    id: str
    submitted_at: float
    script: str
    output: str
    """The file of its output, in which ``%j`` and ``%A`` stand for the id and ``%a`` for a number of the array."""
    kind: str = "slurm"

    def outputs(self, folder: Path, task: str | None = None) -> list[Path]:
        """The files of its output that are there; of an array one for each job, of ``task`` alone where that is given.

        The one that was written to last comes last. ``folder`` is the run's: a file that was moved along is found too.
        """
        job, _, own = self.id.partition("_")
        number = task or own or None
        name = self.output.replace("%j", self.id).replace("%A", job)
        pattern = Path(name.replace("%a", number or "*"))
        many = "%a" in name and number is None
        for place in (pattern.parent, folder):
            paths = place.glob(pattern.name) if many else [place / pattern.name]
            if found := [path for path in paths if path.is_file()]:
                return sorted(found, key=lambda path: path.stat().st_mtime)
        return []


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


def guessed(folder: Path) -> tuple[Handed, ...]:
    """The jobs whose output lies in the run's folder, by the names of the files, else by what their first lines say.

    For a run whose jobs were handed in by other means, and so are not in ``jobs.jsonl``.
    """
    paths = sorted(folder.glob("*.out"), key=lambda path: path.stat().st_mtime)
    return tuple(Handed(id, path.stat().st_mtime, "", str(path)) for path in paths if (id := _guess(path)))


def newest(jobs: Sequence[Handed]) -> Handed | None:
    """The one that was handed in last."""
    return max(jobs, key=lambda handed: handed.submitted_at, default=None)


def _guess(path: Path) -> str | None:
    named = _OUTPUT.fullmatch(path.name)
    if named:
        return named[1]
    with path.open("rb") as file:
        said = _SAID.search(file.read(HEAD_BYTES).decode(errors="replace"))
    return said[1] if said else None


def _handed(line: str) -> Handed | None:
    known = {field.name for field in fields(Handed)}
    try:
        return Handed(**{key: value for key, value in json.loads(line).items() if key in known})
    except (ValueError, TypeError, AttributeError):
        return None
