"""Slurm's JSON: what ``squeue --json`` and ``sinfo --json`` tell, whichever release wrote it. Pure.

Between releases numbers became ``{"set": ..., "infinite": ..., "number": ...}``, a state became a list of states, an
exit code an object, and ``sinfo`` went from a list of nodes to rows of nodes that are alike. What is neither of these
is an UnknownSchema, told with the writer's version: never a shorter list.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hpctrain.cluster.queue import OVER, QueuedJob, QueueNode
from hpctrain.cluster.slurm import expand_nodes_alone
from hpctrain.errors import LaunchError

# A job's state without what is added to it: COMPLETED, COMPLETING is a job that ended and is being cleared away.
PLAIN = OVER | {"PENDING", "RUNNING", "SUSPENDED"}
# How Slurm writes a number that is not there or has no bound.
NO_NUMBER = {0xFFFF, 0xFFFE, 0xFFFFFFFF, 0xFFFFFFFE, 0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFE}

Row = dict[str, Any]


class UnknownSchema(Exception):
    """JSON in which the jobs or nodes cannot be found; the text says what was looked for."""


def jobs(text: str) -> tuple[QueuedJob, ...]:
    """The jobs that ``squeue --json`` printed."""
    top = _top(text)
    if not isinstance(top.get("jobs"), list):
        raise UnknownSchema("there is no list named jobs")
    return tuple(_read(_job, row) for row in top["jobs"])


def nodes(text: str) -> tuple[QueueNode, ...]:
    """The nodes that ``sinfo --json`` printed, each once."""
    top = _top(text)
    if isinstance(top.get("nodes"), list):
        found = [_read(_node, row) for row in top["nodes"]]
    elif isinstance(top.get("sinfo"), list):
        found = [node for row in top["sinfo"] for node in _read(_alike, row)]
    else:
        raise UnknownSchema("there is no list named nodes or sinfo")
    return _once(found)


def writer(text: str) -> str:
    """The plugin and the release that wrote this JSON, as it says."""
    try:
        meta = json.loads(text)["meta"]
        plugin = meta["plugin"].get("data_parser") or meta["plugin"].get("type")
        release = next((meta[key]["release"] for key in ("slurm", "Slurm") if key in meta), "of unknown release")
        return f"Slurm {release}, plugin {plugin}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return "of a release that it does not tell"


def number(value: object) -> int | None:
    """A count or time, of any release; None where it is not set or has no bound."""
    if isinstance(value, dict):
        if not value.get("set", True) or value.get("infinite"):
            return None
        value = value.get("number")
    if value is None or value == "":
        return None
    found = int(value)
    return None if found in NO_NUMBER else found


def names(text: str | None) -> tuple[str, ...]:
    """The nodes of a list. One that cannot be taken apart stays as it is: it may be somebody else's job's."""
    try:
        return expand_nodes_alone(text) if text else ()
    except LaunchError:
        return (str(text),)


def state(value: object) -> str:
    """A job's state as one word: what is added to it wins, as in Slurm's own tables."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise UnknownSchema(f"job_state is {value!r}")
    return next((word for word in words if word not in PLAIN), words[0])


def _top(text: str) -> Row:
    try:
        top = json.loads(text)
    except ValueError as error:
        raise UnknownSchema(f"it is no JSON: {error}") from None
    if not isinstance(top, dict):
        raise UnknownSchema("it is no object")
    return top


def _read(read: Callable[[Row], Any], row: object) -> Any:
    """One row; whatever is not as it should be in it is an UnknownSchema."""
    try:
        return read(row)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UnknownSchema(f"{type(error).__name__}: {error}") from None


def _job(row: Row) -> QueuedJob:
    nodes = names(row.get("nodes"))
    code, sign = _exit(row.get("exit_code"))
    return QueuedJob(
        id=str(int(row["job_id"])),
        name=row.get("name") or "",
        user=row.get("user_name") or "",
        reason=_reason(row),
        nodes=nodes,
        node_count=number(row.get("node_count")) or len(nodes),
        tasks=number(row.get("tasks")) or 0,
        partition=row.get("partition") or "",
        account=row.get("account") or None,
        qos=row.get("qos") or None,
        restarts=number(row.get("restart_cnt")) or 0,
        exit_code=code,
        exit_signal=sign,
        het_job=str(number(row.get("het_job_id")) or "") or None,
        folder=row.get("current_working_directory") or None,
        output=row.get("stdout_expanded") or row.get("standard_output") or None,
        dependency=row.get("dependency") or None,
        comment=_comment(row.get("comment")),
        **_times(row),
        **_array(row),
    )


def _times(row: Row) -> Row:
    """A job's state, and its times."""
    word, minutes = state(row["job_state"]), number(row.get("time_limit"))
    return {
        "state": word,
        "submitted_at": number(row.get("submit_time")) or None,
        "started_at": number(row.get("start_time")) or None,
        "ends_at": ends(word, minutes, number(row.get("end_time"))),
        "limit_seconds": None if minutes is None else 60 * minutes,
    }


def _array(row: Row) -> Row:
    """The array that a job belongs to, and its numbers there."""
    array, task = number(row.get("array_job_id")), number(row.get("array_task_id"))
    if not array:
        return {"array_job": None, "array_tasks": None}
    return {"array_job": str(array), "array_tasks": row.get("array_task_string") or None if task is None else str(task)}


def ends(state: str, minutes: int | None, at: int | None) -> int | None:
    """When a job ends or ended. Without a limit Slurm writes a year after its start, which is no news."""
    return at or None if state in OVER or (minutes is not None and state != "PENDING") else None


def _reason(row: Row) -> str | None:
    """Why a job waits or ended; the longer text where there is one."""
    said = row.get("state_description") or row.get("state_reason")
    return None if said in (None, "", "None") else said


def _comment(value: object) -> str | None:
    """A comment; some releases keep those of a user, an operator and Slurm side by side."""
    text = value.get("user") or value.get("job") if isinstance(value, dict) else value
    return str(text) if text else None


def _exit(value: object) -> tuple[int, int]:
    """Exit code and signal. Older releases give what ``wait`` gave: the code is the high byte, the signal below."""
    if isinstance(value, dict) and "number" not in value:
        sign = value.get("signal") or {}
        return number(value.get("return_code")) or 0, number(sign.get("id", sign.get("signal_id"))) or 0
    status = number(value) or 0
    return status >> 8 & 0xFF, status & 0x7F


def _node(row: Row) -> QueueNode:
    """A node that has a row of its own."""
    words = [row["state"]] if isinstance(row["state"], str) else row["state"]
    return QueueNode(
        name=str(row["name"]),
        states=_words([*words, *(row.get("state_flags") or ())]),
        reason=row.get("reason") or None,
        partitions=tuple(row.get("partitions") or ()),
        cpus=number(row.get("cpus")) or 0,
        memory_mib=number(row.get("real_memory")) or 0,
        gres=row.get("gres") or None,
    )


def _alike(row: Row) -> list[QueueNode]:
    """The nodes of a row: they are in one partition, and alike in all that is told."""
    reason = row.get("reason")
    shared = {
        "states": _words(row["node"]["state"]),
        "reason": (reason.get("description") if isinstance(reason, dict) else reason) or None,
        "partitions": (row["partition"]["name"],),
        "cpus": number(row["cpus"]["minimum"]) or 0,
        "memory_mib": number(row["memory"]["minimum"]) or 0,
        "gres": row["gres"]["total"] or None,
    }
    listed = row["nodes"]["nodes"]
    parts = [listed] if isinstance(listed, str) else listed
    return [QueueNode(name=name, **shared) for part in parts for name in names(part)]


def _words(words: list[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word.upper() for word in words if word))


def _once(found: list[QueueNode]) -> tuple[QueueNode, ...]:
    """Each node once, with all partitions that it was found in."""
    nodes: dict[str, QueueNode] = {}
    for node in found:
        before = nodes.get(node.name, node)
        nodes[node.name] = replace(node, partitions=tuple(dict.fromkeys((*before.partitions, *node.partitions))))
    return tuple(nodes.values())
