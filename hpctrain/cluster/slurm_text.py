"""Slurm's text: what ``scontrol -o show`` and ``sbatch --test-only`` print, a line each. Pure.

It is what is read where the JSON cannot be: it has been the same for ten years. Times are UNIX seconds where the
command was started with ``SLURM_TIME_FORMAT=%s``, else local time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from hpctrain.cluster.queue import Expected, Partition, QueuedJob, QueueNode
from hpctrain.cluster.slurm_json import UnknownSchema, ends, names

TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}
NONE = ("", "(null)", "N/A", "None", "Unknown", "UNLIMITED", "NONE", "INFINITE")
# Fields of a job that are texts, and their keys.
_TEXTS = {"account": "Account", "qos": "QOS", "folder": "WorkDir", "dependency": "Dependency", "comment": "Comment"}
NO_TASK = "4294967294"  # in the name of a file, of tasks of an array that wait: they have no number yet

# A job's name may hold anything, even what looks like another key, so it is cut out first.
_NAME = re.compile(r"(?P<before>.*?) JobName=(?P<name>.*) (?P<after>UserId=\S+\(\d+\) GroupId=.*)")
_COMPONENTS = re.compile(r" HetJobIdSet=\S+$")
_KEY = re.compile(r"(?:^|\s)([A-Z][\w/:.]*)=")
_DAYS = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")
_EXPECTED = re.compile(r"to start at (\S+) using \d+ processors on(?: nodes)? (\S+)(?: in partition (\S+))?")


def jobs(text: str) -> tuple[QueuedJob, ...]:
    """The jobs that ``scontrol -o show job`` printed."""
    return tuple(_job(line) for line in text.splitlines() if line.startswith("JobId="))


def nodes(text: str) -> tuple[QueueNode, ...]:
    """The nodes that ``scontrol -o show node`` printed."""
    return tuple(_node(_keys(line)) for line in text.splitlines() if line.startswith("NodeName="))


def partitions(text: str) -> tuple[Partition, ...]:
    """The partitions that ``scontrol -o show partition`` printed."""
    return tuple(_partition(_keys(line)) for line in text.splitlines() if line.startswith("PartitionName="))


def expected(text: str) -> Expected:
    """What ``sbatch --test-only`` said. The first of several lines, which a heterogeneous job has."""
    line = next((line for line in text.splitlines() if "to start at" in line), text.strip())
    found = _EXPECTED.search(line)
    said = line.removeprefix("sbatch: ").strip()
    if not found:
        return Expected(None, (), None, said)
    return Expected(time(found[1]), names(found[2]), found[3], said)


def time(text: str) -> int | None:
    """UNIX seconds of a time that Slurm wrote."""
    if text in NONE:
        return None
    return int(text) if text.isdigit() else int(datetime.fromisoformat(text).timestamp())


def seconds(text: str) -> int | None:
    """The length of ``1-02:03:04``, ``02:03:04`` or ``03:04``; None for one without bound."""
    found = _DAYS.fullmatch(text)
    if not found:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def _keys(line: str) -> dict[str, str]:
    """Every key of a line with its value; the first of two wins."""
    marks = list(_KEY.finditer(line))
    stops = [mark.start() for mark in marks[1:]] + [len(line)]
    found: dict[str, str] = {}
    for mark, stop in zip(marks, stops, strict=True):
        found.setdefault(mark[1], line[mark.end() : stop].strip())
    return found


def _job(line: str) -> QueuedJob:
    cut = _NAME.fullmatch(line.rstrip())
    if not cut:
        raise UnknownSchema(f"no job: {line[:80]!r}")
    keys = _keys(cut["before"]) | _keys(cut["after"])
    code, _, sign = keys["ExitCode"].partition(":")
    nodes = names(_value(keys, "NodeList"))
    return QueuedJob(
        id=keys["JobId"],
        name=_COMPONENTS.sub("", cut["name"]) if "HetJobId" in keys else cut["name"],
        user=keys["UserId"].split("(")[0],
        reason=(_value(keys, "Reason") or "").replace("_", " ") or None,
        nodes=nodes,
        node_count=_count(keys.get("NumNodes", "")) or len(nodes),
        tasks=_count(keys.get("NumTasks", "")),
        partition=keys.get("Partition", ""),
        restarts=_count(keys.get("Restarts", "")),
        exit_code=int(code),
        exit_signal=int(sign or 0),
        array_job=keys.get("ArrayJobId"),
        array_tasks=keys.get("ArrayTaskId"),
        het_job=keys.get("HetJobId"),
        output=None if NO_TASK in keys.get("StdOut", "") else _value(keys, "StdOut"),
        **{field: _value(keys, key) for field, key in _TEXTS.items()},
        **_times(keys),
    )


def _times(keys: Mapping[str, str]) -> dict[str, Any]:
    """A job's state, and its times."""
    state, limit = keys["JobState"], seconds(keys["TimeLimit"])
    return {
        "state": state,
        "submitted_at": time(keys["SubmitTime"]),
        "started_at": time(keys["StartTime"]),
        "ends_at": ends(state, limit, time(keys["EndTime"])),
        "limit_seconds": limit,
    }


def _node(keys: Mapping[str, str]) -> QueueNode:
    reason = _value(keys, "Reason")
    return QueueNode(
        name=keys["NodeName"],
        states=tuple(word for word in re.split(r"[+*~#!%$@^\-]", keys["State"]) if word) + _marked(keys["State"]),
        reason=re.sub(r" \[\S+@\S+\]$", "", reason) if reason else None,
        partitions=tuple(keys["Partitions"].split(",")) if _value(keys, "Partitions") else (),
        cpus=_count(keys.get("CPUTot", "")),
        memory_mib=_count(keys.get("RealMemory", "")),
        gres=_value(keys, "Gres"),
    )


def _marked(state: str) -> tuple[str, ...]:
    """A star behind a node's state says that it does not answer."""
    return ("NOT_RESPONDING",) if "*" in state else ()


def _partition(keys: Mapping[str, str]) -> Partition:
    most = keys.get("MaxNodes", "")
    return Partition(
        name=keys["PartitionName"],
        is_default=keys.get("Default") == "YES",
        up=keys.get("State") == "UP",
        nodes=names(_value(keys, "Nodes")),
        max_nodes=int(most) if most.isdigit() else None,
        max_seconds=seconds(keys.get("MaxTime", "")),
    )


def _value(keys: Mapping[str, str], key: str) -> str | None:
    value = keys.get(key, "")
    return None if value in NONE else value


def _count(text: str) -> int:
    """The number that a text begins with: of ``4-8``, the least; 0 for none."""
    found = re.match(r"\d+", text)
    return int(found[0]) if found else 0
