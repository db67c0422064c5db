from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.plan.topology import Level, Topology, nested

PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)

topologies = st.lists(st.sampled_from(["n1", "n2", "n10", "gpu-a"]), min_size=1, max_size=20).map(
    lambda hosts: Topology(tuple(hosts))
)


@PROPERTY
@given(topologies)
def test_each_rank_is_on_the_node_of_its_host_at_its_local_rank(topology):
    for rank, host in enumerate(topology.hosts):
        node = topology.node_of(rank)
        assert topology.nodes[node] == host
        assert topology.ranks_of(node)[topology.local_rank(rank)] == rank
        assert topology.local_rank(rank) == topology.hosts[:rank].count(host)


@PROPERTY
@given(topologies)
def test_nodes_are_counted_as_the_ranks_first_meet_them(topology):
    firsts = [topology.ranks_of(node)[0] for node in range(len(topology.nodes))]
    assert firsts == sorted(firsts)
    assert sorted(rank for node in range(len(firsts)) for rank in topology.ranks_of(node)) == list(
        range(len(topology.hosts))
    )


@PROPERTY
@given(topologies)
def test_a_topology_comes_back_from_json_as_the_same_value(topology):
    back = Topology.from_json(json.loads(json.dumps(topology.to_json())))
    assert back == topology
    assert hash(back) == hash(topology)


@pytest.mark.parametrize(
    ("hosts", "line"),
    [
        (("a",), "1 node x 1 rank"),
        (("a",) * 4 + ("b",) * 4, "2 nodes x 4 ranks"),
        (("a", "b") * 4, "2 nodes x 4 ranks"),
        (("a",) * 4 + ("b",) * 3 + ("c",), "8 ranks on 3 nodes (4, 3, 1)"),
        (tuple(f"n{rank % 10}" for rank in range(25)), "25 ranks on 10 nodes (2 to 3 each)"),
    ],
)
def test_a_topology_describes_itself_in_a_line(hosts, line):
    assert Topology(hosts).describe() == line


def test_a_topology_without_ranks_is_refused():
    with pytest.raises(PlanError) as caught:
        Topology(())
    assert str(caught.value) == ("the topology has no ranks\n  a job has at least one\n  give the host of every rank")


def test_a_rank_outside_the_topology_is_named():
    with pytest.raises(PlanError) as caught:
        Topology(("a", "b")).node_of(-1)
    assert str(caught.value) == "rank -1 is not in the topology\n  its ranks are 0 to 1"


# ---- levels ----------------------------------------------------------------------------------------------------------

# Two nodes of two NUMA domains under one switch, and a third node of one under another; ranks are dealt out in turn.
TWO_SWITCHES = Topology(
    ("a", "b", "c", "a", "b", "c", "a", "b"),
    (
        Level.of("numa", ("a0", "b0", "c0", "a0", "b1", "c0", "a1", "b1"), 100e9),
        Level.of("node", ("a", "b", "c", "a", "b", "c", "a", "b"), 50e9),
        Level.of("switch", ("s", "s", "t", "s", "s", "t", "s", "s"), 10e9),
    ),
)


@st.composite
def nests(draw: st.DrawFn) -> Topology:
    """Ranks on nodes, nodes under switches, and ranks of a node in NUMA domains."""
    ranks = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1)), min_size=1, max_size=20))
    switch = draw(st.lists(st.integers(0, 2), min_size=6, max_size=6))
    nodes = [f"n{node}" for node, _ in ranks]
    numa = Level.of("numa", ranks, draw(st.none() | st.just(9.0)))
    return Topology(tuple(nodes), (numa, Level.of("node", nodes), Level.of("switch", [switch[n] for n, _ in ranks])))


@PROPERTY
@given(nests())
def test_domains_lie_within_each_other_up_to_one_that_has_all_ranks(topology):
    assert topology.names in (("numa", "node", "switch"), ("numa", "node", "switch", "machine"))
    for inner, outer in zip(topology.levels, topology.levels[1:], strict=False):
        assert inner.within(outer)
        assert inner.count >= outer.count
    assert topology.levels[-1].count == 1
    for level in topology.levels:  # as the ranks first meet them
        assert list(dict.fromkeys(level.domains)) == list(range(level.count))


@PROPERTY
@given(nests(), st.data())
def test_a_distance_is_the_same_both_ways_and_no_detour_is_shorter(topology, data):
    a, b, c = (data.draw(st.integers(0, len(topology.hosts) - 1)) for _ in range(3))
    assert topology.distance(a, b) == topology.distance(b, a)
    assert topology.distance(a, c) <= max(topology.distance(a, b), topology.distance(b, c))
    assert (topology.distance(a, b) == 0) == (a == b)


@PROPERTY
@given(nests())
def test_a_topology_with_levels_comes_back_from_json(topology):
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


def test_distance_and_bandwidth_are_those_of_the_farthest_link():
    assert TWO_SWITCHES.names == ("numa", "node", "switch", "machine")
    assert [TWO_SWITCHES.distance(0, other) for other in (0, 3, 6, 1, 2)] == [0, 1, 2, 3, 4]
    assert [TWO_SWITCHES.bandwidth(ranks) for ranks in ([0, 3], [0, 6], [0, 3, 6, 1])] == [100e9, 50e9, 10e9]
    assert TWO_SWITCHES.bandwidth([0, 2]) is None  # nobody said how fast switches are linked
    assert TWO_SWITCHES.bandwidth([5]) == float("inf")


def test_a_topology_tells_its_switches_in_its_line():
    assert TWO_SWITCHES.describe() == "8 ranks on 3 nodes (3, 3, 2), 2 switches"


def test_links_count_as_slower_the_farther_they_lead_by_four_where_nobody_knows_and_by_two_at_least():
    assert TWO_SWITCHES.rates == (100e9, 50e9, 10e9, 2.5e9)
    assert Topology(("a", "b")).rates == (1.0, 0.25)
    assert Topology(("a", "b"), (Level("machine", (0, 0), 1e9),)).rates == (4e9, 1e9)
    assert Topology(("a", "b"), (Level("node", (0, 1), 1e9), Level("machine", (0, 0), 1e9))).rates == (1e9, 5e8)


def test_131072_ranks_are_written_down_in_a_few_numbers_beside_their_hosts():
    nodes = [rank // 8 for rank in range(131_072)]
    hosts = tuple(f"n{node}" for node in nodes)
    topology = Topology(hosts, (Level.of("module", [rank // 2 for rank in range(131_072)]),
                                Level.of("group", [node // 128 for node in nodes])))  # fmt: skip
    told = topology.to_json()
    assert len(json.dumps(told["levels"])) < 1000
    assert Topology.from_json(told) == topology


def test_of_facts_that_contradict_each_other_the_nearer_one_stays():
    pairs, threes, all_of_them = (Level.of("l", [rank // n for rank in range(6)]) for n in (2, 3, 6))
    assert list(nested((pairs, threes, all_of_them))) == [pairs, all_of_them]


WRONG = {
    "short": (
        (Level.of("switch", ("s",)),),
        "the level switch tells of 1 ranks, and there are 2 hosts\n"
        "  each rank is in one domain of each level\n"
        "  give a domain for every rank",
    ),
    "node": (
        (Level.of("node", ("s", "s")),),
        "the level node has other domains than the hosts\n  a node is a host\n  leave it out",
    ),
    "across": (
        (Level.of("switch", ("s", "s")), Level.of("group", ("g", "h"))),
        "a domain of the level switch lies in several of the level group\n"
        "  levels go from the nearest to the farthest, each within the next\n"
        "  give them in that order, and only those that are so",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_levels_that_cannot_be_are_refused_with_the_reason(case):
    levels, message = WRONG[case]
    with pytest.raises(PlanError) as caught:
        Topology(("a", "b"), levels)
    assert str(caught.value) == message
