"""What Slurm says about the job, read from its variables: nodes, tasks, processors, restarts.

Values of the step (what ``srun`` started) win over those of the job (what was allocated): a step may be smaller. The
shell of a batch script and that of ``salloc`` have the job's variables too, and even ``SLURM_PROCID=0``; only
``SLURM_STEP_ID`` tells a task from such a shell. Under mpirun inside a job these are the values of the step that
carries MPI's daemons, not those of the ranks: ``launcher`` decides who is believed.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ClusterShell.NodeSet import RESOLVER_NOGROUP as NO_GROUPS
from ClusterShell.NodeSet import NodeSet
from ClusterShell.RangeSet import RangeSet, RangeSetException

from hpctrain.cluster.fact import Fact
from hpctrain.errors import LaunchError

# An item of a node list: characters of a name, and bracketed numbers or ranges of numbers.
_ITEM = re.compile(r"(?:[\w.\-]|\[\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*\])+")
# The numbers that Slurm gives to a job's shells: the step of a batch script, and that of salloc's interactive shell.
_SHELLS = {"4294967290", "4294967291"}
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


@dataclass(frozen=True)
class Job:
    """A Slurm job as one of its processes sees it; None and () where Slurm says nothing."""

    id: str
    name: str | None
    step: str | None
    nodes: str
    tasks: int | None
    tasks_per_node: tuple[int, ...]
    asked_tasks_per_node: int | None
    cpus_per_task: int | None
    restarts: int
    array_task: int | None
    groups: int
    switches: str | None
    ends_at: int | None
    rank: int | None
    local_rank: int | None
    node: int | None
    facts: tuple[Fact, ...]


# Field of Job -> the variables that may tell it, the most telling first.
_TEXTS = {
    "name": ("SLURM_JOB_NAME",),
    "step": ("SLURM_STEP_ID", "SLURM_STEPID"),
    "nodes": ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    "tasks_per_node": ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    "switches": ("SLURM_TOPOLOGY_ADDR",),
}
_NUMBERS = {
    "tasks": ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS"),
    "asked_tasks_per_node": ("SLURM_NTASKS_PER_NODE",),
    "cpus_per_task": ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK"),
    "restarts": ("SLURM_RESTART_COUNT",),
    "array_task": ("SLURM_ARRAY_TASK_ID",),
    "groups": ("SLURM_HET_SIZE",),
    "ends_at": ("SLURM_JOB_END_TIME",),
}
_TASK = {"rank": ("SLURM_PROCID",), "local_rank": ("SLURM_LOCALID",), "node": ("SLURM_NODEID",)}
_STEP = {"SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NUM_TASKS"}


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is a task that ``srun`` started, and not a shell of the job."""
    step = next((environ[name] for name in _TEXTS["step"] if name in environ), None)
    return "SLURM_PROCID" in environ and step is not None and step not in _SHELLS


def job(environ: Mapping[str, str]) -> Job | None:
    """The job that these variables tell of; None outside Slurm."""
    if "SLURM_JOB_ID" not in environ:
        return None
    found = {"id": Fact("slurm.id", environ["SLURM_JOB_ID"], "SLURM_JOB_ID")}
    numbers = {**_NUMBERS, **(_TASK if in_step(environ) else {})}
    for field, names in {**_TEXTS, **numbers}.items():
        if fact := _fact(environ, field, names):
            found[field] = replace(fact, value=_number(fact)) if field in numbers else fact
    values = {field: fact.value for field, fact in found.items()}
    counts = expand_counts(values.pop("tasks_per_node", ""))
    empty = dict.fromkeys((*_TEXTS, *_NUMBERS, *_TASK)) | {"nodes": "", "restarts": 0, "groups": 1}
    values = {**empty, **values, "tasks_per_node": counts}
    if values["tasks"] is None:
        values["tasks"] = _tasks(environ, values)
    return Job(**values, facts=tuple(found.values()))


def life(environ: Mapping[str, str]) -> str | None:
    """Which life of its job this is, where Slurm has started it again."""
    found = job(environ)
    if found is None or not found.restarts:
        return None
    return f"life {found.restarts + 1} (restart {found.restarts} of job {found.id})"


def expand_nodes(text: str) -> tuple[str, ...]:
    """The names of a node list such as ``n[01-03,7],login``, in its order.

    ``scontrol`` does it where it is on PATH. Raises LaunchError that shows the place where the list stops being one.
    """
    _check_nodes(text)
    if shutil.which("scontrol"):
        done = subprocess.run(["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=30)
        if done.returncode == 0 and done.stdout.split():
            return tuple(done.stdout.split())
    return expand_nodes_alone(text)


def nodes_now(job: str) -> tuple[str, ...] | None:
    """The nodes that a job has at this moment: with ``--no-kill``, fewer than it began with once some were lost.

    None where Slurm's own commands are not there, or do not answer.
    """
    if not shutil.which("scontrol"):
        return None
    command = ["scontrol", "--oneliner", "show", "job", job]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except subprocess.TimeoutExpired:
        return None
    found = re.search(r" NodeList=(\S+)", done.stdout)
    return expand_nodes(found[1]) if found and found[1] != "(null)" else None


def expand_nodes_alone(text: str) -> tuple[str, ...]:
    """``expand_nodes`` without Slurm's own commands, as in most containers."""
    try:
        return tuple(name for item in _check_nodes(text) for name in _names(item))
    except RangeSetException as error:
        raise _malformed(text, str(error)) from None


def _names(item: str) -> Iterator[str]:
    """The names of one item in the order of its brackets, the last one fastest; a NodeSet would sort them."""
    parts = re.split(r"[\[\]]", item)  # every other one was in brackets
    ranges = [[str(n) for one in part.split(",") for n in RangeSet(one)] for part in parts[1::2]]
    for numbers in itertools.product(*ranges):
        yield "".join(itertools.chain(*itertools.zip_longest(parts[::2], numbers, fillvalue="")))


def fold_nodes(names: Sequence[str]) -> str:
    """Names as a short node list: ``n[1-3],login``. What is no name stands beside them."""
    plain = [name for name in names if re.fullmatch(r"[\w.\-]+", name)]
    folded = str(NodeSet.fromlist(plain, resolver=NO_GROUPS))
    return ",".join(filter(None, [folded, *(name for name in names if name not in plain)]))


def expand_counts(text: str) -> tuple[int, ...]:
    """``2(x3),1`` as (2, 2, 2, 1): how Slurm writes a number for each node."""
    counts: list[int] = []
    for part in text.split(",") if text else ():
        match = _COUNT.fullmatch(part)
        if not match:
            raise LaunchError(
                f"{text!r} is not a list of numbers for each node",
                f"{part!r} is neither a number nor a number with its repeats, as in 4(x2)",
                "look at SLURM_TASKS_PER_NODE in the job's environment",
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _check_nodes(text: str) -> list[str]:
    """The items between the commas that lie outside brackets; refuses what is no node list, with the place."""
    items, at = [], 0
    while True:
        match = _ITEM.match(text, at)
        if not match:
            raise _malformed(text, _place(text, at))
        items.append(match[0])
        at = match.end()
        if at == len(text):
            return items
        if text[at] != ",":
            raise _malformed(text, _place(text, at))
        at += 1


def _place(text: str, at: int) -> str:
    return f"character {at + 1} starts no name: {text[at:]!r}" if at < len(text) else "a name is missing at its end"


def _malformed(text: str, why: str) -> LaunchError:
    mend = "look at SLURM_JOB_NODELIST in the job's environment; n[01-03,7] is such a list"
    return LaunchError(f"{text!r} is not a list of nodes", why, mend)


def _fact(environ: Mapping[str, str], field: str, names: tuple[str, ...]) -> Fact | None:
    allowed = [name for name in names if name not in _STEP or in_step(environ)]
    source = next((name for name in allowed if environ.get(name, "") not in ("", "(null)")), None)
    return Fact(f"slurm.{field}", environ[source], source) if source else None


def _number(fact: Fact) -> int:
    try:
        return int(fact.value)
    except ValueError:
        what = f"{fact.source} = {fact.value!r} is not a number"
        raise LaunchError(what, "Slurm sets it to one", f"unset {fact.source}") from None


def _tasks(environ: Mapping[str, str], values: dict) -> int | None:
    """How many tasks, where no variable says it: some sites export only what was asked for each node."""
    if values["tasks_per_node"]:
        return sum(values["tasks_per_node"])
    nodes = environ.get("SLURM_JOB_NUM_NODES", environ.get("SLURM_NNODES"))
    asked = values["asked_tasks_per_node"]
    return int(nodes) * asked if nodes and asked else None
