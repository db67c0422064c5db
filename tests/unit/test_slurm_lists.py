"""What Slurm's JSON and Slurm's text tell of one queue, in the shapes of several releases."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster import slurm_json, slurm_text
from hpctrain.cluster.queue import QueuedJob, holds, select
from hpctrain.cluster.slurm_json import UnknownSchema
from tests.unit.slurm_lists import newer_jobs, newer_nodes, text


@pytest.fixture(autouse=True)
def utc(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The recorded text has the times of a cluster that lived in UTC."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def by_label(jobs: tuple[QueuedJob, ...]) -> dict[str, QueuedJob]:
    """Jobs by what a person calls them, without what only one of Slurm's commands tells."""
    return {job.label: replace(job, output=None, reason=None) for job in jobs}


# ---- the same queue in all shapes


def test_the_json_and_the_text_of_a_queue_tell_the_same_jobs() -> None:
    told = by_label(slurm_json.jobs(text("squeue.json")))
    assert sorted(told) == ["1", "2", "3", "4_1", "4_2", "4_[3-5%2]", "5", "6", "7"]
    assert told == by_label(slurm_text.jobs(text("scontrol-show-job.txt")))


def test_a_newer_release_tells_the_same_jobs() -> None:
    assert slurm_json.jobs(newer_jobs()) == slurm_json.jobs(text("squeue.json"))


def test_the_json_the_text_and_a_newer_release_tell_the_same_nodes() -> None:
    nodes = slurm_json.nodes(text("sinfo.json"))
    assert [node.name for node in nodes] == ["node1", "node2", "node3", "node4"]
    assert nodes == slurm_text.nodes(text("scontrol-show-node.txt")) == slurm_json.nodes(newer_nodes())


def test_a_drained_node_is_not_usable_and_says_why() -> None:
    nodes = slurm_json.nodes(text("sinfo.json"))
    assert [node.usable for node in nodes] == [True, True, True, False]
    assert (nodes[3].states, nodes[3].reason) == (("IDLE", "DRAIN"), "gpu ecc")


def test_a_node_that_does_not_answer_is_not_usable() -> None:
    line = text("scontrol-show-node.txt").splitlines()[0].replace("State=MIXED", "State=IDLE*")
    (node,) = slurm_text.nodes(line)
    assert node.states == ("IDLE", "NOT_RESPONDING") and not node.usable


def test_a_node_in_two_partitions_is_told_once() -> None:
    top = json.loads(newer_nodes())
    again = json.loads(json.dumps(top["sinfo"]))
    for row in again:
        row["partition"]["name"] = "long"
    top["sinfo"] += again
    nodes = slurm_json.nodes(json.dumps(top))
    assert [(node.name, node.partitions) for node in nodes] == [(f"node{n}", ("debug", "long")) for n in (1, 2, 3, 4)]


def test_nodes_that_are_alike_are_told_one_by_one() -> None:
    top = json.loads(newer_nodes())
    del top["sinfo"][1:]
    top["sinfo"][0]["nodes"]["nodes"] = ["node[1-3]", "node9"]
    nodes = slurm_json.nodes(json.dumps(top))
    assert [node.name for node in nodes] == ["node1", "node2", "node3", "node9"]


def test_partitions_have_limits_and_one_is_the_default() -> None:
    (partition,) = slurm_text.partitions(text("scontrol-show-partition.txt"))
    assert (partition.name, partition.is_default, partition.up) == ("debug", True, True)
    assert (partition.max_nodes, partition.max_seconds, len(partition.nodes)) == (None, None, 4)
    line = text("scontrol-show-partition.txt").replace(
        "MaxNodes=UNLIMITED MaxTime=UNLIMITED", "MaxNodes=2 MaxTime=1-0:30:00"
    )
    (partition,) = slurm_text.partitions(line.replace("State=UP", "State=DOWN"))
    assert (partition.max_nodes, partition.max_seconds, partition.up) == (2, 88_200, False)


# ---- one job


@pytest.mark.parametrize(
    ("label", "field", "value"),
    [
        ("1", "state", "COMPLETED"),
        ("1", "nodes", ("node1", "node2")),
        ("1", "over", True),
        ("2", "exit_code", 3),
        ("3", "limit_seconds", 600),
        ("3", "ends_at", 1_795_990_418),
        ("3", "over", False),
        ("4_1", "id", "8"),
        ("4_[3-5%2]", "reason", "JobArrayTaskLimit"),
        ("4_[3-5%2]", "waits", True),
        ("5", "node_count", 4),
        ("5", "started_at", None),
        ("6", "ends_at", None),  # it has no limit
        ("7", "het_job", "6"),
    ],
)  # fmt: skip
def test_a_recorded_job_says(label: str, field: str, value: object) -> None:
    jobs = {job.label: job for job in slurm_json.jobs(text("squeue.json"))}
    assert getattr(jobs[label], field) == value


def test_an_id_stands_for_all_jobs_of_an_array_or_of_a_heterogeneous_job() -> None:
    jobs = slurm_json.jobs(text("squeue.json"))
    assert [job.label for job in select(jobs, ["4"], None)] == ["4_1", "4_2", "4_[3-5%2]"]
    assert [job.label for job in select(jobs, ["4_2", "6"], None)] == ["6", "7", "4_2"]
    assert select(jobs, ["1"], "somebody") == ()
    assert [job.label for job in select(jobs, ["4_4"], None)] == ["4_[3-5%2]"]
    assert select(jobs, ["4_6", "5_1", "4_x", "_", ""], None) == ()
    assert select(jobs, [], "user1") == jobs


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 60), st.sampled_from(["", "%2"]))
def test_a_list_of_tasks_holds_exactly_its_numbers(numbers: set[int], number: int, limit: str) -> None:
    assert holds(",".join(map(str, sorted(numbers))) + limit, number) == (number in numbers)


@pytest.mark.parametrize(
    ("tasks", "number", "found"),
    [
        ("1,4-9", 7, True),
        ("1,4-9", 3, False),
        ("0-20:5%2", 15, True),
        ("0-20:5%2", 16, False),
        ("1-3,5,...", 99, True),  # cut off: it may be
        ("1-3,5,...", 2, True),
        ("", 0, False),
    ],
)
def test_a_list_of_tasks_is_read_in_all_its_forms(tasks: str, number: int, found: bool) -> None:
    assert holds(tasks, number) == found


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("RUNNING", "RUNNING"),
        (["RUNNING"], "RUNNING"),
        (["COMPLETED", "COMPLETING"], "COMPLETING"),
        (["RUNNING", "CONFIGURING"], "CONFIGURING"),
        (["PENDING", "REQUEUED"], "REQUEUED"),
        (["A_STATE_OF_THE_FUTURE"], "A_STATE_OF_THE_FUTURE"),
    ],
)
def test_a_state_is_one_word_and_what_is_added_to_it_wins(words: object, state: str) -> None:
    assert slurm_json.state(words) == state


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, 7),
        ("7", 7),
        (None, None),
        ("", None),
        (0xFFFFFFFE, None),
        ({"set": True, "infinite": False, "number": 7}, 7),
        ({"set": False, "infinite": False, "number": 0}, None),
        ({"set": True, "infinite": True, "number": 0}, None),
        ({"number": 7}, 7),
    ],
)
def test_a_number_is_read_in_all_its_forms(value: object, number: int | None) -> None:
    assert slurm_json.number(value) == number


def test_a_node_list_that_cannot_be_taken_apart_hides_no_job() -> None:
    listed = text("squeue.json").replace('"nodes": "node[1-2]"', '"nodes": "ring{node1}"')
    shown = text("scontrol-show-job.txt").replace("NodeList=node[1-2]", "NodeList=ring{node1}")
    for jobs in (slurm_json.jobs(listed), slurm_text.jobs(shown)):
        job = {job.label: job for job in jobs}["3"]
        assert (len(jobs), job.nodes, job.node_count) == (9, ("ring{node1}",), 2)


def test_a_signal_that_ended_a_job_is_told() -> None:
    line = text("squeue.json").replace('"exit_code": 768', '"exit_code": 9')
    assert {job.id: (job.exit_code, job.exit_signal) for job in slurm_json.jobs(line)}["2"] == (0, 9)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF, blacklist_categories=["Cc"]), min_size=1))
def test_a_name_may_be_anything_and_changes_nothing_else(name: str) -> None:
    line = text("scontrol-show-job.txt").splitlines()[2]
    (plain,), (named,) = slurm_text.jobs(line), slurm_text.jobs(line.replace("JobName=running", f"JobName={name}"))
    assert named == replace(plain, name=name)


@pytest.mark.parametrize("name", ["x JobState=FAILED", "a UserId=b(0) GroupId=c", "my job", "=", " "])
def test_a_name_that_looks_like_other_keys_is_only_a_name(name: str) -> None:
    line = text("scontrol-show-job.txt").splitlines()[2]
    (job,) = slurm_text.jobs(line.replace("JobName=running", f"JobName={name}"))
    assert (job.name, job.state, job.user) == (name, "RUNNING", "user1")


# ---- what is unknown


@pytest.mark.parametrize(
    "said",
    [
        "",
        "slurm_load_jobs error",
        "[]",
        "{}",
        '{"queue": []}',
        '{"jobs": {}}',
        '{"jobs": [{}]}',
        '{"jobs": [7]}',
        '{"jobs": [{"job_id": 1}]}',
        '{"jobs": [{"job_id": 1, "job_state": []}]}',
        '{"jobs": [{"job_id": 1, "job_state": 3}]}',
        '{"jobs": [{"job_id": "one", "job_state": "RUNNING"}]}',
        '{"jobs": [{"job_id": 1, "job_state": "RUNNING", "end_time": {"number": "soon"}}]}',
    ],
)
def test_jobs_of_an_unknown_schema_are_an_error_and_never_a_shorter_list(said: str) -> None:
    with pytest.raises(UnknownSchema):
        slurm_json.jobs(said)


@pytest.mark.parametrize(
    "said",
    ["{}", '{"nodes": 1}', '{"nodes": [{"name": "n1"}]}', '{"sinfo": [{}]}', '{"sinfo": [{"nodes": ["n1"]}]}'],
)
def test_nodes_of_an_unknown_schema_are_an_error(said: str) -> None:
    with pytest.raises(UnknownSchema):
        slurm_json.nodes(said)


def test_text_that_is_no_job_is_an_error() -> None:
    with pytest.raises(UnknownSchema, match="no job"):
        slurm_text.jobs("JobId=1 JobState=RUNNING")


def test_the_writer_of_a_json_is_told_with_its_version() -> None:
    assert slurm_json.writer(text("squeue.json")) == "Slurm 22.05.8, plugin openapi/v0.0.38"
    assert slurm_json.writer(newer_jobs()) == "Slurm 24.11.1, plugin data_parser/v0.0.42"
    assert slurm_json.writer("{}") == slurm_json.writer("no json") == "of a release that it does not tell"


# ---- times and forecasts


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("03:04", 184), ("02:03:04", 7384), ("1-02:03:04", 93_784), ("365-00:00:00", 31_536_000), ("UNLIMITED", None)],
)
def test_lengths_of_time_are_read(said: str, seconds: int | None) -> None:
    assert slurm_text.seconds(said) == seconds


@given(st.integers(1, 2**31))
def test_a_time_is_the_same_in_both_its_forms(at: int) -> None:
    written = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(at))
    assert slurm_text.time(written) == slurm_text.time(str(at)) == at


@pytest.mark.parametrize("said", ["Unknown", "None", "N/A"])
def test_no_time_is_none(said: str) -> None:
    assert slurm_text.time(said) is None


def test_a_forecast_tells_when_and_where() -> None:
    line = "sbatch: Job 2 to start at 2026-11-30T14:11:35 using 4 processors on nodes node[1-2] in partition debug"
    found = slurm_text.expected(f"sbatch: a word of the site\n{line}\n")
    assert (found.starts_at, found.nodes, found.partition) == (1_796_047_895, ("node1", "node2"), "debug")
    assert found.said == line.removeprefix("sbatch: ")


def test_a_forecast_without_partition_is_one_too() -> None:
    found = slurm_text.expected("sbatch: Job 2 to start at 1796047895 using 4 processors on node7")
    assert (found.starts_at, found.nodes, found.partition) == (1_796_047_895, ("node7",), None)


def test_a_forecast_that_cannot_be_read_is_handed_on_as_it_was_told() -> None:
    found = slurm_text.expected("sbatch: the job would start soon\n")
    assert (found.starts_at, found.nodes, found.said) == (None, (), "the job would start soon")


def test_every_label_is_an_id_that_slurm_takes() -> None:
    labels = [job.label for job in slurm_json.jobs(text("squeue.json"))]
    assert all(re.fullmatch(r"\d+(_\d+|_\[[\d,\-%]+\])?", label) for label in labels)
