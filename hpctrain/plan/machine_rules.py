"""Machine rules: in what a machine file has to agree with itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hpctrain.errors import ConfigError
from hpctrain.plan.machine import Link, Machine, Node

Fault = tuple[str, str, str]
"""What is wrong, why, and how to mend it."""


def check(machine: Machine, source: str) -> None:
    """Raise ConfigError for the first thing in which a machine's figures do not fit each other."""
    for what, why, mend in _faults(machine):
        raise ConfigError(f"{source}: {what}", why, mend)


def _faults(machine: Machine) -> Iterator[Fault]:
    yield from _of_cores(machine.node)
    yield from _of_seats(machine.node)
    for index, link in enumerate(machine.links):
        yield from _of_link(f"links[{index}]", link, machine)
    for index, (near, far) in enumerate(pairwise(machine.links)):
        yield from _of_neighbours(index, near, far, machine)


def _of_cores(node: Node) -> Iterator[Fault]:
    if node.usable_cores is not None and node.usable_cores > node.cores:
        what = f"node.usable_cores = {node.usable_cores} is more than node.cores = {node.cores}"
        yield what, "jobs get some of the node's cores", "count physical cores in both"


def _of_seats(node: Node) -> Iterator[Fault]:
    if node.seats and len(node.seats) != node.devices:
        what = f"node.seats has {len(node.seats)} seats, and node.devices = {node.devices}"
        yield what, "each device has a seat, in the order of their numbers", "list one for each, or none"
    threads = node.cores * node.threads_per_core
    used: dict[int, int] = {}
    for index, seat in enumerate(node.seats):
        for core in seat.core_numbers:
            if core >= threads:
                what = f"node.seats[{index}].cores = {seat.cores!r} has core {core}"
                yield what, f"the cores of a node have the numbers 0 to {threads - 1}", "see node.cores"
            if core in used:
                what = f"node.seats[{index}].cores = {seat.cores!r} has core {core} of seat {used[core]} too"
                yield what, "ranks that share a core wait for each other", "give each seat cores of its own"
            used[core] = index


def _of_link(key: str, link: Link, machine: Machine) -> Iterator[Fault]:
    if link.devices is not None and link.nodes is not None:
        what = f"{key} has devices = {link.devices} and nodes = {link.nodes}"
        yield what, "a domain is counted in the one or the other", "leave out devices where it is larger than a node"
    if link.devices is not None and machine.node.devices % link.devices:
        what = f"{key}.devices = {link.devices} does not divide node.devices = {machine.node.devices}"
        yield what, "a node has a whole number of such domains", "count the devices of one domain"


def _of_neighbours(index: int, near: Link, far: Link, machine: Machine) -> Iterator[Fault]:
    here, there = f"links[{index}] ({near.name})", f"links[{index + 1}] ({far.name})"
    if _width(near, machine) >= _width(far, machine):
        yield f"{there} is no wider than {here}", "links go from the nearest to the farthest", "put the wider one last"
    if far.gb_per_second > near.gb_per_second:
        what = f"{there} has {far.gb_per_second:g} GB/s, and {here} has {near.gb_per_second:g}"
        yield what, "what is far is not faster than what is near", "say what a device sends while all others do too"


def _width(link: Link, machine: Machine) -> float:
    """Devices in a domain."""
    if link.devices is not None:
        return link.devices
    return float("inf") if link.nodes is None else link.nodes * machine.node.devices
