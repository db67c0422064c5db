"""The queue through pyslurm: the only file that imports it, and that only in a process of its own.

libslurm ends the process where it finds no configuration, and a call to a controller that hangs cannot be interrupted.
So each question starts Python anew, which costs a few tenths of a second, has a time limit, and can do no harm. What
pyslurm cannot answer (a code of a newer controller that it does not know, a class that it does not have any more) goes
to Slurm's commands from then on, after one warning with both versions.

Scripts are handed in by ``sbatch`` always: pyslurm reads ``#SBATCH`` lines in part only, and has no forecast. Written
for the classes of pyslurm 25.11. It tells an exit code of 128 or more less 128.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from hpctrain.cluster import slurm_commands
from hpctrain.cluster.advice import Advice
from hpctrain.cluster.queue import Expected, Partition, QueuedJob, QueueNode, Tell, select, warn
from hpctrain.cluster.slurm_commands import CommandQueue
from hpctrain.cluster.slurm_json import ends, names
from hpctrain.cluster.slurm_text import NO_TASK
from hpctrain.errors import QueueError

# What pyslurm's objects are asked for.
JOB = (
    "id", "name", "user_name", "state", "state_reason", "allocated_nodes", "num_nodes", "ntasks", "partition",
    "account", "qos", "submit_time", "start_time", "end_time", "time_limit", "requeue_count", "exit_code",
    "exit_code_signal", "array_id", "array_task_id", "array_tasks_waiting", "heterogeneous_id", "working_directory",
    "standard_output", "dependencies", "comment",
)  # fmt: skip
NODE = ("name", "state", "reason", "partitions", "total_cpus", "real_memory", "configured_gres")
PARTITION = ("name", "is_default", "state", "nodes", "max_nodes", "max_time")
LISTS = {"jobs": ("Jobs", JOB), "nodes": ("Nodes", NODE), "partitions": ("Partitions", PARTITION)}
USED = {
    "Jobs": ("load", "values"),
    "Nodes": ("load", "values"),
    "Partitions": ("load", "values"),
    "Job": (*JOB, "cancel", "send_signal", "requeue"),
    "Node": NODE,
    "Partition": PARTITION,
    "RPCError": (),
}

Row = dict[str, Any]


class LibraryQueue:
    """The queue that pyslurm tells of. It has state: once pyslurm fails, Slurm's commands are asked instead."""

    def __init__(self, tell: Tell = warn, seconds: float = slurm_commands.SECONDS) -> None:
        self._tell, self._seconds = tell, seconds
        self._commands = CommandQueue(tell, seconds)
        self._failed = False

    def jobs(self, ids: Sequence[str] = (), user: str | None = None) -> tuple[QueuedJob, ...]:
        rows = self._ask("jobs")
        return self._commands.jobs(ids, user) if rows is None else select(map(_job, rows), ids, user)

    def job(self, id: str) -> QueuedJob | None:
        return next(iter(self.jobs([id])), None)

    def nodes(self) -> tuple[QueueNode, ...]:
        rows = self._ask("nodes")
        return self._commands.nodes() if rows is None else tuple(map(_node, rows))

    def partitions(self) -> tuple[Partition, ...]:
        rows = self._ask("partitions")
        return self._commands.partitions() if rows is None else tuple(map(_partition, rows))

    def submit(self, script: str, folder: Path, options: Sequence[str] = ()) -> str:
        return self._commands.submit(script, folder, options)

    def expect(self, script: str, folder: Path, options: Sequence[str] = ()) -> Expected:
        return self._commands.expect(script, folder, options)

    def cancel(self, id: str) -> None:
        if not self._single(id) or self._ask("cancel", id) is None:
            self._commands.cancel(id)

    def signal(self, id: str, name: str, script: bool = False) -> None:
        steps = "batch" if script else "children"
        if not self._single(id) or self._ask("signal", id, f"SIG{name}", steps) is None:
            self._commands.signal(id, name, script)

    def requeue(self, id: str) -> None:
        if not self._single(id) or self._ask("requeue", id) is None:
            self._commands.requeue(id)

    def _single(self, id: str) -> bool:
        """Whether pyslurm can mean this job: it knows numbers alone, and no arrays."""
        return id.isdigit() and all(job.array_job is None and job.het_job is None for job in self.jobs([id]))

    def _ask(self, *words: str) -> Any:
        """What pyslurm answers; None where it cannot, and from then on."""
        if self._failed:
            return None
        said = ask(words, self._seconds)
        if "refused" in said:
            raise QueueError(
                f"pyslurm: {' '.join(words)} failed", said["refused"], slurm_commands.mend(said["refused"])
            )
        if "broken" in said:
            self._failed = True
            self._tell(_misfit(said, slurm_commands.release()))
            return None
        return said["answer"]


def misfit() -> Advice | None:
    """Why the pyslurm that is installed does not serve here; None where it does.

    Its first two numbers are those of the Slurm that it was made for.
    """
    said, release = ask(["probe"], slurm_commands.SECONDS), slurm_commands.release()
    version = said.get("version")
    if "broken" not in said and release and version and version.split(".")[:2] != release.split(".")[:2]:
        said["broken"] = "it is made for another release of Slurm"
    return _misfit(said, release) if "broken" in said else None


def ask(words: Sequence[str], seconds: float) -> Row:
    """Put a question to pyslurm in a process of its own; gives ``answer``, or how it was ``refused`` or ``broken``."""
    command = [sys.executable, "-P", "-m", __name__, *words]
    path = os.pathsep.join(part for part in sys.path if part)
    try:
        done = subprocess.run(
            command, env={**os.environ, "PYTHONPATH": path}, timeout=seconds, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, errors="replace", check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        why = "Slurm's controller is busy or cannot be reached"
        raise QueueError(f"pyslurm did not answer in {seconds:.0f} s", why, "try again later") from None
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["and it said nothing"])[-1]
        return {"broken": f"it ended Python with status {done.returncode}: {last}"}


def _misfit(said: Mapping[str, Any], release: str | None) -> Advice:
    version = said.get("version") or _installed()
    return Advice(
        f"pyslurm {version} does not serve with Slurm {release or 'of unknown release'}",
        str(said["broken"]),
        "Slurm's commands are asked instead; pip install the pyslurm of this release, or uninstall it",
    )


def _installed() -> str:
    """The version of a pyslurm that could not be imported to tell it."""
    try:
        return metadata.version("pyslurm")
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _job(row: Row) -> QueuedJob:
    nodes = names(row["allocated_nodes"])
    output = row["standard_output"] or None
    return QueuedJob(
        id=str(row["id"]),
        name=row["name"] or "",
        user=row["user_name"] or "",
        reason=None if row["state_reason"] in (None, "", "None") else row["state_reason"],
        nodes=nodes,
        node_count=row["num_nodes"] or len(nodes),
        tasks=row["ntasks"] or 0,
        partition=row["partition"] or "",
        account=row["account"] or None,
        qos=row["qos"] or None,
        restarts=row["requeue_count"] or 0,
        exit_code=row["exit_code"],
        exit_signal=row["exit_code_signal"],
        array_job=str(row["array_id"]) if row["array_id"] else None,
        array_tasks=_tasks(row) if row["array_id"] else None,
        het_job=str(row["heterogeneous_id"]) if row["heterogeneous_id"] else None,
        folder=row["working_directory"] or None,
        output=None if output and NO_TASK in output else output,
        dependency=_dependency(row["dependencies"] or {}),
        comment=row["comment"] or None,
        **_times(row),
    )


def _times(row: Row) -> Row:
    """A job's state, and its times."""
    minutes = row["time_limit"]
    return {
        "state": row["state"],
        "submitted_at": row["submit_time"],
        "started_at": row["start_time"],
        "ends_at": ends(row["state"], minutes, row["end_time"]),
        "limit_seconds": None if minutes is None else 60 * minutes,
    }


def _tasks(row: Row) -> str | None:
    """The number in an array. pyslurm tells none for 0, so a job that has nodes and no number is that one."""
    if row["array_task_id"] is None:
        return row["array_tasks_waiting"] or ("0" if row["allocated_nodes"] else None)
    return str(row["array_task_id"])


def _dependency(kinds: Mapping[str, Any]) -> str | None:
    """Dependencies as sbatch takes them."""
    found = [f"{kind}:{':'.join(map(str, jobs))}" for kind, jobs in kinds.items() if jobs and isinstance(jobs, list)]
    found += ["singleton"] if kinds.get("singleton") else []
    return ("?" if kinds.get("satisfy") == "any" else ",").join(found) or None


def _node(row: Row) -> QueueNode:
    return QueueNode(
        name=row["name"],
        states=tuple(word for word in row["state"].upper().split("+") if word),
        reason=row["reason"] or None,
        partitions=tuple(row["partitions"] or ()),
        cpus=row["total_cpus"] or 0,
        memory_mib=row["real_memory"] or 0,
        gres=",".join(f"{name}:{count}" for name, count in (row["configured_gres"] or {}).items()) or None,
    )


def _partition(row: Row) -> Partition:
    most, minutes = row["max_nodes"], row["max_time"]
    return Partition(
        name=row["name"],
        is_default=bool(row["is_default"]),
        up=row["state"] == "UP",
        nodes=names(row["nodes"]),
        max_nodes=most if isinstance(most, int) else None,
        max_seconds=60 * minutes if isinstance(minutes, int) else None,
    )


# ---- in the process that has pyslurm


def main(words: Sequence[str]) -> None:
    """Answer one question, as a line of JSON."""
    version = None
    try:
        import pyslurm

        version = getattr(pyslurm, "__version__", None)
        said = _answered(pyslurm, words)
    except Exception as error:  # of any kind: an old build lacks classes, and a new controller has unknown codes
        said = {"broken": f"{type(error).__name__}: {error}"}
    print(json.dumps({"version": version, **said}))


def _answered(pyslurm: Any, words: Sequence[str]) -> Row:
    if lacks := _lacks(pyslurm):
        return {"broken": f"it has no {', '.join(lacks[:3])}"}
    try:
        return {"answer": _answer(pyslurm, *words)}
    except pyslurm.RPCError as error:
        return {"refused": str(error)}


def _lacks(pyslurm: Any) -> list[str]:
    """What is used here and pyslurm does not have."""
    names = [name for name in USED if not hasattr(pyslurm, name)]
    parts = [(name, part) for name, parts in USED.items() if name not in names for part in parts]
    return names + [f"{one}.{part}" for one, part in parts if not hasattr(getattr(pyslurm, one), part)]


def _answer(pyslurm: Any, verb: str, id: str = "0", name: str = "", steps: str = "") -> Any:
    if verb in LISTS:
        kind, keys = LISTS[verb]
        return [{key: getattr(one, key) for key in keys} for one in getattr(pyslurm, kind).load().values()]
    job = pyslurm.Job(int(id))
    actions = {
        "probe": lambda: None,
        "cancel": job.cancel,
        "signal": lambda: job.send_signal(name, steps=steps),
        "requeue": job.requeue,
    }
    actions[verb]()
    return True


if __name__ == "__main__":
    main(sys.argv[1:])
