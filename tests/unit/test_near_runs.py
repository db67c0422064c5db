"""What near checkpoints are decided by: who keeps whose part, and which bytes of it somebody wants."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.checkpoint.near_file import Chain, meet
from hpctrain.checkpoint.near_write import keepers
from hpctrain.plan.topology import Topology

RUNS = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5)), max_size=8)


@given(st.text("abc", min_size=1, max_size=8))
def test_a_partner_is_on_another_node_whatever_ranks_a_node_has(hosts: str):
    topology = Topology(tuple(hosts))
    for rank, keeping in enumerate(keepers(topology, 2)):
        assert keeping[0] == rank
        assert {topology.node_of(one) for one in keeping[1:]} == (
            {(topology.node_of(rank) + 1) % len(topology.nodes)} if len(topology.nodes) > 1 else set()
        )


@given(RUNS, RUNS)
def test_what_two_lists_of_runs_have_in_common_is_each_byte_that_both_have(one: list, other: list):
    def placed(gaps: list[tuple[int, int]]) -> list[tuple[int, int]]:
        found, at = [], 0
        for gap, length in gaps:
            found.append((at + gap, length))
            at += gap + length
        return found

    def bytes_of(runs: list[tuple[int, int]]) -> set[int]:
        return {byte for at, length in runs for byte in range(at, at + length)}

    one, other = placed(one), placed(other)
    common = list(meet(one, other))
    met = [byte for i, skipped, _, _, n in common for byte in range(one[i][0] + skipped, one[i][0] + skipped + n)]
    assert sorted(met) == sorted(bytes_of(one) & bytes_of(other))
    assert all(one[i][0] + skipped == other[j][0] + into for i, skipped, j, into, _ in common)


@given(st.lists(st.integers(0, 6), max_size=8), st.integers(0, 12), st.integers(0, 12))
def test_a_cut_of_a_chain_has_just_its_bytes_in_order(lengths: list[int], start: int, length: int):
    chain = Chain(lengths)
    start = min(start, chain.total)
    length = min(length, chain.total - start)
    every = [(number, byte) for number, size in enumerate(lengths) for byte in range(size)]
    cut = list(chain.cut(start, length))
    assert [(n, byte) for n, skipped, _, size in cut for byte in range(skipped, skipped + size)] == every[start:][
        :length
    ]
    assert [place for _, _, place, _ in cut] == [sum(size for *_, size in cut[:k]) for k in range(len(cut))]
