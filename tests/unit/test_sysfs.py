"""What is near a device, read from trees such as Linux shows under /sys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.cores import parse
from hpctrain.cluster.sysfs import Near, near, numa_domain, spans

GPU = "0000:c1:00.0"
Tree = Callable[..., Path]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """``tree(way, numa="1", cores="96-97", cxi0=...)``: a GPU behind bridges, and interfaces by their own ways."""

    def made(way: str, numa: str, cores: str = "", kind: str = "infiniband", **nics: tuple[str, str]) -> Path:
        devices = {GPU: (way, numa)} | {f"0000:{index + 1:02}:00.0": nic for index, nic in enumerate(nics.values())}
        for address, (bridges, domain) in devices.items():
            place = tmp_path / "devices" / bridges / address
            place.mkdir(parents=True)
            (place / "numa_node").write_text(f"{domain}\n")
            link = tmp_path / "bus/pci/devices" / address
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(place)
        (tmp_path / "bus/pci/devices" / GPU / "local_cpulist").write_text(f"{cores}\n")
        for index, name in enumerate(nics):
            folder = tmp_path / "class" / kind / name
            folder.mkdir(parents=True)
            (folder / "device").symlink_to(tmp_path / "bus/pci/devices" / f"0000:{index + 1:02}:00.0")
        return tmp_path

    return made


def test_a_device_tells_its_numa_domain_and_the_cores_there(tree: Tree) -> None:
    found = near(GPU, tree("pci0000:c0/0000:c0:01.1", "3", "100-103,164"))
    assert (found.numa, found.cores) == (3, {100, 101, 102, 103, 164})
    assert str(found) == "NUMA 3, cores 100-103,164"


def test_firmware_that_does_not_say_makes_no_core_near(tree: Tree) -> None:
    assert near(GPU, tree("pci0000:c0", "-1", "0-127")) == Near()
    assert str(Near()) == "unknown"


def test_the_interface_behind_the_same_bridge_is_the_nearest(tree: Tree) -> None:
    root = tree(
        "pci0000:c0/0000:c0:01.1/0000:c1:04.0", "1",
        mlx5_0=("pci0000:00/0000:00:01.1", "1"), mlx5_1=("pci0000:c0/0000:c0:01.1/0000:c1:08.0", "1"),
        mlx5_2=("pci0000:c0/0000:c0:02.1", "1"),
    )  # fmt: skip
    assert near(GPU, root).nics == ("mlx5_1",)


def test_without_a_common_bridge_the_numa_domain_decides(tree: Tree) -> None:
    ways = {"cxi0": ("pci0000:00", "0"), "cxi1": ("pci0000:40", "1"), "cxi2": ("pci0000:50", "1")}
    assert near(GPU, tree("pci0000:c0", "1", kind="cxi", **ways)).nics == ("cxi1", "cxi2")


def test_interfaces_without_hardware_are_none(tree: Tree) -> None:
    root = tree("pci0000:c0", "0", kind="net", eth0=("pci0000:00", "0"))
    (root / "class/net/lo").mkdir()
    assert near(GPU, root).nics == ("eth0",)


def test_a_machine_that_tells_nothing_gives_empty_answers(tmp_path: Path) -> None:
    assert near(GPU, tmp_path) == Near()


@given(st.frozensets(st.integers(0, 300)))
def test_what_is_listed_can_be_read_again(numbers: frozenset[int]) -> None:
    assert parse(spans(numbers)) == numbers


@pytest.mark.parametrize(("cores", "domain"), [({0, 3}, 0), ({4, 12}, 1), ({3, 4}, None), ({99}, None), (set(), None)])
def test_the_numa_domain_of_a_rank_is_the_one_that_has_all_its_cores(
    cores: set[int], domain: int | None, tmp_path: Path
) -> None:
    assert numa_domain(cores, tmp_path) is None
    for number, listed in enumerate(("0-3,8-11\n", "4-7,12-15\n")):
        folder = tmp_path / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(listed)
    assert numa_domain(cores, tmp_path) == domain
