"""Topology: which ranks run on which node.

A node is a number, in the order in which the ranks first meet it; its host name is ``nodes[node]``. Ranks may be spread
over nodes in any way: in blocks, cyclic, or unevenly.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from hpctrain.errors import PlanError

# A line of a log has room for the ranks of so many nodes; more are told as a range.
NODES_LISTED = 8


@dataclass(frozen=True)
class Topology:
    """The host of every rank, in rank order."""

    hosts: tuple[str, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "hosts", tuple(self.hosts))
        if not self.hosts:
            raise PlanError("the topology has no ranks", "a job has at least one", "give the host of every rank")

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """The host name of each node."""
        return tuple(dict.fromkeys(self.hosts))

    def node_of(self, rank: int) -> int:
        """The node that ``rank`` runs on."""
        return self._places[self._checked(rank)][0]

    def local_rank(self, rank: int) -> int:
        """How many ranks before ``rank`` run on its node."""
        return self._places[self._checked(rank)][1]

    def ranks_of(self, node: int) -> tuple[int, ...]:
        """The ranks that run on ``node``, ascending."""
        return self._ranks[node]

    def describe(self) -> str:
        """One line for a log: ``2 nodes x 4 ranks``, or ``8 ranks on 3 nodes (4, 3, 1)`` where they differ."""
        counts = [len(ranks) for ranks in self._ranks]
        if len(set(counts)) == 1:
            return f"{_count(len(counts), 'node')} x {_count(counts[0], 'rank')}"
        each = ", ".join(map(str, counts)) if len(counts) <= NODES_LISTED else f"{min(counts)} to {max(counts)} each"
        return f"{_count(len(self.hosts), 'rank')} on {_count(len(counts), 'node')} ({each})"

    def to_json(self) -> list[str]:
        """The hosts as a list."""
        return list(self.hosts)

    @classmethod
    def from_json(cls, value: list[str]) -> Topology:
        """The topology that ``to_json`` gave."""
        return cls(tuple(value))

    @cached_property
    def _ranks(self) -> tuple[tuple[int, ...], ...]:
        ranks: dict[str, list[int]] = {host: [] for host in self.nodes}
        for rank, host in enumerate(self.hosts):
            ranks[host].append(rank)
        return tuple(map(tuple, ranks.values()))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {rank: (node, local) for node, ranks in enumerate(self._ranks) for local, rank in enumerate(ranks)}

    def _checked(self, rank: int) -> int:
        if rank not in range(len(self.hosts)):
            raise PlanError(f"rank {rank} is not in the topology", f"its ranks are 0 to {len(self.hosts) - 1}")
        return rank


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
