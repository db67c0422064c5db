"""Which device a rank takes, how many cores fall to it, and who is refused."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.devices import (
    Devices,
    check_devices,
    domain_of,
    identities,
    physical,
    pick,
    share,
    threads,
    usable_cores,
)
from hpctrain.errors import LaunchError

FOUR = Devices("cuda", ("a", "b", "c", "d"))


def test_a_rank_takes_its_place_among_the_devices_that_it_sees() -> None:
    assert [pick(local_rank, FOUR) for local_rank in range(4)] == [0, 1, 2, 3]
    assert [pick(local_rank, Devices("cuda", ("x",))) for local_rank in range(4)] == [0, 0, 0, 0]
    assert pick(3, Devices("cpu", ())) is None


def test_ranks_with_a_device_each_are_welcome_whether_they_see_all_or_one() -> None:
    check_devices("node7", range(4), [FOUR] * 4, [0, 1, 2, 3])
    check_devices("node7", range(4), [Devices("cuda", (name,)) for name in "dbca"], [0] * 4)
    check_devices("node7", range(2), [Devices("cpu", ())] * 2, [None, None])


@pytest.mark.parametrize(("seen", "chosen"), [([FOUR] * 5, [0, 1, 2, 3, 0]), ([Devices("cuda", ("a",))] * 2, [0, 0])])
def test_two_ranks_on_one_device_are_refused_with_both_and_the_device(seen: list[Devices], chosen: list[int]) -> None:
    with pytest.raises(LaunchError) as caught:
        check_devices("node7", range(8, 8 + len(seen)), seen, chosen)
    assert f"rank 8 and rank {7 + len(seen)} on node7 would share one device (a)" in caught.value.what
    assert f"{len(seen)} ranks run there" in caught.value.why and "--gpus-per-node" in caught.value.mend


def test_devices_without_a_uuid_are_told_apart_by_number_and_a_single_one_by_its_process() -> None:
    assert identities(["GPU-1", None], pid=5) == ("GPU-1", "device 1")
    assert identities([None], pid=5) != identities([None], pid=6)


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


DOMAINS = {0: "0-3,8-11\n", 1: "4-7,12-15\n"}


@pytest.mark.parametrize(("cores", "domain"), [({0, 3}, 0), ({4, 12}, 1), ({3, 4}, None), ({99}, None), (set(), None)])
def test_the_numa_domain_of_a_rank_is_the_one_that_has_all_its_cores(cores: set[int], domain: int | None) -> None:
    assert domain_of(cores, DOMAINS) == domain
    assert domain_of(cores, {}) is None
