"""Which device a rank takes, and who is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hpctrain.cluster.devices import (
    Devices,
    assign,
    check_devices,
    identities,
    pci,
    pick,
    seated,
)
from hpctrain.cluster.sysfs import Near
from hpctrain.errors import LaunchError
from hpctrain.plan.machine import Seat

FOUR = Devices("cuda", ("a", "b", "c", "d"))
# Two devices on each of two NUMA domains, the far domain first, as on many machines.
PAIRS = tuple(Near(numa, frozenset(range(8 * numa, 8 * numa + 8))) for numa in (1, 1, 0, 0))
SEEN = Devices("cuda", FOUR.ids, PAIRS)


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


def test_ranks_bound_to_cores_take_the_devices_near_them() -> None:
    bound = [{0, 1}, {2, 3}, {8, 9}, {10, 11}]
    assert assign([SEEN] * 4, bound) == [2, 3, 0, 1]
    assert assign([SEEN] * 4, bound[::-1]) == [1, 0, 3, 2]
    assert assign([SEEN] * 2, [{9}, {1}]) == [0, 2]


@pytest.mark.parametrize(
    "allowed",
    [[set(range(16))] * 4, [{0}, {1}, {2}, {8}], [{0, 8}, {1}, {9}, {10}]],
    ids=["unbound", "three near two devices", "a rank on both sides"],
)
def test_ranks_whose_cores_do_not_decide_take_devices_in_their_order(allowed: list[set[int]]) -> None:
    assert assign([SEEN] * 4, allowed) == [0, 1, 2, 3]


def test_ranks_that_see_one_device_each_have_it_whatever_their_cores() -> None:
    alone = [Devices("cuda", (name,), (PAIRS[0],)) for name in "abcd"]
    assert assign(alone, [{0}] * 4) == [0] * 4
    assert assign([Devices("cpu", ())] * 2, [{0}, {1}]) == [None, None]


def test_a_machine_file_says_what_linux_does_not() -> None:
    seats = [Seat(numa=3 - index, cores=f"{900 - index}", nic=f"hsn{index}") for index in range(4)]
    told = seated(FOUR, seats)
    assert told.near[1] == Near(2, frozenset({899}), ("hsn1",))
    assert seated(SEEN, seats) is SEEN
    one = Devices("cuda", ("a",))
    assert seated(one, seats) is one  # which of the four it is, nobody knows


def test_a_device_has_an_address_where_torch_tells_its_parts() -> None:
    assert pci(SimpleNamespace(pci_domain_id=9, pci_bus_id=193, pci_device_id=0)) == "0009:c1:00.0"
    assert pci(SimpleNamespace(uuid="x")) is None
