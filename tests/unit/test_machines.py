"""Machines: how they are found, what is told of a wrong file, and the ranks that a job on one has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config.job import JobConfig
from hpctrain.errors import ConfigError, PlanError
from hpctrain.plan import sourced
from hpctrain.plan.machine import Link, Machine, Seat
from hpctrain.plan.machines import VARIABLE, ask, find, named, names, size, topology_of

ROOT = Path(__file__).resolve().parents[2]

SMALL = """
name = "Small"
nodes = 3
[device]
name = "chip"
kind = "cuda"
memory_gib = 16
[node]
devices = 4
cores = 8
memory_gib = 64
[[links]]
name = "node"
devices = 4
gb_per_second = 100
[[links]]
name = "machine"
gb_per_second = 10
"""


@pytest.fixture
def small(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def refused(path: Path, old: str, new: str) -> list[str]:
    """The lines of the message that a machine file gets, with ``new`` in the place of ``old``, less its path."""
    assert path.read_text().count(old) == 1
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ConfigError) as caught:
        find(path)
    return str(caught.value).replace(f"{path}: ", "").split("\n  ")


# ---- finding them


def test_a_folder_of_ones_own_goes_before_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "frontier.toml").write_text(SMALL)
    (tmp_path / "mine.toml").write_text(SMALL)
    monkeypatch.setenv(VARIABLE, f"{tmp_path / 'none'}{os.pathsep}{tmp_path}")
    assert find("frontier").name == "Small"
    assert {"mine", "frontier", "perlmutter"} <= set(names())


def test_the_folder_that_one_works_in_goes_before_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs/machines").mkdir(parents=True)
    (tmp_path / "configs/machines/lab.toml").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    assert (find("lab").name, find("frontier").name) == ("Small", "Frontier")


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("Fronteir", "did you mean frontier?"),
        ("FRONTIER", "did you mean frontier?"),
        ("zzz", f"give the path of a machine file, or set {VARIABLE} to its folder"),
    ],
)
def test_an_unknown_machine_is_told_with_the_nearest_and_all(name: str, mend: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find(name)
    assert str(caught.value).split("\n  ") == [
        f"no machine is called {name!r}",
        f"known are {', '.join(names())}",
        mend,
    ]


def test_a_path_that_is_not_there_is_told() -> None:
    with pytest.raises(ConfigError, match=r"nowhere/mine.toml cannot be read\n  No such file or directory"):
        find("nowhere/mine.toml")


def test_the_files_are_installed_with_the_package(tmp_path: Path) -> None:
    for name in ("hpctrain", "configs"):
        shutil.copytree(ROOT / name, tmp_path / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source" / name)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", tmp_path / "target"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, tmp_path / "source"], check=True)
    program = "from hpctrain.plan.machines import describe; print(describe('frontier').path)"
    clean = {key: value for key, value in os.environ.items() if key not in (VARIABLE, "PYTHONPATH")}
    found = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=clean | {"PYTHONPATH": str(tmp_path / "target")},
        check=True,
        capture_output=True,
        text=True,
    )
    assert Path(found.stdout.strip()) == tmp_path / "target/share/hpctrain/machines/frontier.toml"


# ---- what is wrong with a file


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "devices = 4\ncores",
            "devicse = 4\ncores",
            "node.devicse is not a known key (and 1 more)|did you mean node.devices?",
        ),
        (
            "nodes = 3",
            "nodes = 0",
            "nodes = 0 cannot be|it should be greater than or equal to 1|Nodes that have such devices",
        ),
        (
            '"cuda"',
            '"nvidia"',
            "device.kind = 'nvidia' cannot be|it should be 'cuda', 'rocm', 'xpu' or 'cpu'|``cuda`` (NVIDIA)",
        ),
        ("memory_gib = 64", "", "node.memory_gib is missing|Of the host, beside that of the devices."),
        ("gb_per_second = 10\n", "", "links[1].gb_per_second is missing|Of one device that sends"),
        (
            "nodes = 3",
            "nodes = 3\nscratch = { paht = 1 }",
            "scratch.paht is not a known key (and 1 more)|did you mean scratch.path?",
        ),
        ("nodes = 3", "nodes = 3\nscratch = 4", "scratch = 4 cannot be|it is a section, not a value"),
        ("nodes = 3", "nodes = ", "{path} is not TOML|Invalid value (at line 3, column 9)|mend that line"),
    ],
)
def test_a_wrong_key_of_a_machine_is_told(small: Path, old: str, new: str, told: str) -> None:
    parts = told.replace("{path}", str(small)).split("|")
    assert all(line.startswith(part) for line, part in zip(refused(small, old, new), parts, strict=False))


NEIGHBOURS = "links go from the nearest to the farthest|put the wider one last"


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (
            "cores = 8", "cores = 8\nusable_cores = 9",
            "node.usable_cores = 9 is more than node.cores = 8|jobs get some of the node's cores"
            "|count physical cores in both",
        ), (
            "cores = 8", 'cores = 8\nseats = [{ cores = "0-1" }]',
            "node.seats has 1 seats, and node.devices = 4|each device has a seat, in the order of their numbers"
            "|list one for each, or none",
        ), (
            "cores = 8", 'cores = 8\nseats = [{ cores = "0-1" }, { cores = "1" }, {}, {}]',
            "node.seats[1].cores = '1' has core 1 of seat 0 too|ranks that share a core wait for each other"
            "|give each seat cores of its own",
        ), (
            "cores = 8", 'cores = 8\nseats = [{ cores = "7-8" }, {}, {}, {}]',
            "node.seats[0].cores = '7-8' has core 8|the cores of a node have the numbers 0 to 7|see node.cores",
        ), (
            "devices = 4\ngb", "devices = 3\ngb",
            "links[0].devices = 3 does not divide node.devices = 4|a node has a whole number of such domains"
            "|count the devices of one domain",
        ), (
            "devices = 4\ngb", "devices = 4\nnodes = 2\ngb",
            "links[0] has devices = 4 and nodes = 2|a domain is counted in the one or the other"
            "|leave out devices where it is larger than a node",
        ), (
            "devices = 4\ngb", "gb",
            "links[1] (machine) is no wider than links[0] (node)|" + NEIGHBOURS,
        ), (
            "gb_per_second = 10\n", "gb_per_second = 101\n",
            "links[1] (machine) has 101 GB/s, and links[0] (node) has 100|what is far is not faster than what is near"
            "|say what a device sends while all others do too",
        ),
    ],
)  # fmt: skip
def test_figures_that_do_not_fit_each_other_are_told(small: Path, old: str, new: str, told: str) -> None:
    assert refused(small, old, new) == told.split("|")


# ---- what stands beside a value


def test_a_comment_gives_tags_and_a_word() -> None:
    text = 'a = 1  # [olcf] [mle] of "two"\nb = "x # [no]"  # [olcf]\nc = 2\nd = 3  # plain\n'
    assert [(one.key, one.tags, one.word) for one in sourced.values(text)] == [
        ("a", ("olcf", "mle"), 'of "two"'),
        ("b", ("olcf",), ""),
        ("c", (), ""),
        ("d", (), "plain"),
    ]


def test_tables_lists_of_tables_and_lines_of_lists_have_their_own_keys() -> None:
    text = """
    [node]  # [not] a value
    seats = [  # beside the list
        # [not] one either
        { numa = 0 },  # [one]
        { numa = 1 },
    ]
    modes = ["a", "b"]  # [whole]
    [[links]]
    rate = 1  # [first]
    [[links]]
    rate = 2  # [second]
    [links.deep]
    """
    found = {one.key: (one.value, one.tags) for one in sourced.values(text)}
    assert found == {
        "node.seats[0]": ({"numa": 0}, ("one",)),
        "node.seats[1].numa": (1, ()),
        "node.modes": (["a", "b"], ("whole",)),
        "links[0].rate": (1, ("first",)),
        "links[1].rate": (2, ("second",)),
        "links[1].deep": ({}, ()),
    } or pytest.fail(str(found))


# ---- ranks on a machine


@pytest.fixture
def machine(small: Path) -> Machine:
    return find(small)


@pytest.mark.parametrize(
    ("asked", "job", "sizes"),
    [
        ({}, {}, (1, 4)),
        ({}, {"nodes": 3}, (3, 4)),
        ({}, {"nodes": 3, "tasks_per_node": 2}, (3, 2)),
        ({"nodes": 2}, {"nodes": 3}, (2, 4)),
        ({"gpus": 8}, {}, (2, 4)),
        ({"gpus": 8}, {"tasks_per_node": 1}, (2, 1)),
        ({"gpus": 8, "ranks": 2}, {}, (2, 1)),
        ({"nodes": 2, "ranks": 6}, {}, (2, 3)),
        ({"ranks": 2}, {}, (1, 2)),
        ({"ranks": 12}, {}, (3, 4)),
        ({"ranks": 6}, {}, (2, 3)),
    ],
)
def test_the_size_of_a_job_follows_from_what_is_asked(asked, job, sizes, machine: Machine) -> None:
    assert size(machine, JobConfig(**job), **asked) == sizes


@given(nodes=st.integers(1, 3), tasks=st.integers(1, 9))
def test_ranks_are_in_blocks_on_nodes(nodes: int, tasks: int) -> None:
    topology = topology_of(find("lab"), nodes, tasks)
    assert [topology.node_of(rank) for rank in range(nodes * tasks)] == [rank // tasks for rank in range(nodes * tasks)]
    assert topology.nodes == tuple(f"node{node:05}" for node in range(1, nodes + 1))


def test_a_machine_has_no_more_nodes_than_it_has(machine: Machine) -> None:
    with pytest.raises(PlanError, match="4 nodes are more than there are\n  Small has 3\n  ask for no more than"):
        topology_of(machine, 4, 1)


def test_without_a_machine_all_ranks_are_on_one_node() -> None:
    assert named(None) is None
    assert ask(None, JobConfig(nodes=3)).hosts == ("node",)
    assert ask(None, JobConfig(), ranks=3).hosts == ("node",) * 3


@pytest.mark.parametrize("option", ["nodes", "gpus"])
def test_nodes_without_a_machine_are_refused(option: str) -> None:
    with pytest.raises(PlanError) as caught:
        ask(None, JobConfig(), **{option: 4})
    assert str(caught.value).split("\n  ") == [
        f"--{option} 4 without a machine",
        "a machine's file says how many ranks that are",
        "give --machine too, or --ranks instead",
    ]


def test_a_machine_of_any_size_has_as_many_nodes_as_asked() -> None:
    assert len(ask(find("dgx-h100"), JobConfig(), nodes=5000).hosts) == 40000


WHOLE = "a node of Small has 4 devices, and a job has whole nodes"
SAME = "every node of a job has the same number of ranks"


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"gpus": 6}, f"--gpus 6 is not a number of whole nodes|{WHOLE}|give --gpus 4 or 8"),
        ({"gpus": 2}, f"--gpus 2 is not a number of whole nodes|{WHOLE}|give --gpus 4"),
        ({"gpus": 4, "nodes": 1}, "--nodes 1 and --gpus 4|either says how large the job is|give one of them"),
        ({"ranks": 7}, f"7 ranks do not divide over 2 nodes|{SAME}|give --ranks 6 or 8"),
        ({"ranks": 7, "nodes": 3}, f"7 ranks do not divide over 3 nodes|{SAME}|give --ranks 6 or 9"),
        ({"ranks": 1, "nodes": 3}, f"1 ranks do not divide over 3 nodes|{SAME}|give --ranks 3"),
    ],
)
def test_a_size_that_cannot_be_is_told(asked: dict[str, int], told: str, machine: Machine) -> None:
    with pytest.raises(PlanError) as caught:
        size(machine, JobConfig(), **asked)
    assert str(caught.value).split("\n  ") == told.split("|")


def test_the_cores_of_a_seat_are_counted() -> None:
    assert Seat(cores="24-26,56").core_numbers == (24, 25, 26, 56)
    assert Seat().core_numbers == ()


def test_a_link_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        Link(name="node", gb_per_second=0)
