"""The queue through pyslurm: what it tells is translated, and whatever is wrong with it leads to Slurm's commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpctrain.cluster import slurm_json
from hpctrain.cluster.advice import Advice
from hpctrain.cluster.queue import find_queue
from hpctrain.cluster.slurm_commands import CommandQueue
from hpctrain.cluster.slurm_library import JOB, NODE, PARTITION, LibraryQueue
from hpctrain.errors import LaunchError, QueueError
from tests.unit.slurm_lists import FOLDER, text

Install = Callable[..., None]
# A package of the name and the shape of pyslurm, which tells what stands in a file, and writes down what is done to it.
PYSLURM = """
import json, pathlib
__version__ = {version!r}
HERE = pathlib.Path(__file__).parent
class RPCError(Exception): pass
def made(kind, keys):
    return type(kind, (), dict.fromkeys(keys) | {{"__init__": lambda self, *given: setattr(self, "given", given)}})
def loaded(kind, name):
    class Many(dict):
        @staticmethod
        def load():
            found = [kind() for _ in json.loads((HERE / name).read_text())]
            for one, row in zip(found, json.loads((HERE / name).read_text())): vars(one).update(row)
            return Many(enumerate(found))
    return Many
def doing(verb):
    def do(self, *given, **named):
        if self.given == (999,): raise RPCError("Invalid job id specified")
        with (HERE / "done").open("a") as file: print(verb, *self.given, *given, *named.values(), file=file)
    return do
Job, Node, Partition = made("Job", {job!r}), made("Node", {node!r}), made("Partition", {partition!r})
Job.cancel, Job.send_signal, Job.requeue = doing("cancel"), doing("signal"), doing("requeue")
Jobs, Nodes, Partitions = loaded(Job, "jobs"), loaded(Node, "nodes"), loaded(Partition, "partitions")
{more}
"""


def row(id: int = 7, **changes: Any) -> dict[str, Any]:
    """What pyslurm tells of a running job."""
    told: dict[str, Any] = dict.fromkeys(JOB) | {
        "id": id, "name": "run", "user_name": "user1", "state": "RUNNING", "state_reason": "None",
        "allocated_nodes": "node[1-2]", "num_nodes": 2, "ntasks": 8, "partition": "debug", "submit_time": 100,
        "start_time": 110, "end_time": 710, "time_limit": 10, "requeue_count": 1, "exit_code": 0,
        "exit_code_signal": 0, "working_directory": "/scratch/project", "standard_output": "/scratch/slurm-7.out",
    }  # fmt: skip
    assert set(changes) <= set(told)
    return told | changes


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """``install(jobs, version="25.11.2", more="raise KeyError(9999)")`` makes a pyslurm, and a Slurm of 25.11."""
    site, commands = tmp_path / "site", tmp_path / "bin"
    (site / "pyslurm").mkdir(parents=True)
    commands.mkdir()
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PATH", str(commands))
    monkeypatch.delitem(sys.modules, "pyslurm", raising=False)

    def make(*jobs: dict[str, Any], version: str = "25.11.2", more: str = "", release: str | None = "25.11.1") -> None:
        module = PYSLURM.format(version=version, job=JOB, node=NODE, partition=PARTITION, more=more)
        (site / "pyslurm/__init__.py").write_text(module)
        (site / "pyslurm/jobs").write_text(json.dumps(jobs))
        if release:
            tells = (
                f"PATH=/bin:/usr/bin; case $1 in --version) echo slurm {release};; *) cat {FOLDER}/squeue.json;; esac"
            )
            (commands / "squeue").write_text(f"#!/bin/bash\n{tells}\n")
            (commands / "squeue").chmod(0o755)

    return make


@pytest.fixture
def told() -> list[Advice]:
    """The warnings that were given."""
    return []


def done(tmp_path: Path) -> list[str]:
    """What was done to jobs through pyslurm."""
    return (tmp_path / "site/pyslurm/done").read_text().splitlines()


# ---- a pyslurm that fits


def test_a_pyslurm_that_fits_is_asked_without_a_word(install: Install, told: list[Advice]) -> None:
    install(row(7), row(8, user_name="user2"))
    queue = find_queue(told.append)
    assert isinstance(queue, LibraryQueue)
    assert [job.id for job in queue.jobs()] == ["7", "8"]
    assert [job.id for job in queue.jobs(user="user2")] == [job.id for job in queue.jobs(["8"])] == ["8"]
    assert queue.job("9") is None and told == []


def test_what_pyslurm_tells_of_a_job_is_what_slurm_tells(install: Install) -> None:
    install(row(7, comment="a word", account="group"))
    job = find_queue().job("7")
    assert (job.id, job.label, job.name, job.user, job.state) == ("7", "7", "run", "user1", "RUNNING")
    assert (job.nodes, job.node_count, job.tasks, job.partition) == (("node1", "node2"), 2, 8, "debug")
    assert (job.submitted_at, job.started_at, job.ends_at, job.limit_seconds) == (100, 110, 710, 600)
    assert (job.restarts, job.exit_code, job.exit_signal, job.account, job.qos) == (1, 0, 0, "group", None)
    assert (job.folder, job.output, job.comment) == ("/scratch/project", "/scratch/slurm-7.out", "a word")
    assert (job.reason, job.dependency, job.array_job, job.het_job) == (None, None, None, None)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"time_limit": None}, "limit_seconds", None),
        ({"time_limit": None}, "ends_at", None),
        ({"state_reason": "Priority"}, "reason", "Priority"),
        ({"array_id": 5, "array_task_id": 3}, "label", "5_3"),
        ({"array_id": 5}, "label", "5_0"),  # pyslurm tells no number for 0
        ({"array_id": 5, "allocated_nodes": None, "array_tasks_waiting": "4-9"}, "label", "5_[4-9]"),
        ({"standard_output": "/scratch/slurm-5_4294967294.out"}, "output", None),
        ({"heterogeneous_id": 6}, "het_job", "6"),
        ({"allocated_nodes": None}, "node_count", 2),
        ({"dependencies": {"afterok": [3, "4(unfulfilled)"], "after": [], "singleton": True, "satisfy": "all"}},
         "dependency", "afterok:3:4(unfulfilled),singleton"),
        ({"dependencies": {"afterok": [3], "afterany": [4], "satisfy": "any"}}, "dependency", "afterok:3?afterany:4"),
    ],
)  # fmt: skip
def test_pyslurms_ways_to_say_things_are_translated(
    install: Install, changes: dict[str, Any], field: str, value: object
) -> None:
    install(row(7, **changes))
    (job,) = find_queue().jobs()
    assert getattr(job, field) == value


def test_nodes_and_partitions_are_translated(install: Install, tmp_path: Path) -> None:
    install()
    node = dict.fromkeys(NODE) | {"name": "node4", "state": "IDLE+DRAIN", "reason": "gpu ecc", "partitions": ["debug"]}
    node |= {"total_cpus": 16, "real_memory": 4000, "configured_gres": {"gpu": 4}}
    limits = {"max_nodes": "UNLIMITED", "max_time": "UNLIMITED"}
    partition = {"name": "debug", "is_default": True, "state": "UP", "nodes": "node[1-4]", **limits}
    short = partition | {"name": "short", "is_default": False, "state": "DOWN", "max_nodes": 2, "max_time": 30}
    (tmp_path / "site/pyslurm/nodes").write_text(json.dumps([node]))
    (tmp_path / "site/pyslurm/partitions").write_text(json.dumps([partition, short]))
    queue = find_queue()
    assert queue.nodes() == slurm_json.nodes(text("sinfo.json"))[3:]
    first, second = queue.partitions()
    assert (first.is_default, first.up, len(first.nodes), first.max_nodes, first.max_seconds) == (
        True,
        True,
        4,
        None,
        None,
    )
    assert (second.is_default, second.up, second.max_nodes, second.max_seconds) == (False, False, 2, 1800)


def test_what_is_done_to_a_job_goes_through_pyslurm(install: Install, tmp_path: Path) -> None:
    install(row(7))
    queue = find_queue()
    queue.signal("7", "USR1")
    queue.signal("7", "TERM", script=True)
    queue.requeue("7")
    queue.cancel("7")
    assert done(tmp_path) == ["signal 7 SIGUSR1 children", "signal 7 SIGTERM batch", "requeue 7", "cancel 7"]


def test_a_refusal_keeps_slurms_words(install: Install) -> None:
    install()
    with pytest.raises(QueueError) as caught:
        find_queue().cancel("999")
    assert caught.value.what == "pyslurm: cancel 999 failed"
    assert caught.value.why == "Invalid job id specified" and "squeue --me" in caught.value.mend


@pytest.mark.parametrize("id", ["5_3", "5"])
def test_jobs_of_an_array_are_left_to_slurms_commands(install: Install, id: str) -> None:
    install(row(6, array_id=5, array_task_id=3))
    with pytest.raises(LaunchError, match="scancel is not on PATH"):
        find_queue().cancel(id)


def test_a_script_is_left_to_sbatch(install: Install, tmp_path: Path) -> None:
    install()
    for call in (find_queue().submit, find_queue().expect):
        with pytest.raises(LaunchError, match="sbatch is not on PATH"):
            call("#!/bin/bash\n", tmp_path)


# ---- one that does not

FAULTS = {
    "raise ImportError('libslurm.so.44: cannot open shared object file')": "cannot open shared object file",
    "del Job": "it has no Job",
    "del RPCError": "it has no RPCError",
    "del Job.requeue_count": "it has no Job.requeue_count",
    "import os; os._exit(1)": "it ended Python with status 1",
    "raise SystemExit('Could not establish a configuration source')": "Could not establish a configuration source",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_pyslurm_that_does_not_work_leads_to_the_commands_with_one_warning(
    install: Install, told: list[Advice], fault: str
) -> None:
    install(row(7), more=fault)
    queue = find_queue(told.append)
    assert isinstance(queue, CommandQueue) and len(queue.jobs()) == 9
    (advice,) = told
    assert "Slurm 25.11.1" in advice.what and FAULTS[fault] in advice.why and "commands are asked" in advice.mend


def test_a_pyslurm_for_another_release_is_not_asked_and_both_versions_are_told(
    install: Install, told: list[Advice]
) -> None:
    install(row(7), release="22.05.8")
    assert len(find_queue(told.append).jobs()) == 9
    assert [advice.what for advice in told] == ["pyslurm 25.11.2 does not serve with Slurm 22.05.8"]


# An attribute of a job that looks up the name of a code, as an older pyslurm did.
CODED = """
class Coded:
    def __get__(self, one, kind): return {}[9999] if one else self
    __set__ = None
Job.state = Coded()
"""


def test_a_code_that_pyslurm_does_not_know_leads_to_the_commands_with_one_warning(
    install: Install, told: list[Advice]
) -> None:
    install(row(7), more=CODED)
    queue = find_queue(told.append)
    assert isinstance(queue, LibraryQueue)
    assert len(queue.jobs()) == len(queue.jobs()) == 9
    (advice,) = told
    assert advice.what == "pyslurm 25.11.2 does not serve with Slurm 25.11.1" and "KeyError: 9999" in advice.why


def test_a_pyslurm_that_hangs_is_given_up(install: Install) -> None:
    install(row(7), more="import time; time.sleep(1000)")
    with pytest.raises(QueueError, match="pyslurm did not answer in 1 s"):
        LibraryQueue(seconds=1).jobs()


def test_without_commands_a_pyslurm_that_does_not_work_is_told_in_the_refusal(install: Install) -> None:
    install(more="del Job", release=None)
    with pytest.raises(LaunchError, match="it has no Job") as caught:
        find_queue()
    assert "squeue is not on PATH" in caught.value.what


def test_without_commands_a_pyslurm_that_works_is_enough_to_ask(install: Install) -> None:
    install(row(7), release=None)
    assert [job.id for job in find_queue().jobs()] == ["7"]


def test_this_process_never_loads_pyslurm(install: Install) -> None:
    install(row(7))
    find_queue().jobs()
    assert "pyslurm" not in sys.modules
