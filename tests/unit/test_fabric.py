"""Which devices fast links join, told by trees of files and by NVIDIA's library as it is published."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.fabric import SWITCH, fabrics, hives, joined, told

GPUS = ("0000:03:00.0", "0000:44:00.0", "0009:01:00.0", "0000:c4:00.0")


def test_devices_of_one_xgmi_hive_have_one_fabric(tmp_path: Path) -> None:
    for address, hive in zip(GPUS[:3], ("7", "7", "9"), strict=True):
        folder = tmp_path / "bus/pci/devices" / address / "xgmi_hive_info"
        folder.mkdir(parents=True)
        (folder / "xgmi_hive_id").write_text(f"{hive}\n")
    assert hives(GPUS, tmp_path) == ("xgmi-7", "xgmi-7", "xgmi-9", "")
    assert fabrics(GPUS, tmp_path) == hives(GPUS, tmp_path)


def test_links_join_devices_directly_through_others_and_through_switches() -> None:
    assert joined({"a": ["b"], "b": ["a"], "c": []}) == {"a": "a", "b": "a", "c": ""}
    assert set(joined({"a": ["b"], "b": ["a", "c"], "c": ["b"]}).values()) == {"a"}
    switched = joined({"a": [SWITCH] * 4, "b": [SWITCH], "c": []})
    assert switched["a"] == switched["b"] != "" and switched["c"] == ""


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=12))
def test_two_ends_of_a_link_are_in_one_fabric(links: list[tuple[int, int]]) -> None:
    peers: dict[str, list[str]] = {str(device): [] for device in range(8)}
    for one, other in links:
        peers[str(one)].append(str(other))
        peers[str(other)].append(str(one))
    home = joined(peers)
    assert all(home[str(one)] == home[str(other)] != "" for one, other in links)
    assert {device for device, name in home.items() if not name} == {device for device in peers if not peers[device]}


class Board:
    """NVML as a board of GPUs would answer: every name that it has not is looked up in the published module."""

    def __init__(self, nvml: Any, ends: dict[str, list[str | None]], rack: int = 0) -> None:
        self._nvml, self._ends, self._cluster = nvml, ends, rack

    def __getattr__(self, name: str) -> Any:
        return getattr(self._nvml, name)

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> str:  # noqa: N802 - NVIDIA's name
        if address.decode() not in self._ends:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_FOUND)
        return address.decode()

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= len(self._ends[handle]):
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return int(self._ends[handle][link] is not None)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: str, link: int) -> int:  # noqa: N802
        switch = self._ends[handle][link] == SWITCH
        return self._nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH if switch else self._nvml.NVML_NVLINK_DEVICE_TYPE_GPU

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: str, link: int) -> Any:  # noqa: N802
        address = "0000:00:00.0" if self._ends[handle][link] == SWITCH else self._ends[handle][link]
        domain, bus, device = (int(part, 16) for part in address.removesuffix(".0").split(":"))
        return SimpleNamespace(domain=domain, bus=bus, device=device)

    def nvmlDeviceGetGpuFabricInfo(self, handle: str, found: Any) -> None:  # noqa: N802
        if not self._cluster:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        found.clusterUuid[0], found.cliqueId = self._cluster, 3
        found.state = self._nvml.NVML_GPU_FABRIC_STATE_COMPLETED


@pytest.fixture
def nvml() -> Any:
    return pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")


def test_a_board_with_links_from_each_device_to_each_is_one_fabric(nvml: Any) -> None:
    ends: dict[str, list[str | None]] = {gpu: [other for other in GPUS if other != gpu] + [None] for gpu in GPUS}
    assert len(set(told(GPUS, Board(nvml, ends)))) == 1
    assert told(GPUS, Board(nvml, ends))[0] == f"nvlink-{GPUS[0]}"


def test_a_device_whose_links_are_down_or_that_the_library_does_not_know_has_no_fabric(nvml: Any) -> None:
    ends: dict[str, list[str | None]] = {GPUS[0]: [None] * 4, GPUS[1]: []}
    assert told(GPUS, Board(nvml, ends)) == ("",) * 4


def test_a_rack_has_one_name_on_all_its_nodes(nvml: Any) -> None:
    here = told(GPUS[:2], Board(nvml, {gpu: [SWITCH] for gpu in GPUS[:2]}, rack=0xAB))
    there = told(GPUS[2:], Board(nvml, {gpu: [SWITCH] for gpu in GPUS[2:]}, rack=0xAB))
    assert set(here) == set(there) == {"rack-ab-3"}
