"""What a rank computes on: its device, and the cores that it may use.

Cores are counted as physical ones, each named by its first hardware thread: two threads of one core multiply matrices
no faster than one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.errors import LaunchError

if TYPE_CHECKING:
    from hpctrain.cluster.world import World

# The variables that hide devices from a process, those of the vendor's lowest layer first.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
CPU = Path("/sys/devices/system/cpu")
NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Devices:
    """The accelerators that one process sees. ``ids`` name the physical ones, the same in every process of a node."""

    kind: str
    ids: tuple[str, ...]


def choose_device(world: World) -> str:
    """The torch device of this rank, ``cpu`` where it sees no other. Collective.

    Raises LaunchError on all ranks when two ranks of a node would share one.
    """
    mine = visible_devices()
    seen = world.collect(mine)
    for node in range(len(world.topology.nodes)):
        ranks = world.topology.ranks_of(node)
        chosen = [pick(place, seen[rank]) for place, rank in enumerate(ranks)]
        check_devices(world.topology.nodes[node], ranks, [seen[rank] for rank in ranks], chosen)
    index = pick(world.local_rank, mine)
    return "cpu" if index is None else f"{mine.kind}:{index}"


def pick(local_rank: int, devices: Devices) -> int | None:
    """The index of a rank's device among those it sees; None when it sees none.

    One that sees a single device was given it by the launcher; one that sees several takes its place among them.
    """
    if not devices.ids:
        return None
    return local_rank % len(devices.ids)


def check_devices(host: str, ranks: Sequence[int], seen: Sequence[Devices], chosen: Sequence[int | None]) -> None:
    """Refuse two ranks of a node on one device."""
    first: dict[str, int] = {}
    for rank, devices, index in zip(ranks, seen, chosen, strict=True):
        if index is None:
            continue
        other = first.setdefault(devices.ids[index], rank)
        if other != rank:
            raise LaunchError(
                f"rank {other} and rank {rank} on {host} would share one device ({devices.ids[index]})",
                f"{len(ranks)} ranks run there and rank {rank} sees {len(devices.ids)} of its devices",
                "start as many ranks on a node as it has devices: srun --ntasks-per-node=N --gpus-per-node=N",
            )


def visible_devices() -> Devices:
    """The accelerators that this process sees."""
    import torch

    for kind in ("cuda", "xpu"):
        layer = getattr(torch, kind)
        if layer.is_available():
            found = [getattr(layer.get_device_properties(i), "uuid", None) for i in range(layer.device_count())]
            return Devices(kind, identities(found, os.getpid()))
    return Devices("cpu", ())


def identities(uuids: Sequence[object], pid: int) -> tuple[str, ...]:
    """A name for each device: its UUID; where it has none, its number, which says nothing when only one is shown."""
    unknown = "device {}" if len(uuids) > 1 else f"the device of process {pid}"
    return tuple(str(uuid) if uuid else unknown.format(index) for index, uuid in enumerate(uuids))


# ---- cores ---------------------------------------------------------------------------------------------------------


def usable_cores() -> frozenset[int]:
    """The physical cores that this process may use."""
    return physical(os.sched_getaffinity(0), _siblings)


def physical(cpus: Collection[int], siblings: Callable[[int], str]) -> frozenset[int]:
    """The cores that hardware threads ``cpus`` belong to; ``siblings`` gives the list of a core's threads, as 3,51."""
    return frozenset(_first(siblings(cpu), cpu) for cpu in cpus)


def share(mine: Collection[int], others: Sequence[Collection[int]]) -> Fraction:
    """How many cores fall to a rank, when each core is shared evenly by the ranks that may use it.

    ``others`` has the cores of all ranks of the node, this one among them.
    """
    return sum((Fraction(1, sum(core in cores for cores in others)) for core in mine), Fraction(0))


def threads(world: World, environ: Mapping[str, str] = os.environ) -> int:
    """How many threads this rank should compute with: OMP_NUM_THREADS where it is set, else its share of the cores."""
    given = environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if given.isdigit() and int(given):
        return int(given)
    return max(1, int(share(world.cores, world.cores_of_node)))


def numa_domain(cores: Collection[int]) -> int | None:
    """The NUMA domain that has all these cores; None where they are in several, or nobody says."""
    return domain_of(cores, {int(path.name[4:]): _list(path) for path in NODES.glob("node[0-9]*")})


def domain_of(cores: Collection[int], domains: Mapping[int, str]) -> int | None:
    """The one of ``domains``, lists of cores such as ``0-23,48-71``, that has all these cores."""
    found = {number for number, listed in domains.items() if cores and set(cores) <= _numbers(listed)}
    return found.pop() if len(found) == 1 else None


def _numbers(listed: str) -> set[int]:
    ranges = (part.partition("-") for part in listed.split(",") if part.strip())
    return {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}


def _list(path: Path) -> str:
    try:
        return (path / "cpulist").read_text()
    except OSError:
        return ""


def _siblings(cpu: int) -> str:
    try:
        return (CPU / f"cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return ""


def _first(siblings: str, cpu: int) -> int:
    first = siblings.strip().replace("-", ",").split(",")[0]
    return int(first) if first.isdigit() else cpu
