"""What machine files say of links, laid over ranks."""

from __future__ import annotations

from hpctrain.plan.links import linked
from hpctrain.plan.machines import find, topology_of
from hpctrain.plan.topology import Level, Topology

GB = 1e9


def test_a_planned_job_has_the_domains_of_the_machine() -> None:
    found = topology_of(find("frontier"), 256, 8)
    assert found.names == ("module", "node", "group", "machine")
    assert [level.count for level in found.levels] == [1024, 256, 2, 1]
    assert found.bandwidth([0, 1]) == 200 * GB
    assert found.bandwidth([0, 2]) == 50 * GB
    assert found.bandwidth([0, 8]) == found.bandwidth([0, 2047]) == 12.5 * GB
    assert found.describe() == "256 nodes x 8 ranks, 2 groups"


def test_a_running_job_has_the_groups_that_it_was_told_and_no_others() -> None:
    hosts = [f"n{rank // 8}" for rank in range(32)]
    unknown = linked(Topology(tuple(hosts)), find("frontier"))
    assert unknown.names == ("module", "node", "machine")
    told = Topology(tuple(hosts), (Level.of("node", hosts), Level.of("cabinet", [rank // 16 for rank in range(32)])))
    found = linked(told, find("lumi-g"))
    assert found.names == ("module", "node", "cabinet", "machine")
    assert [level.bytes_per_second for level in found.levels] == [200 * GB, 50 * GB, 12.5 * GB, 12.5 * GB]


def test_switches_that_the_file_does_not_name_are_as_fast_as_what_a_node_puts_in() -> None:
    hosts = ("a", "b", "c", "d")
    told = Topology(hosts, (Level.of("switch", "sstt"),))
    assert [level.bytes_per_second for level in linked(told, find("lab")).levels] == [4 * GB, 2 * GB, 1 * GB]
    assert [level.bytes_per_second for level in linked(told, find("jupiter")).levels] == [450 * GB, 25 * GB, 25 * GB]


def test_domains_within_a_node_follow_its_devices_in_turn() -> None:
    hosts = ("a", "b") * 4
    found = linked(Topology(hosts), find("frontier"))
    assert found.distance(0, 2) == 1  # the first two ranks of node a
    assert found.distance(0, 4) == 2


def test_numa_domains_stay_where_the_file_tells_of_none() -> None:
    numa = Topology(("a",) * 4, (Level.of("numa", (0, 0, 1, 1)),))
    assert linked(numa, find("jupiter")).names == ("numa", "node")
    assert linked(numa, find("lumi-g")).names == ("module", "node")


def test_a_domain_that_was_seen_counts_more_than_the_turn_of_ranks() -> None:
    apart = Topology(("a",) * 4, (Level.of("numa", (0, 1, 0, 1)),))
    found = linked(apart, find("frontier"))
    assert found.names == ("module", "node")
    assert [found.distance(0, other) for other in range(4)] == [0, 2, 1, 2]
    assert found.levels[0].bytes_per_second == 200 * GB


def test_a_job_on_no_known_machine_stays_as_it_is() -> None:
    topology = Topology(("a", "b"))
    assert linked(topology, None) is topology
