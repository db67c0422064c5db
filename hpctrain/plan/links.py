"""Links: what a machine's file says of the links between ranks, laid over where the ranks are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpctrain.plan.machine import Link, Machine
from hpctrain.plan.topology import NODE, Level, Topology, nested

# What a batch system or a host's name calls the domains that machine files call otherwise.
ALIKE = {"cabinet": "group", "switch": "leaf"}


def linked(topology: Topology, machine: Machine | None, dense: bool = False) -> Topology:
    """The topology with the domains and the speeds that a machine's file tells; as it is where no machine is known.

    Within a node domains are those of the file, which ranks have in turn, unless the topology has as many of them.
    Larger ones are those that the topology has, since a job may be anywhere; for one that is only planned they are
    ``dense``: its nodes are taken to follow one another in them.
    """
    if machine is None or not machine.links:
        return topology
    told = topology.levels[: topology.names.index(NODE)]
    inner = [_devices(topology, machine, x) for x in machine.links if x.devices and x.devices < machine.node.devices]
    near = [_seen(level, told) for level in inner] or told
    node = Level(NODE, topology.level(NODE).domains, _rate(machine.links, NODE))
    far = _dense(topology, machine) if dense else _told(topology, machine)
    return Topology(topology.hosts, tuple(nested((*near, node, *far))))


def _devices(topology: Topology, machine: Machine, link: Link) -> Level:
    """Domains of some devices of a node."""
    devices = (local % machine.node.devices // (link.devices or 1) for local in topology.local_ranks)
    places = list(zip(topology.level(NODE).domains, devices, strict=True))
    return Level.of(link.name, places, link.gb_per_second * 1e9)


def _seen(level: Level, told: Sequence[Level]) -> Level:
    """The level with the domains of one of ``told`` that has as many: it was seen which ranks are in each."""
    return next((replace(level, domains=one.domains) for one in told if one.count == level.count), level)


def _dense(topology: Topology, machine: Machine) -> Iterator[Level]:
    nodes = topology.level(NODE).domains
    for link in _network(machine):
        places = [node // link.nodes for node in nodes] if link.nodes else [0] * len(nodes)
        yield Level.of(link.name, places, link.gb_per_second * 1e9)


def _told(topology: Topology, machine: Machine) -> Iterator[Level]:
    """The levels beyond the node, with the speed of the link of that name; else with what a node puts in, or, for the
    one that has all ranks, with that of the whole machine."""
    network = list(_network(machine))
    for level in topology.levels[topology.names.index(NODE) + 1 :]:
        whole = [link.gb_per_second * 1e9 for link in network if link.nodes is None and level.count == 1]
        entry = [link.gb_per_second * 1e9 for link in network[:1]]
        named = _rate(network, level.name) or _rate(network, ALIKE.get(level.name, ""))
        yield Level(level.name, level.domains, named or next(iter((*whole, *entry)), level.bytes_per_second))


def _network(machine: Machine) -> Iterator[Link]:
    return (link for link in machine.links if link.devices is None)


def _rate(links: Iterator[Link] | tuple[Link, ...] | list[Link], name: str) -> float | None:
    return next((link.gb_per_second * 1e9 for link in links if link.name == name), None)
