"""Switches: what is between the nodes of a job, as far as the batch system or the hosts' names tell it.

Under Slurm each task has the switches above its node in ``SLURM_TOPOLOGY_ADDR``, where the cluster has a tree of them.
Where it has blocks of nodes instead, or says nothing, one rank asks ``scontrol show topology``. On HPE Cray EX a node's
name, its xname, begins with its cabinet. Nothing of this has to be there: what is not known is left out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.cluster.slurm import expand_nodes_alone
from hpctrain.errors import LaunchError
from hpctrain.plan.topology import NODE, Level, nested

if TYPE_CHECKING:
    from hpctrain.cluster.world import Card

Places = tuple[tuple[str, str], ...]
"""The domains that a node is in, from the nearest to the farthest: of each its kind and its name."""

XNAME = Path("/etc/cray/xname")
CABINET = re.compile(r"(x\d+)c\d+s\d+b\d+(n\d+)?")
FIELD = re.compile(r"(\w+)=(\S+)")
ASK_SECONDS = 10


def address(environ: Mapping[str, str], host: str) -> Places:
    """The switches above this node, by Slurm's variables; () where they tell of another node, or of none.

    Some launchers hand the variables of the first node to the ranks of all nodes.
    """
    told, pattern = environ.get("SLURM_TOPOLOGY_ADDR", ""), environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    depth = pattern.count(".")
    parts = told.split(".", depth)
    if len(parts) != depth + 1 or parts[-1].partition(".")[0] != host.partition(".")[0]:
        return ()
    return tuple((_tier(at), name) for at, name in enumerate(reversed(parts[:-1])))


def cabinet(host: str, file: Path = XNAME) -> str | None:
    """The cabinet of this node, by its xname, such as ``x1002`` of ``x1002c3s1b0n0``."""
    try:
        name = file.read_text().strip()
    except OSError:
        name = host
    found = CABINET.fullmatch(name.partition(".")[0])
    return found and found[1]


def ask(nodes: Sequence[str]) -> dict[str, Places]:
    """What ``scontrol`` knows of these nodes; nothing where it is not there, or does not answer."""
    if not shutil.which("scontrol"):
        return {}
    try:
        done = subprocess.run(["scontrol", "show", "topology"], capture_output=True, text=True, timeout=ASK_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return parse(done.stdout, nodes) if done.returncode == 0 else {}


def parse(text: str, nodes: Sequence[str]) -> dict[str, Places]:
    """The domains of each of ``nodes`` in the output of ``scontrol show topology``, of trees and of blocks.

    Nodes of which not all kinds of domains are told are left out.
    """
    kinds: dict[Kind, dict[str, str]] = {}
    for line in text.splitlines():
        fields = dict(FIELD.findall(line))
        kind = next((make(fields) for key, make in KINDS.items() if key in fields), None)
        for node in _expand(fields.get("Nodes", "")) if kind else ():
            kinds.setdefault(kind, {}).setdefault(node, next(iter(fields.values())))
    found = {node: [(name, kinds[size, name].get(node)) for size, name in sorted(kinds)] for node in nodes}
    return {node: tuple(places) for node, places in found.items() if places and all(place for _, place in places)}


Kind = tuple[int, str]
"""How far out its domains are, and what they are called."""
KINDS: dict[str, Callable[[Mapping[str, str]], Kind]] = {
    "SwitchName": lambda fields: (level := int(fields.get("Level", "0")), _tier(level)),
    "BlockName": lambda fields: (0, "block"),
    "AggregatedBlock": lambda fields: (size := int(fields.get("BlockSize", "1")), f"block of {size}"),
}


def asked(cards: Sequence[Card], environ: Mapping[str, str]) -> dict[str, Places]:
    """What ``ask`` finds, where the job has several nodes and Slurm did not tell every rank its own switches."""
    hosts = list(dict.fromkeys(card.host for card in cards))
    known = len(hosts) == 1 or all(card.switches for card in cards)
    return {} if known or "SLURM_JOB_ID" not in environ else ask(hosts)


def around(hosts: Sequence[str], cards: Sequence[Card], above: Mapping[str, Places]) -> Iterator[Level]:
    """The levels that are known on all ranks, from the nearest to the farthest.

    ``hosts`` are their nodes' names, each of which is one node; ``above`` is what was asked.
    """
    node = Level.of(NODE, hosts)
    numa = Level.of("numa", zip(hosts, (card.numa for card in cards), strict=True))
    if numa.count > node.count and all(card.numa is not None for card in cards):
        yield numa
    yield node
    places = [card.switches or above.get(card.host, ()) for card in cards]
    yield from (level for level in levels(places, [card.cabinet for card in cards]) if node.within(level))


def levels(places: Sequence[Places], cabinets: Sequence[str | None]) -> Iterator[Level]:
    """The levels beyond the node, where every rank knows its own; ``places`` and ``cabinets`` are given for each."""
    kinds = {tuple(kind for kind, _ in one) for one in places}
    if len(kinds) == 1 and (names := kinds.pop()):
        # With those above it, since two switches of one name may be under different ones.
        yield from nested(Level.of(name, [one[at:] for one in places]) for at, name in enumerate(names))
    elif None not in cabinets:
        yield Level.of("cabinet", cabinets)


def _tier(level: int) -> str:
    return "switch" if level == 0 else f"tier {level + 1}"


def _expand(nodes: str) -> tuple[str, ...]:
    try:
        return expand_nodes_alone(nodes) if nodes else ()
    except LaunchError:
        return ()  # such as ``(null)``
