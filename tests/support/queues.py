"""A queue in memory, for what is decided about jobs; the real ones are tried on a real cluster."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.cluster.jobs import Handed, append
from hpctrain.cluster.queue import QueuedJob, select
from hpctrain.errors import QueueError

NOW = 10_000.0  # UNIX seconds, where a test lets time stand still


def queued(id: str, state: str = "RUNNING", **changes: Any) -> QueuedJob:
    """A job that one node is enough for."""
    nodes = () if state == "PENDING" else ("node1",)
    told: dict[str, Any] = {
        "name": "run", "user": "user1", "reason": None, "nodes": nodes, "node_count": 1, "tasks": 1,
        "partition": "debug", "account": None, "qos": None, "submitted_at": 1000,
        "started_at": None if state == "PENDING" else 1100,
        "ends_at": None, "limit_seconds": None, "restarts": 0, "exit_code": 0, "exit_signal": 0, "array_job": None,
        "array_tasks": None, "het_job": None, "folder": None, "output": None, "dependency": None, "comment": None,
    }  # fmt: skip
    return QueuedJob(id=id, state=state, **told | changes)


def hand(folder: Path, *ids: str, kind: str = "slurm") -> None:
    """Write down that these jobs were handed in for the run."""
    for number, id in enumerate(ids):
        append(folder, Handed(id, float(number), str(folder / "job.sbatch"), str(folder / "slurm-%j.out"), kind))


def write(folder: Path, id: str, *lines: str) -> None:
    """Let this be what a job printed."""
    (folder / f"slurm-{id}.out").write_text("".join(line + "\n" for line in lines))


class Queued:
    """These jobs. It has state: what was cancelled, and how the run's folder was when it was."""

    def __init__(self, *jobs: QueuedJob, folder: Path | None = None, fault: QueueError | None = None) -> None:
        self._jobs, self._folder, self._fault = jobs, folder, fault
        self.cancelled: list[str] = []
        self.seen: list[list[str]] = []

    def jobs(self, ids: Sequence[str] = (), user: str | None = None) -> tuple[QueuedJob, ...]:
        if self._fault:
            raise self._fault
        return select(self._jobs, ids, user)

    def cancel(self, id: str) -> None:
        self.cancelled.append(id)
        if self._folder:
            self.seen.append(sorted(path.name for path in self._folder.iterdir()))
