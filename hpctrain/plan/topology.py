"""Topology: where each rank runs, and what is between it and the others.

Ranks lie in domains, one within the other: a module of a GPU, a NUMA domain, a node, the nodes of a switch, a group of
switches, the machine. Each kind is a ``Level``, from the nearest to the farthest. The node is always one, and the last
level is one domain with every rank. A node is a number, in the order in which the ranks first meet it, and so are other
domains; its host name is ``nodes[node]``. Ranks may be spread over nodes in any way: in blocks, cyclic, or unevenly.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hpctrain.errors import PlanError
from hpctrain.plan.packed import pack, unpack

NODE, MACHINE = "node", "machine"
# A line of a log has room for the ranks of so many nodes; more are told as a range.
NODES_LISTED = 8
# Where nobody says how fast the links of a level are, they count as so many times slower than those of the one before:
# about what it is between NVLink and a network card, and between a card and its share of what leaves a group.
SLOWER = 4.0
# However fast its links are, a byte over a farther level costs as many times what one over the level before does, at
# least: it takes links of both, and those that lead far are shared by most.
DEARER = 2.0


@dataclass(frozen=True)
class Level:
    """Domains of one kind."""

    name: str
    domains: tuple[int, ...]
    """The domain of each rank, in rank order."""
    bytes_per_second: float | None = None
    """Of one rank that sends, while all others do too, to ranks of its domain that are in another nearer one; None
    where it is not known."""

    @classmethod
    def of(cls, name: str, places: Iterable[Hashable], bytes_per_second: float | None = None) -> Level:
        """The level whose domains are the different ``places``, which are given for each rank."""
        numbers: dict[Hashable, int] = {}
        return cls(name, tuple(numbers.setdefault(place, len(numbers)) for place in places), bytes_per_second)

    @cached_property
    def array(self) -> np.ndarray:
        """The domain of each rank."""
        return np.array(self.domains, np.int64)

    @cached_property
    def count(self) -> int:
        """How many domains there are."""
        return max(self.domains) + 1

    def within(self, outer: Level) -> bool:
        """Whether each of these domains is in one of ``outer``'s."""
        around = np.zeros(self.count, np.int64)
        around[self.array] = outer.array
        return bool((around[self.array] == outer.array).all())


@dataclass(frozen=True)
class Topology:
    """The host of every rank, in rank order, and the levels of domains around them.

    Of ``levels`` the node may be left out, and the last one that has all ranks; they are there afterwards, the node
    behind all that lie within it.
    """

    hosts: tuple[str, ...]
    levels: tuple[Level, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts:
            raise PlanError("the topology has no ranks", "a job has at least one", "give the host of every rank")
        object.__setattr__(self, "levels", tuple(_complete(self.hosts, self.levels)))

    # ---- nodes -----------------------------------------------------------------------------------------------------

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The host name of each node."""
        return tuple(dict.fromkeys(self.hosts))

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` runs on."""
        return self.level(NODE).domains[self._checked(rank)]

    def local_rank(self, rank: int) -> int:
        """How many ranks before ``rank`` run on its node."""
        return self.local_ranks[self._checked(rank)]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks that run on ``node``, ascending."""
        return self._ranks[node]

    @cached_property
    def local_ranks(self) -> tuple[int, ...]:
        """Of every rank, how many before it run on its node."""
        found = [0] * len(self.hosts)
        for ranks in self._ranks:
            for local, rank in enumerate(ranks):
                found[rank] = local
        return tuple(found)

    # ---- levels ----------------------------------------------------------------------------------------------------

    def level(self, name: str) -> Level:
        """The level of this name, which must be there: ``names`` tells."""
        return self.levels[self.names.index(name)]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the levels, from the nearest to the farthest."""
        return tuple(level.name for level in self.levels)

    def distance(self, a: int, b: int) -> int:
        """How many levels apart two ranks are: 0 for one and the same, 1 in one of the nearest domains, and so on."""
        if self._checked(a) == self._checked(b):
            return 0
        return 1 + next(at for at, level in enumerate(self.levels) if level.domains[a] == level.domains[b])

    def bandwidth(self, ranks: Collection[int]) -> float | None:
        """Bytes per second over the slowest link between any of these ranks; None where it is not known.

        Infinite for a rank alone, which has nobody to send to.
        """
        places = [{self._checked(rank) for rank in ranks}]
        places += [{level.domains[rank] for rank in ranks} for level in self.levels]
        joins = [len(nearer) > len(here) for nearer, here in zip(places, places[1:], strict=False)]
        rates = [level.bytes_per_second for level, used in zip(self.levels, joins, strict=True) if used]
        return None if None in rates else min(rates, default=math.inf)

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Bytes per second of each level by which orders of ranks are weighed.

        As far as they are known, but of a farther level at most half of the one before, and a quarter where it is not
        known; where none is, of no unit.
        """
        known = [(at, level.bytes_per_second) for at, level in enumerate(self.levels) if level.bytes_per_second]
        at, rate = known[0] if known else (0, 1.0)
        found = [rate * SLOWER**at]
        for level in self.levels[1:]:
            found.append(min(level.bytes_per_second or found[-1] / SLOWER, found[-1] / DEARER))
        return tuple(found)

    # ---- telling ---------------------------------------------------------------------------------------------------

    def describe(self) -> str:
        """One line for a log: ``2 nodes x 4 ranks``, or ``8 ranks on 3 nodes (4, 3, 1)`` where they differ."""
        above = [level for level in self.levels[self.names.index(NODE) + 1 :] if level.count > 1]
        beyond = "".join(f", {_count(level.count, level.name)}" for level in above)
        counts = [len(ranks) for ranks in self._ranks]
        if len(set(counts)) == 1:
            return f"{_count(len(counts), 'node')} x {_count(counts[0], 'rank')}{beyond}"
        each = ", ".join(map(str, counts)) if len(counts) <= NODES_LISTED else f"{min(counts)} to {max(counts)} each"
        return f"{_count(len(self.hosts), 'rank')} on {_count(len(counts), 'node')} ({each}){beyond}"

    def to_json(self) -> dict[str, Any]:
        """The topology as dicts and lists, short where ranks are spread in any regular way."""
        levels = [
            {"name": level.name, "bytes_per_second": level.bytes_per_second, "domains": pack(level.domains)}
            for level in self.levels
        ]
        return {"nodes": list(self.nodes), "levels": levels}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Topology:
        """The topology that ``to_json`` gave."""
        levels = tuple(
            Level(one["name"], tuple(unpack(one["domains"])), one["bytes_per_second"]) for one in value["levels"]
        )
        node = next(level for level in levels if level.name == NODE)
        return cls(tuple(value["nodes"][number] for number in node.domains), levels)

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        ranks: list[list[int]] = [[] for _ in self.nodes]
        for rank, node in enumerate(self.level(NODE).domains):
            ranks[node].append(rank)
        return tuple(map(tuple, ranks))

    def _checked(self, rank: int) -> int:
        if not 0 <= rank < len(self.hosts):
            raise PlanError(f"rank {rank} is not in the topology", f"its ranks are 0 to {len(self.hosts) - 1}")
        return rank


def nested(levels: Iterable[Level]) -> Iterator[Level]:
    """Those of the levels, from the nearest to the farthest, that each lie within the next: one that does not is left.

    So facts of several sources go together: of two that contradict each other the nearer one stays.
    """
    last: Level | None = None
    for level in levels:
        if last is None or last.within(level):
            yield level
            last = level


def _complete(hosts: tuple[str, ...], given: Iterable[Level]) -> Iterator[Level]:
    """The levels, with the node among them and all ranks at the end, numbered as ranks first meet them."""
    node = Level.of(NODE, hosts)
    found = [Level.of(level.name, level.domains, level.bytes_per_second) for level in given]
    for level in found:
        if len(level.domains) != len(hosts):
            what = f"the level {level.name} tells of {len(level.domains)} ranks, and there are {len(hosts)} hosts"
            raise PlanError(what, "each rank is in one domain of each level", "give a domain for every rank")
    if all(level.name != NODE for level in found):
        place = next((at for at, level in enumerate(found) if not level.within(node)), len(found))
        found.insert(place, node)
    if found[-1].count > 1:
        found.append(Level(MACHINE, (0,) * len(hosts)))
    last = None
    for level in found:
        _check(level, last, node)
        yield level
        last = level


def _check(level: Level, last: Level | None, node: Level) -> None:
    if level.name == NODE and level.domains != node.domains:
        raise PlanError("the level node has other domains than the hosts", "a node is a host", "leave it out")
    if last is not None and not last.within(level):
        raise PlanError(
            f"a domain of the level {last.name} lies in several of the level {level.name}",
            "levels go from the nearest to the farthest, each within the next",
            "give them in that order, and only those that are so",
        )


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("ch") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
