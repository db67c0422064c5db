"""Lists of jobs and nodes as a real cluster printed them, and as newer releases of Slurm would print the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "slurm_cli"
# Keys that newer releases wrap.
NUMBERS = (
    "array_job_id", "array_task_id", "end_time", "het_job_id", "node_count", "start_time", "submit_time", "tasks",
    "time_limit",
)  # fmt: skip
META = {
    "plugin": {"type": "openapi/slurmctld", "data_parser": "data_parser/v0.0.42"},
    "slurm": {"version": {"major": "24", "micro": "1", "minor": "11"}, "release": "24.11.1", "cluster": "lab"},
}


def text(name: str) -> str:
    return (FOLDER / name).read_text()


def wrapped(value: int | None) -> dict[str, Any]:
    """A number as releases from 23.02 write it."""
    return {"set": value is not None, "infinite": False, "number": value or 0}


def newer_jobs() -> str:
    """The recorded jobs as ``squeue --json`` of release 24.11 would print them."""
    rows = json.loads(text("squeue.json"))["jobs"]
    return json.dumps({"jobs": [_newer_job(row) for row in rows], "meta": META, "errors": [], "warnings": []})


def _newer_job(row: dict[str, Any]) -> dict[str, Any]:
    status = row.pop("exit_code", 0)
    sign = {"id": wrapped(status & 0x7F or None), "name": ""}
    code = {"status": ["ERROR" if status else "SUCCESS"], "return_code": wrapped(status >> 8), "signal": sign}
    numbers = {key: wrapped(row.get(key)) for key in NUMBERS}
    return {**row, **numbers, "exit_code": code, "job_state": [row["job_state"]], "scheduled_nodes": ""}


def newer_nodes() -> str:
    """The recorded nodes as ``sinfo --json --Node`` of release 24.11 would print them."""
    rows = json.loads(text("sinfo.json"))["nodes"]
    return json.dumps({"sinfo": [_newer_node(row) for row in rows], "meta": META, "errors": [], "warnings": []})


def _newer_node(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "partition": {"name": row["partitions"][0], "nodes": {"configured": "node[1-4]", "total": 4}},
        "node": {"state": [row["state"].upper(), *row["state_flags"]]},
        "nodes": {"allocated": 0, "idle": 1, "other": 0, "total": 1, "hostnames": [], "nodes": [row["name"]]},
        "cpus": {"minimum": row["cpus"], "maximum": row["cpus"]},
        "memory": {"minimum": row["real_memory"], "maximum": row["real_memory"], "allocated": 0},
        "gres": {"total": row["gres"], "used": row["gres_used"]},
        "reason": {"time": wrapped(row["reason_changed_at"]), "description": row["reason"], "user": ""},
    }
