"""What is between nodes, from Slurm's variables, from what scontrol prints, and from the names of nodes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpctrain.cluster import switches
from hpctrain.cluster.switches import address, around, ask, asked, cabinet, parse
from hpctrain.plan.topology import Topology
from tests.unit.slurm_dumps import tasks

LEAVES = {"node1": "leaf1", "node2": "leaf1", "node3": "leaf2", "node4": "leaf2"}

TREE = """\
SwitchName=leaf1 Level=0 LinkSpeed=1 Nodes=node[1-2]
SwitchName=leaf2 Level=0 LinkSpeed=1 Nodes=node[3-4]
SwitchName=spine Level=1 LinkSpeed=1 Nodes=node[1-4] Switches=leaf[1-2]
"""
BLOCKS = """\
BlockName=b1 BlockIndex=0 Nodes=node[1-2] BlockSize=2
BlockName=b2 BlockIndex=1 Nodes=node[3-4] BlockSize=2
AggregatedBlock=b[1-2] BlockIndex=2 BlockSize=4 Nodes=node[1-4]
"""
OLD_BLOCKS = "BlockName=b1 BlockIndex=0 Nodes=node[1-2]\nBlockName=b2 BlockIndex=1 Nodes=node[3-4]\n"


def card(host: str, numa: int | None = None, places: switches.Places = (), of: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(host=host, numa=numa, switches=places, cabinet=of)


def topology(cards: list[SimpleNamespace], above: dict[str, switches.Places] | None = None) -> Topology:
    hosts = tuple(one.host for one in cards)
    return Topology(hosts, tuple(around(hosts, cards, above or {})))


@pytest.mark.parametrize("scenario", ["4x4", "4x4-cyclic", "3nodes-10tasks-arbitrary", "3nodes-10tasks-plane4"])
def test_each_task_of_a_real_cluster_knows_the_switches_above_it(scenario: str) -> None:
    cards = [
        card(environ["SLURMD_NODENAME"], places=address(environ, environ["SLURMD_NODENAME"]))
        for _, environ in tasks(scenario)
    ]
    found = topology(cards)
    assert found.names == ("node", "switch", "tier 2")
    for rank, one in enumerate(cards):
        for other, another in enumerate(cards):
            together = LEAVES[one.host] == LEAVES[another.host]
            assert (found.distance(rank, other) <= 2) == together
    assert found.describe().endswith(", 2 switches")


def test_variables_that_came_from_another_node_say_nothing() -> None:
    _, environ = tasks("4x4")[0]
    assert address(environ, "node1.site.org") == (("switch", "leaf1"), ("tier 2", "spine"))
    assert address(environ, "node2") == address({}, "node1") == ()


def test_a_tree_is_read_from_what_scontrol_prints() -> None:
    found = parse(TREE, ["node1", "node4"])
    assert found == {
        "node1": (("switch", "leaf1"), ("tier 2", "spine")),
        "node4": (("switch", "leaf2"), ("tier 2", "spine")),
    }


@pytest.mark.parametrize(("text", "kinds"), [(BLOCKS, ("block", "block of 4")), (OLD_BLOCKS, ("block",))])
def test_blocks_are_read_from_what_scontrol_prints(text: str, kinds: tuple[str, ...]) -> None:
    found = parse(text, ["node1", "node2", "node3"])
    assert all(tuple(kind for kind, _ in places) == kinds for places in found.values())
    assert found["node1"] == found["node2"] != found["node3"]


@pytest.mark.parametrize("text", ["", "No topology information available\n", "SwitchName=s Level=0 Nodes=(null)\n"])
def test_what_tells_nothing_of_a_node_leaves_it_out(text: str) -> None:
    assert parse(text, ["node1"]) == {}
    assert parse(TREE, ["elsewhere"]) == {}


def test_a_command_that_is_missing_or_fails_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask(["node1"]) == {}
    tool = tmp_path / "scontrol"
    tool.write_text(f"#!/bin/sh\necho '{TREE}'\nexit $1\n".replace("$1", "1"))
    tool.chmod(0o755)
    assert ask(["node1"]) == {}
    tool.write_text(f"#!/bin/sh\necho '{TREE}'\n")
    assert ask(["node1"]) == {"node1": (("switch", "leaf1"), ("tier 2", "spine"))}


def test_scontrol_is_asked_only_in_a_job_of_several_nodes_that_do_not_all_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "ask", lambda nodes: {node: (("switch", "s"),) for node in nodes})
    job, known = {"SLURM_JOB_ID": "7"}, (("switch", "leaf1"),)
    assert asked([card("a"), card("b", places=known)], job).keys() == {"a", "b"}
    assert asked([card("a", places=known), card("b", places=known)], job) == {}
    assert asked([card("a"), card("a")], job) == {}
    assert asked([card("a"), card("b")], {}) == {}


def test_what_was_asked_fills_in_for_ranks_that_were_not_told() -> None:
    cards = [card("node1"), card("node3", places=(("switch", "leaf2"), ("tier 2", "spine")))]
    found = topology(cards, parse(TREE, ["node1", "node3"]))
    assert found.names == ("node", "switch", "tier 2")
    assert topology(cards).names == ("node", "machine")  # one of them is not known: no guess is made


@pytest.mark.parametrize(
    ("host", "found"), [("x1002c3s1b0n0", "x1002"), ("x1002c3s1b0n1.hsn", "x1002"), ("nid001234", None), ("x9", None)]
)
def test_the_cabinet_is_read_off_an_xname(host: str, found: str | None, tmp_path: Path) -> None:
    assert cabinet(host, tmp_path / "none") == found
    (tmp_path / "xname").write_text(f"{host}\n")
    assert cabinet("nid000001", tmp_path / "xname") == found


def test_cabinets_are_domains_where_no_switches_are_known() -> None:
    cards = [card(f"n{rank}", of=f"x{1000 + rank // 2}") for rank in range(4)]
    assert topology(cards).names == ("node", "cabinet", "machine")
    assert topology(cards).describe() == "4 nodes x 1 rank, 2 cabinets"
    assert topology([*cards, card("n4")]).names == ("node", "machine")


def test_numa_domains_are_a_level_where_ranks_keep_to_them() -> None:
    pinned = [card("a", 0), card("a", 0), card("a", 1), card("a", 1)]
    found = topology(pinned)
    assert found.names == ("numa", "node")
    assert [found.distance(0, other) for other in range(4)] == [0, 1, 2, 2]
    assert topology([*pinned, card("a")]).names == ("node",)  # one that may use all cores


def test_switches_of_one_name_under_others_are_others() -> None:
    cards = [card("a", places=(("switch", "s1"), ("tier 2", "east"))),
             card("b", places=(("switch", "s1"), ("tier 2", "west")))]  # fmt: skip
    assert topology(cards).distance(0, 1) == 4
