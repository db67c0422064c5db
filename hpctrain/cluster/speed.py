"""The figures of the check before a start, measured by the ranks of a job for its doctor."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpctrain.cluster import judge
from hpctrain.cluster.checks import Asked, examine
from hpctrain.cluster.judge import Answer, Finding, Limits
from hpctrain.cluster.links import Pair, clock_offsets, measure
from hpctrain.cluster.world import World


@dataclass(frozen=True)
class Speeds:
    """What each node and each pair of nodes reached, and what is wrong with them."""

    answers: tuple[Answer, ...]
    pairs: tuple[Pair, ...]

    @property
    def findings(self) -> list[Finding]:
        """What is broken and slow, by the limits of a run that says nothing of them."""
        return judge.findings(self.answers, self.pairs, Limits())

    def show(self) -> str:
        """A table, then a line for each finding."""
        found = self.findings
        words = {one.node: "broken" if one.broken else "slow" for one in reversed(found)}
        slow_pairs = judge.blamed(self.pairs, Limits().links)[1]
        return "\n".join([judge.table(self.answers, self.pairs, found, words), *map(str, found), *slow_pairs])

    def to_json(self) -> dict[str, Any]:
        """The figures as plain lists and dicts."""
        return {
            "figures": {answer.node: answer.found for answer in self.answers},
            "links": [[p.round, p.one, p.other, p.bytes_per_second] for p in self.pairs],
            "findings": [str(one) for one in self.findings],
        }


def measured(world: World, folder: Path) -> Speeds:
    """Have the first rank of each node examine it, for a run that writes to ``folder``, then the links. Collective.

    A rank that is bound to some cores, or sees some devices, measures those.
    """
    there = world.share(next(place for place in (folder.resolve(), *folder.resolve().parents) if place.exists()))
    asked = Asked(str(there), None, "float32", 0.0)
    found = world.collect(dict(examine(asked)) if world.local_rank == 0 else None)
    clocks = clock_offsets(world)
    pairs = tuple(measure(world))
    nodes = enumerate(world.topology.nodes)
    return Speeds(tuple(_answer(name, found[world.topology.ranks_of(n)[0]], clocks[n]) for n, name in nodes), pairs)


def _answer(node: str, found: dict[str, dict[str, Any]], ahead: float) -> Answer:
    errors = {check: value["error"] for check, value in found.items() if "error" in value}
    return Answer(node, {check: value for check, value in found.items() if check not in errors}, errors, ahead)
