"""Slurm's variables and lists, as real jobs have them and as they break."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.cluster.slurm import (
    expand_counts,
    expand_nodes,
    expand_nodes_alone,
    fold_nodes,
    in_step,
    job,
    life,
)
from hpctrain.errors import LaunchError
from tests.unit.slurm_dumps import SCENARIOS, dump, shells, tasks

LISTS = {
    "ant": ["ant"],
    "ant,bee,cow": ["ant", "bee", "cow"],
    "cow,ant,bee": ["cow", "ant", "bee"],
    "tux2,tux1,tux2": ["tux2", "tux1", "tux2"],
    "lx[1,2]": ["lx1", "lx2"],
    "n[1-2,5],m7": ["n1", "n2", "n5", "m7"],
    "site-a1-ia810": ["site-a1-ia810"],
    "site-a1-ia[810-812]": ["site-a1-ia810", "site-a1-ia811", "site-a1-ia812"],
    "d07-[31-32]": ["d07-31", "d07-32"],
    "nid[0008-0011]": ["nid0008", "nid0009", "nid0010", "nid0011"],
    "n[01-03,7]": ["n01", "n02", "n03", "n7"],
    "r[2-3,1]n[2,1]": ["r2n2", "r2n1", "r3n2", "r3n1", "r1n2", "r1n1"],
    "n[8-11]": ["n8", "n9", "n10", "n11"],
    "rack[0-1]node[1-2]": ["rack0node1", "rack0node2", "rack1node1", "rack1node2"],
    "x1,x01,x001": ["x1", "x01", "x001"],
    "10.0.0.[1-3]": ["10.0.0.1", "10.0.0.2", "10.0.0.3"],
    "nid00001,nid[00011-00012]": ["nid00001", "nid00011", "nid00012"],
}
# What is no list -> what the error shows of it, beside the whole text.
BROKEN = {
    "c[1-": "character 2",
    "c[5-3]": "5-3",
    "c[1-2-3]": "character 2",
    "c[]": "character 2",
    ",,": "character 1",
    "": "missing",
    "a,,b": "character 3",
    "a,": "missing",
    "c[1,": "character 2",
    "c1]": "character 3",
    "c[a-b]": "character 2",
    "a b": "character 2",
    "a[1-3]!a2": "character 7",
    "@group": "character 1",
    "n[001-3]": "001-3",
}


@pytest.mark.parametrize("text", LISTS)
def test_a_node_list_gives_its_names_in_order(text: str) -> None:
    assert list(expand_nodes_alone(text)) == LISTS[text]
    assert list(expand_nodes(text)) == LISTS[text]


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_node_list_is_an_error_that_shows_the_place_and_never_a_shorter_list(text: str) -> None:
    for expand in (expand_nodes, expand_nodes_alone):
        with pytest.raises(LaunchError) as caught:
            expand(text)
        assert repr(text) in caught.value.what and BROKEN[text] in caught.value.why and caught.value.mend


@st.composite
def node_lists(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A list in Slurm's notation, made together with what it stands for."""
    texts, names = [], []
    for _ in range(draw(st.integers(1, 5))):
        prefix = draw(st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z-]", fullmatch=True))
        if draw(st.booleans()):
            texts.append(prefix)
            names.append(prefix)
            continue
        width, at, parts = draw(st.integers(1, 4)), draw(st.integers(0, 20)), []
        for _ in range(draw(st.integers(1, 3))):
            low = at + draw(st.integers(1, 5))
            at = low + draw(st.integers(0, 4))
            parts.append(f"{low:0{width}d}" + (f"-{at:0{width}d}" if at > low else ""))
            names += [f"{prefix}{number:0{width}d}" for number in range(low, at + 1)]
        texts.append(f"{prefix}[{','.join(parts)}]")
    return ",".join(texts), names


@settings(max_examples=1000)
@given(node_lists())
def test_any_list_gives_exactly_the_names_it_stands_for(made: tuple[str, list[str]]) -> None:
    text, names = made
    found = expand_nodes_alone(text)
    assert list(found) == names
    assert not any(re.search(r"[\[\],]", name) for name in found)


@given(node_lists())
def test_names_that_are_folded_are_the_same_names(made: tuple[str, list[str]]) -> None:
    names = made[1]
    assert sorted(expand_nodes_alone(fold_nodes(names))) == sorted(set(names))


def test_nodes_are_folded_into_one_short_list() -> None:
    assert fold_nodes(["n1", "n2", "n3", "login"]) == "login,n[1-3]"
    assert fold_nodes(["n1", "ring{n2}"]) == "n1,ring{n2}" and fold_nodes([]) == ""


@settings(max_examples=1000)
@given(st.text("ab01[],-", max_size=12))
def test_a_text_is_either_a_list_of_whole_names_or_an_error(text: str) -> None:
    try:
        found = expand_nodes_alone(text)
    except LaunchError as error:
        assert repr(text) in str(error)
    else:
        assert found and all(re.fullmatch(r"[\w.\-]+", name) for name in found)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("1(x2)", [1, 1]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("40,8", [40, 8]), ("", [])],
)
def test_counts_are_run_length_coded(text: str, counts: list[int]) -> None:
    assert list(expand_counts(text)) == counts


@pytest.mark.parametrize("text", ["2(x", "a", "2(x3),,1", "2x3", "-1"])
def test_broken_counts_are_an_error_that_shows_them(text: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(repr(text))) as caught:
        expand_counts(text)
    assert "SLURM_TASKS_PER_NODE" in caught.value.mend


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_real_jobs_say_agrees_with_itself(scenario: str) -> None:
    for process, environ in dump(scenario).items():
        found = job(environ)
        assert found is not None, process
        nodes = expand_nodes(found.nodes)
        assert found.id == environ["SLURM_JOB_ID"]
        assert len(found.tasks_per_node) in (0, len(nodes)), process
        assert all(fact.source in environ for fact in found.facts)
        if found.rank is not None:  # a batch script has what was asked for, which need not add up
            assert sum(found.tasks_per_node) == found.tasks
            assert nodes[found.node] == environ["SLURMD_NODENAME"], process
            assert found.local_rank < found.tasks_per_node[found.node], process


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if not name.startswith("alloc-")])
def test_tasks_of_srun_know_their_rank_and_shells_have_none(scenario: str) -> None:
    for rank, environ in tasks(scenario):
        assert in_step(environ) and job(environ).rank == rank
    for environ in shells(scenario):
        assert not in_step(environ)
        assert (job(environ).rank, job(environ).local_rank, job(environ).node) == (None, None, None)


@pytest.mark.parametrize(
    ("scenario", "process", "field", "value"),
    [
        ("4x4", "task06", "tasks", 16),
        ("4x4", "task06", "switches", "spine.leaf1.node2"),
        ("3nodes-10tasks", "task00", "tasks_per_node", (8, 1, 1)),
        ("3nodes-10tasks-npn4", "task00", "tasks_per_node", (4, 3, 3)),
        ("3nodes-10tasks-plane4", "task00", "tasks_per_node", (4, 4, 2)),
        ("3nodes-10tasks-plane4", "task00", "tasks", 10),
        ("3nodes-10tasks-plane4", "batch", "tasks", 12),
        ("4x1-gpus-per-node4-cpt8", "task00", "cpus_per_task", 8),
        ("2x2-options", "task00", "name", "my job"),
        ("array-5", "task00", "array_task", 5),
        ("requeued-r0", "task00", "restarts", 0),
        ("requeued-r1", "task00", "restarts", 1),
        ("het-1x2+2x2", "both/task03", "groups", 2),
        ("het-1x2+2x2", "both/task03", "tasks", 6),
        ("het-1x2+2x2", "group1/task00", "tasks", 4),
        ("salloc-2x3", "alloc", "name", "interactive"),
    ],
)
def test_real_jobs_say(scenario: str, process: str, field: str, value: object) -> None:
    assert getattr(job(dump(scenario)[process]), field) == value


def test_there_is_no_job_outside_slurm() -> None:
    assert job({"PATH": "/bin"}) is None and not in_step({})


def test_the_number_of_tasks_follows_from_what_was_asked_when_it_is_not_said() -> None:
    asked = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "4"}
    assert job(asked).tasks == 8
    assert job(asked | {"SLURM_TASKS_PER_NODE": "3(x2)"}).tasks == 6


def test_a_smaller_step_wins_over_its_job() -> None:
    step = {"SLURM_STEP_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n2"}
    found = job({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"} | step)
    assert (found.tasks, found.nodes) == (4, "n2")
    assert {fact.name: fact.source for fact in found.facts}["slurm.tasks"] == "SLURM_STEP_NUM_TASKS"


@pytest.mark.parametrize("step", ["4294967290", "4294967291"])
def test_the_interactive_shell_of_salloc_is_no_task_though_it_has_a_step(step: str) -> None:
    assert not in_step({"SLURM_PROCID": "0", "SLURM_STEP_ID": step})


def test_a_number_that_is_none_is_named() -> None:
    with pytest.raises(LaunchError, match=r"SLURM_RESTART_COUNT = 'x' is not a number"):
        job({"SLURM_JOB_ID": "1", "SLURM_RESTART_COUNT": "x"})


def test_a_job_that_slurm_started_again_knows_which_life_it_is_in() -> None:
    first, second = ({"SLURM_JOB_ID": "123", **more} for more in ({}, {"SLURM_RESTART_COUNT": "1"}))
    assert life(second) == "life 2 (restart 1 of job 123)"
    assert life(first) is life({}) is life(first | {"SLURM_RESTART_COUNT": "0"}) is None
