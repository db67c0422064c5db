"""What is near a device, as Linux tells it under /sys: its NUMA domain, the cores there, network interfaces.

Nothing here asks a vendor's library. A machine that tells nothing, such as a virtual one, gives empty answers.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from hpctrain.cluster.cores import parse, physical

SYS = Path("/sys")
NETWORKS = ("class/infiniband", "class/cxi", "class/net")  # the first kind that a node has; Slingshot's is cxi


@dataclass(frozen=True)
class Near:
    """What is near one device; None and empty where that is not known."""

    numa: int | None = None
    cores: frozenset[int] = frozenset()
    nics: tuple[str, ...] = ()
    """The network interfaces that no other comes nearer than."""

    def __str__(self) -> str:
        said = (
            "" if self.numa is None else f"NUMA {self.numa}",
            f"cores {spans(self.cores)}" if self.cores else "",
            ", ".join(self.nics),
        )
        return ", ".join(part for part in said if part) or "unknown"


def near(address: str, sys: Path = SYS) -> Near:
    """What is near the PCI device with an address such as ``0000:c1:00.0``; an empty one is unknown."""
    if not address:
        return Near()
    device = sys / "bus/pci/devices" / address
    numa = _read(device / "numa_node")
    cores = physical(parse(_read(device / "local_cpulist")))
    known = numa.isdigit()  # -1 where the firmware does not say
    return Near(int(numa) if known else None, cores if known else frozenset(), nearest_nics(device, sys))


def nearest_nics(device: Path, sys: Path = SYS) -> tuple[str, ...]:
    """The network interfaces with the longest way in common with ``device`` through PCI bridges, by name.

    With no bridge in common, those of its NUMA domain; where that is not known either, none.
    """
    found = {nic.name: nic / "device" for nic in _nics(sys)}
    ways = {name: _common(device, path) for name, path in found.items()}
    if best := max(ways.values(), default=0):
        return tuple(sorted(name for name, way in ways.items() if way == best))
    numa = _read(device / "numa_node")
    return tuple(sorted(name for name, path in found.items() if numa.isdigit() and _read(path / "numa_node") == numa))


def numa_domain(cores: Collection[int], sys: Path = SYS) -> int | None:
    """The NUMA domain that has all these cores; None where they are in several, or Linux does not tell."""
    listed = {path: parse(_read(path / "cpulist")) for path in (sys / "devices/system/node").glob("node[0-9]*")}
    found = [int(path.name[4:]) for path, numbers in listed.items() if cores and set(cores) <= numbers]
    return found[0] if len(found) == 1 else None


def spans(numbers: frozenset[int]) -> str:
    """Numbers as Linux lists them: ``0-3,8``."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _nics(sys: Path) -> list[Path]:
    """The interfaces with hardware behind them, of the fastest kind there is."""
    for kind in NETWORKS:
        folder = sys / kind
        found = [path for path in folder.iterdir() if (path / "device").exists()] if folder.is_dir() else []
        if found:
            return sorted(found)
    return []


def _common(one: Path, other: Path) -> int:
    """How many bridges two devices have in common, below the root of their PCI domain."""
    ways = [[part for part in Path(os.path.realpath(path)).parts if part.count(":") == 2] for path in (one, other)]
    return len(os.path.commonprefix([way[:-1] for way in ways]))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
