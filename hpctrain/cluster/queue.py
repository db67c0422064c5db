"""Queue: what hpctrain asks of Slurm about jobs and nodes, and what it tells Slurm to do, whoever carries it there.

``find_queue`` finds who carries it. Ids are texts, since a job of an array is ``12_3``. Every call has a time limit,
and an error keeps Slurm's own words.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from hpctrain.cluster.advice import Advice
from hpctrain.errors import LaunchError

OVER = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "TIMEOUT",
    }
)
USABLE = frozenset({"IDLE", "MIXED", "ALLOCATED"})
AWAY = frozenset(
    {
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "FAIL",
        "FAILING",
        "MAINT",
        "MAINTENANCE",
        "NOT_RESPONDING",
    }
)

_SPAN = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")

Tell = Callable[[Advice], None]


@dataclass(frozen=True)
class QueuedJob:
    """A job as the queue has it. Times are UNIX seconds; None where Slurm does not say or has no limit."""

    id: str
    name: str
    user: str
    state: str
    """One word in capitals, such as PENDING, RUNNING, COMPLETING or COMPLETED."""
    reason: str | None
    """Why it waits, or why it ended so."""
    nodes: tuple[str, ...]
    node_count: int
    tasks: int
    partition: str
    account: str | None
    qos: str | None
    submitted_at: int | None
    started_at: int | None
    """When it started; of a job that waits, when Slurm expects it to."""
    ends_at: int | None
    """When it ended, or when its time limit ends it."""
    limit_seconds: int | None
    restarts: int
    exit_code: int
    exit_signal: int
    array_job: str | None
    array_tasks: str | None
    """The numbers of an array that this one stands for: ``3``, or ``4-9%2`` of those that wait."""
    het_job: str | None
    """The first component's id, for each component of a heterogeneous job."""
    folder: str | None
    output: str | None
    """Where its output goes, where Slurm tells."""
    dependency: str | None
    comment: str | None

    @property
    def label(self) -> str:
        """The id that a person writes: ``12``, or ``12_3`` in an array."""
        if self.array_job is None or self.array_tasks is None:
            return self.id
        waiting = not self.array_tasks.isdigit()
        return f"{self.array_job}_[{self.array_tasks}]" if waiting else f"{self.array_job}_{self.array_tasks}"

    @property
    def over(self) -> bool:
        """Whether it has ended and will not start again by itself."""
        return self.state in OVER

    @property
    def waits(self) -> bool:
        """Whether it is yet to start, or to start again."""
        return self.state in {"PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD"}

    def named(self, ids: Iterable[str]) -> bool:
        """Whether one of these ids means it: its own, or that of the array or heterogeneous job that it belongs to.

        Jobs of an array that wait are one until they start; the number of each means it.
        """
        own = {self.id, self.label, self.array_job, self.het_job}
        return any(id in own or self._stands_for(id) for id in ids)

    def _stands_for(self, id: str) -> bool:
        array, _, task = id.partition("_")
        return array == self.array_job and task.isdigit() and holds(self.array_tasks or "", int(task))


@dataclass(frozen=True)
class QueueNode:
    """A node as the queue has it."""

    name: str
    states: tuple[str, ...]
    """Words in capitals, such as MIXED, DRAIN."""
    reason: str | None
    partitions: tuple[str, ...]
    cpus: int
    memory_mib: int
    gres: str | None
    """What else it has, as Slurm writes it: ``gpu:4``."""

    @property
    def usable(self) -> bool:
        """Whether jobs may start on it, now or when others end."""
        return not USABLE.isdisjoint(self.states) and AWAY.isdisjoint(self.states)


@dataclass(frozen=True)
class Partition:
    """A partition, and its limits for one job; None where there is none."""

    name: str
    is_default: bool
    up: bool
    nodes: tuple[str, ...]
    max_nodes: int | None
    max_seconds: int | None


@dataclass(frozen=True)
class Expected:
    """What Slurm says would become of a script if it were handed in now; ``said`` is its line as told."""

    starts_at: int | None
    nodes: tuple[str, ...]
    partition: str | None
    said: str


class Queue(Protocol):
    """One cluster's queue. Any process may call it; of a job's ranks, let one.

    Raises QueueError where Slurm refuses or does not answer in time, with its words, and LaunchError where a command
    that is needed is not there.
    """

    def jobs(self, ids: Sequence[str] = (), user: str | None = None) -> tuple[QueuedJob, ...]:
        """All jobs that Slurm lists, those that ended a while ago too; only these ids', only this user's.

        An id stands for all jobs of an array or of a heterogeneous job. One that Slurm has forgotten is left out.
        """

    def job(self, id: str) -> QueuedJob | None:
        """This job, the first of an array; None when Slurm does not list it (any more)."""

    def nodes(self) -> tuple[QueueNode, ...]:
        """Every node of the cluster."""

    def partitions(self) -> tuple[Partition, ...]:
        """Every partition that this user may see."""

    def submit(self, script: str, folder: Path, options: Sequence[str] = ()) -> str:
        """Hand in the text of a batch script, to start in ``folder``, and give its id. Options win over its own."""

    def expect(self, script: str, folder: Path, options: Sequence[str] = ()) -> Expected:
        """When and where this script would start. Hands nothing in. QueueError where Slurm would refuse it."""

    def cancel(self, id: str) -> None:
        """End a job, or take it out of the queue; one that is over already stays so."""

    def signal(self, id: str, name: str, script: bool = False) -> None:
        """Send a signal, such as ``USR1``, to a running job's tasks; or to its batch script alone."""

    def requeue(self, id: str) -> None:
        """End a running job and put it back into the queue under its id."""


def find_queue(tell: Tell | None = None) -> Queue:
    """The queue of the cluster that this machine belongs to.

    Where pyslurm is there and does not fit, ``tell`` gets one warning, and Slurm's commands are used; without ``tell``
    it goes to the error stream. Raises LaunchError where there is neither.
    """
    tell, commands = tell or warn, shutil.which("squeue") is not None
    if find_spec("pyslurm"):
        from hpctrain.cluster.slurm_library import LibraryQueue, misfit

        fault = misfit()
        if fault is None:
            return LibraryQueue(tell)
        if not commands:
            raise _none(fault.what, fault.why)
        tell(fault)
    if not commands:
        raise _none("pyslurm is not installed")
    from hpctrain.cluster.slurm_commands import CommandQueue

    return CommandQueue(tell)


def warn(advice: Advice) -> None:
    """Say a warning on the error stream."""
    print(f"hpctrain: warning: {advice}", file=sys.stderr, flush=True)


def select(jobs: Iterable[QueuedJob], ids: Sequence[str], user: str | None) -> tuple[QueuedJob, ...]:
    """Those jobs that these ids name, or all without ids, of this user, or of all."""
    return tuple(job for job in jobs if (not ids or job.named(ids)) and user in (None, job.user))


def holds(tasks: str, number: int) -> bool:
    """Whether a number is among ``3``, ``1,4-9`` or ``0-20:5%2``. Slurm cuts long lists off: then it may be."""
    for part in tasks.split("%")[0].split(","):
        found = _SPAN.fullmatch(part)
        if found is None and part.endswith("..."):
            return True
        if found:
            first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
            if number in range(first, last + 1, step):
                return True
    return False


def _none(*library: str) -> LaunchError:
    """No way to a queue; what is the matter with pyslurm is told too."""
    return LaunchError(
        f"no queue was found: squeue is not on PATH, and {': '.join(library)}",
        "hpctrain asks Slurm by its own commands, or through pyslurm",
        "put Slurm's commands on PATH (module load slurm), log in where they are, or start with mpirun instead",
    )
