"""Who meets whom: every round is fair, the neighbours in the ring meet, and a thousand nodes need few rounds."""

from __future__ import annotations

import math

import pytest

from hpctrain.cluster.links import rounds

MANY = pytest.mark.parametrize("nodes", [*range(2, 70), 127, 128, 129, 1000, 1001, 4096])


@MANY
def test_nobody_is_in_two_pairs_of_a_round_and_at_most_one_node_has_no_partner(nodes: int) -> None:
    for pairs in rounds(nodes):
        met = [node for pair in pairs for node in pair]
        assert len(met) == len(set(met)) >= nodes - 1
        assert set(met) <= set(range(nodes))


@MANY
def test_all_neighbours_in_the_ring_meet(nodes: int) -> None:
    met = {frozenset(pair) for pairs in rounds(nodes) for pair in pairs}
    assert {frozenset((node, (node + 1) % nodes)) for node in range(nodes)} <= met


@MANY
def test_rounds_grow_with_the_logarithm(nodes: int) -> None:
    assert len(rounds(nodes)) <= math.ceil(math.log2(nodes)) + 2


@pytest.mark.parametrize("nodes", [4, 7, 8, 13, 17, 100, 129, 1000, 1025])
def test_each_node_meets_several_others(nodes: int) -> None:
    met: dict[int, set[int]] = {node: set() for node in range(nodes)}
    for one, other in (pair for pairs in rounds(nodes) for pair in pairs):
        met[one].add(other)
        met[other].add(one)
    assert min(map(len, met.values())) >= 3


def test_one_node_meets_nobody_and_two_meet_once() -> None:
    assert rounds(1) == ()
    assert rounds(2) == (((0, 1),),)


def test_four_nodes_meet_in_three_rounds() -> None:
    assert rounds(4) == (((0, 1), (2, 3)), ((1, 2), (3, 0)), ((1, 3), (2, 0)))
