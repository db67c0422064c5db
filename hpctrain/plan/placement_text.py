"""A placement as text for a terminal: a line for each node, with the coordinates of each of its ranks.

    switch 1
      node1    0:0.0   4:0.1   8:0.2  12:0.3
      node2    1:1.0   5:1.1   9:1.2  13:1.3

Before the colon is the rank, behind it where it is along the axes of the mesh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hpctrain.plan.mesh import Mesh
from hpctrain.plan.place import Placement, spread, told
from hpctrain.plan.topology import NODE, Topology
from hpctrain.plan.traffic import Flow

SHOWN = 16  # nodes that are told one by one


@dataclass(frozen=True)
class Cluster:
    """The nodes of one domain beyond the node, or of the job where there is none."""

    title: str
    nodes: tuple[int, ...]


def clusters(topology: Topology, most: int) -> tuple[list[Cluster], int]:
    """The first ``most`` nodes by the domain that they are in, and how many nodes are left."""
    beyond = [level for level in topology.levels[topology.names.index(NODE) + 1 :] if level.count > 1]
    shown: dict[str, list[int]] = {}
    for node in range(len(topology.nodes))[:most] if not beyond else _sorted(topology)[:most]:
        first = topology.ranks_of(node)[0]
        title = f"{beyond[0].name} {beyond[0].domains[first] + 1}" if beyond else ""
        shown.setdefault(title, []).append(node)
    found = [Cluster(title, tuple(nodes)) for title, nodes in shown.items()]
    return found, len(topology.nodes) - sum(len(one.nodes) for one in found)


def text(topology: Topology, placement: Placement) -> str:
    """The placement in lines."""
    return "\n".join((*_nodes(topology, placement.mesh), *_axes(topology, placement), *_loads(topology, placement)))


def _sorted(topology: Topology) -> list[int]:
    """Nodes with those of one domain together."""
    firsts = [topology.ranks_of(node)[0] for node in range(len(topology.nodes))]
    place = [tuple(level.domains[first] for level in reversed(topology.levels)) for first in firsts]
    return sorted(range(len(firsts)), key=place.__getitem__)


def _nodes(topology: Topology, mesh: Mesh) -> Iterator[str]:
    yield f"ranks and their places along {', '.join(name for name, _ in mesh.axes) or 'no axis'}:"
    found, left = clusters(topology, SHOWN)
    names = max(len(topology.nodes[node]) for cluster in found for node in cluster.nodes)
    width = max(
        len(_rank(mesh, rank)) for cluster in found for node in cluster.nodes for rank in topology.ranks_of(node)
    )
    for cluster in found:
        if cluster.title:
            yield cluster.title
        for node in cluster.nodes:
            ranks = "  ".join(_rank(mesh, rank).rjust(width) for rank in topology.ranks_of(node))
            yield f"  {topology.nodes[node]:{names}}  {ranks}"
    if left:
        yield f"  ... {left:,} more {'nodes' if left > 1 else 'node'} like these"


def _rank(mesh: Mesh, rank: int) -> str:
    return f"{rank}:{'.'.join(str(at) for at in mesh.coord(rank).values())}"


def _axes(topology: Topology, placement: Placement) -> Iterator[str]:
    """Where the groups along each axis are, and what is sent along it."""
    by_axes: dict[tuple[str, ...], list[Flow]] = {}
    for flow in placement.flows:
        by_axes.setdefault(flow.axes, []).append(flow)
    for axes, flows in by_axes.items():
        sent = ", ".join(f"{told(flow.bytes)} of {flow.name}" for flow in flows)
        yield f"along {where(topology, placement.mesh, axes, flows[0])}; a rank sends {sent} a step"


def where(topology: Topology, mesh: Mesh, axes: tuple[str, ...], flow: Flow) -> str:
    """An axis, its groups, and where these are."""
    names = " x ".join(name for name in axes if mesh.size(name) > 1)
    together, count, nearest = spread(topology, mesh, flow)
    size = mesh.size(*axes)
    place = f"each on one {nearest}" if count > 1 else f"on one {nearest}"
    if together < count:
        place = f"{together:,} of them on one node" if together else "across nodes"
    return f"{names}: {count:,} group{'s' * (count > 1)} of {size:,} ranks, {place}"


def _loads(topology: Topology, placement: Placement) -> Iterator[str]:
    """Bytes that leave domains, in this order and as numbered."""
    load, given = placement.load, placement.given
    for name in (level.name for level in topology.levels if level.count > 1):
        before = "" if placement.mesh.order is None else f", and {told(given.beyond(name))} in the order given"
        yield f"leaving a {name}: {told(load.beyond(name))} a step{before}"
    if load.seconds is not None and given.seconds is not None:
        before = "" if placement.mesh.order is None else f", and {given.seconds:.3g} in the order given"
        yield f"links are busy for {load.seconds:.3g} seconds a step, one flow after another{before}"
