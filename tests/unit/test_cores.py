"""How many cores fall to a rank, and which it keeps to."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.cores import deal, parse, physical, share, threads, usable_cores

CORES = st.frozensets(st.integers(0, 15), min_size=1)


@given(st.lists(st.frozensets(st.integers(0, 15), min_size=1), min_size=1, max_size=8))
def test_the_shares_of_all_ranks_make_the_cores_that_they_may_use(cores: list[frozenset[int]]) -> None:
    assert sum(share(mine, cores) for mine in cores) == len(frozenset().union(*cores))


def test_bound_ranks_keep_their_cores_and_others_share() -> None:
    assert [share({n}, [{0}, {1}]) for n in (0, 1)] == [1, 1]
    assert share({0, 1}, [{0, 1}] * 4) == Fraction(1, 2)


def test_two_hardware_threads_of_a_core_count_once() -> None:
    siblings = {0: "0,4", 4: "0,4", 1: "1-2", 2: "1-2", 9: ""}
    assert physical(siblings, siblings.__getitem__) == {0, 1, 9}


def test_this_process_may_use_a_core() -> None:
    assert usable_cores()


@pytest.mark.parametrize(
    ("ranks", "cores", "environ", "expected"),
    [
        (1, 8, {}, 8),
        (4, 8, {}, 2),
        (3, 8, {}, 2),
        (4, 2, {}, 1),
        (4, 8, {"OMP_NUM_THREADS": "5"}, 5),
        (4, 8, {"OMP_NUM_THREADS": "3,2"}, 3),
        (4, 8, {"OMP_NUM_THREADS": ""}, 2),
        (4, 8, {"OMP_NUM_THREADS": "0"}, 2),
    ],
)
def test_a_rank_computes_with_its_share_of_the_cores_unless_told(
    ranks: int, cores: int, environ: dict[str, str], expected: int
) -> None:
    world = SimpleNamespace(cores=frozenset(range(cores)), cores_of_node=(frozenset(range(cores)),) * ranks)
    assert threads(world, environ) == expected


def test_ranks_keep_to_the_cores_near_their_devices() -> None:
    everything = frozenset(range(8))
    near = [{4, 5, 6, 7}, {0, 1, 2, 3}]
    assert deal(near, [everything] * 2) == [{4, 5, 6, 7}, {0, 1, 2, 3}]


def test_ranks_whose_devices_have_the_same_cores_near_share_them_out() -> None:
    dealt = deal([range(4), range(4), range(4, 8)], [frozenset(range(8))] * 3)
    assert dealt == [{0, 1}, {2, 3}, {4, 5, 6, 7}]
    assert deal([{0}, {0}], [frozenset(range(8))] * 2) == [{0}, {0}]  # one core for two: both keep it


def test_what_a_launcher_gave_is_never_widened_and_a_rank_far_from_its_device_keeps_it() -> None:
    assert deal([range(4)], [frozenset({2, 9})]) == [{2}]
    assert deal([range(4)], [frozenset({8, 9})]) == [{8, 9}]


def test_ranks_without_a_device_are_left_alone() -> None:
    assert deal([()] * 3, [frozenset(range(8))] * 3) == [frozenset(range(8))] * 3


@given(st.lists(st.tuples(st.frozensets(st.integers(0, 15)), CORES), min_size=1, max_size=8))
def test_every_rank_gets_some_of_the_cores_that_it_was_allowed(ranks: list[tuple[frozenset, frozenset]]) -> None:
    near, allowed = zip(*ranks, strict=True)
    dealt = deal(near, allowed)
    assert all(cores and cores <= had for cores, had in zip(dealt, allowed, strict=True))
    for close, cores, had in zip(near, dealt, allowed, strict=True):
        assert cores <= close or not close & had


@pytest.mark.parametrize(
    ("text", "numbers"), [("", set()), ("3", {3}), ("0-2,5\n", {0, 1, 2, 5}), ("48-49,112-113", {48, 49, 112, 113})]
)
def test_linux_lists_of_numbers_are_read(text: str, numbers: set[int]) -> None:
    assert parse(text) == numbers


def test_binding_moves_every_thread_of_the_process() -> None:
    program = """
import os, threading
from types import SimpleNamespace
from hpctrain.cluster import cores
own = cores.usable_cores()
stay = threading.Event()
helper = threading.Thread(target=stay.wait)
helper.start()
topology = SimpleNamespace(ranks_of=lambda node: (0,))
world = SimpleNamespace(
    collect=lambda value: [value], topology=topology, node=0, local_rank=0, cores=own, cores_of_node=(own,)
)
last = {max(own)}
cores.bind(world, last)
assert world.cores == last == cores.physical(os.sched_getaffinity(helper.native_id)) == cores.usable_cores()
stay.set()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.sched_getaffinity(0)
