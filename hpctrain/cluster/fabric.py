"""Which devices fast links join: NVLink as NVIDIA's library tells it (NVML), xGMI as Linux tells it for AMD.

Each device gets the name of its fabric; devices with one name reach each other without the host. Racks whose switches
join the GPUs of several nodes (NVL72) have one name over those nodes. This is the only file that imports pynvml.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.cluster.sysfs import SYS

SWITCH = "switch"


def fabrics(addresses: Sequence[str], sys: Path = SYS) -> tuple[str, ...]:
    """The fabric of each device, by PCI addresses such as ``0000:c1:00.0``; empty for one that nothing joins.

    Where the driver or its library is not there, all are empty.
    """
    return tuple(hive or linked for hive, linked in zip(hives(addresses, sys), _nvlink(addresses), strict=True))


def hives(addresses: Sequence[str], sys: Path = SYS) -> tuple[str, ...]:
    """The xGMI hive of each device, as the amdgpu driver names it."""
    return tuple(_hive(sys / "bus/pci/devices" / address / "xgmi_hive_info/xgmi_hive_id") for address in addresses)


def joined(peers: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """The fabric of each device, named after its first member, given the other ends of its links.

    Links to a switch join all devices that have one.
    """
    home = {name: name for device, ends in peers.items() for name in (device, *ends)}
    for one, other in ((device, end) for device, ends in peers.items() for end in ends):
        old, new = sorted((home[one], home[other]), reverse=True)
        home |= {name: new for name, group in home.items() if group == old}
    return {device: home[device] if ends else "" for device, ends in peers.items()}


def _hive(path: Path) -> str:
    with suppress(OSError):
        return f"xgmi-{path.read_text().strip()}"
    return ""


def _nvlink(addresses: Sequence[str]) -> tuple[str, ...]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no library, no driver, or one that does not fit the other: then nothing is known
        return ("",) * len(addresses)
    try:
        return told(addresses, pynvml)
    finally:
        pynvml.nvmlShutdown()


def told(addresses: Sequence[str], nvml: Any) -> tuple[str, ...]:
    """What ``nvml``, the started module pynvml, says of each device."""
    found = [_asked(nvml, nvml.nvmlDeviceGetHandleByPciBusId, address.encode()) for address in addresses]
    handles = dict(zip(addresses, found, strict=True))
    peers = {address: _ends(handle, nvml) if handle else [] for address, handle in handles.items()}
    homes = joined(peers)
    wide = {address: _rack(handle, nvml) if handle else "" for address, handle in handles.items()}
    return tuple(wide[address] or (f"nvlink-{homes[address]}" if homes[address] else "") for address in addresses)


def _ends(handle: Any, nvml: Any) -> list[str]:
    """The other end of each of a device's links that are up: a device's address, or ``SWITCH``."""
    ends = []
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        if not _asked(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link):
            continue
        kind = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
        end = _asked(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
        if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
            ends.append(SWITCH)
        elif end is not None:
            ends.append(f"{end.domain:04x}:{end.bus:02x}:{end.device:02x}.0")
    return ends


def _rack(handle: Any, nvml: Any) -> str:
    """The name of a fabric that goes over several nodes."""
    found = nvml.c_nvmlGpuFabricInfo_t()
    _asked(nvml, nvml.nvmlDeviceGetGpuFabricInfo, handle, found)
    cluster = bytes(found.clusterUuid).hex().rstrip("0")
    complete = found.state == nvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return f"rack-{cluster}-{found.cliqueId}" if complete and cluster else ""


def _asked(nvml: Any, question: Callable[..., Any], *about: Any) -> Any:
    """The answer, or None where a device has none to this question."""
    with suppress(nvml.NVMLError):
        return question(*about)
    return None
