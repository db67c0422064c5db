"""What a rank computes on: its device."""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpctrain.cluster import cores
from hpctrain.cluster.fabric import fabrics, joined_ranks
from hpctrain.cluster.sysfs import Near, near
from hpctrain.errors import LaunchError
from hpctrain.plan.machine import Seat
from hpctrain.plan.topology import Topology

if TYPE_CHECKING:
    from hpctrain.cluster.world import World

# The variables that hide devices from a process, those of the vendor's lowest layer first.
VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


@dataclass(frozen=True)
class Devices:
    """The accelerators that one process sees. ``ids`` name the physical ones, the same in every process of a node."""

    kind: str
    ids: tuple[str, ...]
    near: tuple[Near, ...] = ()
    """What is near each; empty where that is not known of any."""
    fabrics: tuple[str, ...] = ()
    """The fast links that each hangs on; empty, or an empty name, where there are none."""


def choose_device(world: World, seats: Sequence[Seat] = ()) -> str:
    """The torch device of this rank, ``cpu`` where it sees no other. Collective.

    ``seats`` are those of a machine file, for where Linux does not tell which cores are near a device. Raises
    LaunchError on all ranks when two ranks of a node would share one.
    """
    mine = seated(visible_devices(), seats)
    seen, allowed = world.collect(mine), world.collect(world.cores)
    chosen: list[int | None] = []
    for node in range(len(world.topology.nodes)):
        ranks = world.topology.ranks_of(node)
        devices = [seen[rank] for rank in ranks]
        found = assign(devices, [allowed[rank] for rank in ranks])
        check_devices(world.topology.nodes[node], ranks, devices, found)
        chosen = found if node == world.node else chosen
    index = chosen[world.local_rank]
    return "cpu" if index is None else f"{mine.kind}:{index}"


def bind_cores(world: World, device: str, seats: Sequence[Seat] = ()) -> None:
    """Keep this rank on the cores nearest its device, as ``choose_device`` gave it. Collective; see ``cores.bind``."""
    devices, index = seated(visible_devices(), seats), device.partition(":")[2]
    cores.bind(world, devices.near[int(index)].cores if index and devices.near else frozenset())


def by_fabric(world: World, device: str) -> Topology:
    """The topology of the ranks, with the domains that fast links make of their devices. Collective."""
    names, index = visible_devices().fabrics, device.partition(":")[2]
    return joined_ranks(world.topology, world.collect(names[int(index)] if index and names else ""))


def assign(seen: Sequence[Devices], allowed: Sequence[Collection[int]]) -> list[int | None]:
    """For each rank of a node, the index of its device among those it sees; None for one that sees none.

    Where the launcher has bound ranks to cores, a rank takes a device that its cores are near to; where it has not, or
    too many were bound near one device, each takes its place among the devices in the order of local ranks.
    """
    return by_cores(seen, allowed) or [pick(place, devices) for place, devices in enumerate(seen)]


def by_cores(seen: Sequence[Devices], allowed: Sequence[Collection[int]]) -> list[int] | None:
    """The devices of ranks by the cores that they are bound to, or None where these do not decide.

    Devices with the same cores near them are dealt out to the ranks there by their first cores.
    """
    first = seen[0]
    if any(devices != first for devices in seen) or len(first.near) < 2 or not all(one.cores for one in first.near):
        return None
    domains = [frozenset(one.cores) for one in first.near]
    homes = [[domain for domain in set(domains) if set(cores) <= domain] for cores in allowed]
    if any(len(home) != 1 for home in homes):
        return None
    chosen = dict.fromkeys(range(len(seen)), -1)
    for (domain,) in {tuple(home) for home in homes}:
        ranks = sorted((rank for rank, home in enumerate(homes) if home == [domain]), key=lambda r: min(allowed[r]))
        free = [index for index, cores in enumerate(domains) if cores == domain]
        if len(ranks) > len(free):
            return None
        chosen |= dict(zip(ranks, free, strict=False))
    return list(chosen.values())


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


@functools.cache
def visible_devices() -> Devices:
    """The accelerators that this process sees, and what is near them; looked for once."""
    import torch

    for kind in ("cuda", "xpu"):
        layer = getattr(torch, kind)
        if layer.is_available():
            found = [layer.get_device_properties(index) for index in range(layer.device_count())]
            ids = identities([getattr(one, "uuid", None) for one in found], os.getpid())
            addresses = [pci(one) or "" for one in found]
            return Devices(kind, ids, tuple(map(near, addresses)), fabrics(addresses))
    return Devices("cpu", ())


def seated(devices: Devices, seats: Sequence[Seat]) -> Devices:
    """The same devices with what a machine file says is near them, where Linux says nothing.

    A file numbers all devices of a node, so it tells nothing to a process that sees only some of them.
    """
    known = any(one.cores for one in devices.near)
    if known or len(seats) != len(devices.ids):
        return devices
    told = tuple(_near(seat) for seat in seats)
    return replace(devices, near=told)


def _near(seat: Seat) -> Near:
    return Near(seat.numa, cores.physical(cores.parse(seat.cores)), (seat.nic,) if seat.nic else ())


def pci(properties: Any) -> str | None:
    """The PCI address of a device by torch's properties of it; None where they do not tell, as for Intel's."""
    parts = [getattr(properties, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    return None if None in parts else "{:04x}:{:02x}:{:02x}.0".format(*parts)


def identities(uuids: Sequence[object], pid: int) -> tuple[str, ...]:
    """A name for each device: its UUID; where it has none, its number, which says nothing when only one is shown."""
    unknown = "device {}" if len(uuids) > 1 else f"the device of process {pid}"
    return tuple(str(uuid) if uuid else unknown.format(index) for index, uuid in enumerate(uuids))
