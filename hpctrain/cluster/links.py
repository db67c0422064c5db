"""What passes between nodes: how fast pairs of them exchange, and how far their clocks are apart.

``python -m hpctrain.cluster.links SECONDS``, started by srun or mpirun, measures all rounds and prints what it found as
short lines of JSON. In a round every node exchanges with another one, all at once, as they do in a run; in a few
rounds each node has met its neighbours in a ring and some that are far away. So a slow node, slow with all that it
meets, can be told from a slow link between two.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.checks import ERROR_LETTERS, end_after, node_name, tell
from hpctrain.cluster.world import World
from hpctrain.config import CommConfig
from hpctrain.errors import HpctrainError

PINGS = 9
MESSAGE_BYTES = 8 * 2**20
TRIES = 8

Round = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pair:
    """How fast two nodes exchanged in a round: bytes/s each way, of the slowest of their ranks; 0 where it hung."""

    round: int
    one: str
    other: str
    bytes_per_second: float


def rounds(nodes: int) -> tuple[Round, ...]:
    """Who meets whom in each round, for so many nodes: at most log2(nodes) + 2 rounds of pairs without a common node.

    All neighbours in a ring meet first, then nodes at distance 2, 4, 8 and so on. In each round at most one node has
    nobody to meet, and not always the same one.
    """
    if nodes < 3:
        return (((0, 1),),) if nodes == 2 else ()
    ring = [(1, start) for start in (0, 1, *([nodes - 1] if nodes % 2 else []))]
    further = [(1 << bit, bit) for bit in range(1, nodes.bit_length()) if 1 << bit < nodes]
    return tuple(_at_distance(nodes, distance, start) for distance, start in (*ring, *further))


def _at_distance(nodes: int, distance: int, start: int) -> Round:
    """Pairs of nodes that are so far apart in the ring, the first from ``start``; who is left over meets likewise."""
    circles = math.gcd(nodes, distance)
    length = nodes // circles
    walks = [[(start + first + step * distance) % nodes for step in range(length)] for first in range(circles)]
    left = [walk[-1] for walk in walks if length % 2]
    return tuple((walk[i], walk[i + 1]) for walk in (*walks, left) for i in range(0, len(walk) - 1, 2))


@dataclass
class Place:
    """Where a rank is in the rounds; it changes. ``partner`` is the node that it exchanges with at this moment."""

    round: int = -1
    partner: str | None = None


def measure(world: World, place: Place | None = None) -> Iterator[Pair]:
    """How fast each pair of each round exchanged, on all ranks alike. Collective.

    Ranks meet those with the same place on the other node. ``place`` follows this rank, for whoever watches it.
    """
    place, nodes = place or Place(), world.topology.nodes
    for number, pairs in enumerate(rounds(len(nodes))):
        place.round = number
        rates = world.collect(_met(world, _partner(world, pairs), place))
        for one, other in pairs:
            found = [rates[rank] for rank in world.topology.ranks_of(one) if rates[rank] is not None]
            yield Pair(number, nodes[one], nodes[other], min(found))


def _met(world: World, partner: int | None, place: Place) -> float | None:
    """Bytes/s with a partner, and None without one."""
    if partner is None:
        return None
    place.partner = world.topology.hosts[partner]
    found = _exchange(world.comm, partner)
    place.partner = None  # what comes next waits for all, and says nothing of this partner
    return found


def _partner(world: World, pairs: Round) -> int | None:
    """The rank that this one meets, or None."""
    met = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
    if world.node not in met:
        return None
    ranks = world.topology.ranks_of(met[world.node])
    return ranks[world.local_rank] if world.local_rank < len(ranks) else None


def _exchange(comm: Any, partner: int) -> float:
    """Bytes/s each way while both send, the best of several tries."""
    out, back = bytearray(MESSAGE_BYTES), bytearray(MESSAGE_BYTES)
    taken = []
    for _ in range(TRIES):
        began = time.perf_counter()
        comm.Sendrecv(out, dest=partner, recvbuf=back, source=partner)
        taken.append(time.perf_counter() - began)
    return MESSAGE_BYTES / min(taken)


def clock_offsets(world: World) -> list[float]:
    """For each node, how many seconds its clock is ahead of that of rank 0's node. Collective.

    Each node's first rank answers pings of rank 0 with its time; the quickest of them, halved, tells the way
    (Cristian 1989).
    """
    firsts = [world.topology.ranks_of(node)[0] for node in range(len(world.topology.nodes))]
    offsets = [0.0]
    for first in firsts[1:]:
        if world.leads:
            offsets.append(min(_ping(world, first) for _ in range(PINGS))[1])
        elif world.rank == first:
            for _ in range(PINGS):
                world.comm.recv(source=0)
                world.comm.send(time.time(), dest=0)
    return world.share(offsets)


def _ping(world: World, rank: int) -> tuple[float, float]:
    """The seconds of a round trip, and how far ahead the other clock is."""
    sent = time.time()
    world.comm.send(None, dest=rank)
    there = world.comm.recv(source=rank)
    back = time.time()
    return back - sent, there - (sent + back) / 2


def main(seconds: float) -> None:
    """Meet the other ranks and tell what was measured, a line a pair; a rank that hangs or is refused tells that."""
    place = Place()
    names: dict[str, str] = {}
    timer = end_after(seconds, lambda: tell("hangs", round=place.round, partner=names.get(place.partner)))
    tell("here")
    try:
        with World.join(
            CommConfig(start_seconds=seconds / 2, timeout_seconds=seconds, check_master_addr=False)
        ) as world:
            names.update(zip(world.topology.hosts, world.collect(node_name()), strict=True))
            offsets, found = clock_offsets(world), list(measure(world, place))
            timer.cancel()
            if world.leads:
                _tell(names, dict(zip(world.topology.nodes, offsets, strict=True)), found)
    except HpctrainError as error:
        tell("mpi", error=". ".join(part for part in (error.what, error.why, error.mend) if part)[:ERROR_LETTERS])
        sys.exit(error.exit_code)


def _tell(names: dict[str, str], offsets: dict[str, float], found: list[Pair]) -> None:
    """Print the clocks and the pairs, with the names that Slurm has for their nodes."""
    for host, offset in offsets.items():
        tell("clock", of=names[host], ahead_seconds=offset)
    for pair in found:
        told = {"round": pair.round, "one": names[pair.one], "other": names[pair.other]}
        tell("link", **told, bytes_per_second=pair.bytes_per_second)
    tell("done")


if __name__ == "__main__":
    main(float(sys.argv[1]))
