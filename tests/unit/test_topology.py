from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.plan.topology import Topology

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
    assert str(caught.value) == (
        "the topology has no ranks\n  a job has at least one\n  give the host of every rank"
    )


def test_a_rank_outside_the_topology_is_named():
    with pytest.raises(PlanError) as caught:
        Topology(("a", "b")).node_of(-1)
    assert str(caught.value) == "rank -1 is not in the topology\n  its ranks are 0 to 1"
