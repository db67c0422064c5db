"""Which nodes can train, and which are to: pure functions from figures to findings, and from those to a choice.

A node is broken where a check failed or did not answer, and slow where a figure is below a part of the median of the
others: nodes of a job are alike, so what is usual needs no table of machines.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from hpctrain.cluster.links import Pair
from hpctrain.errors import NodesError

CLOCK_SECONDS = 1.0
SMALL_ROUND = 4  # pairs of a round that are too few to tell what is usual in it


@dataclass(frozen=True)
class Limits:
    """The part of the others' figures below which a node is slow, by what is measured; 0 for never."""

    compute: float = 0.8
    links: float = 0.5
    disks: float = 0.2
    room: float = 0.5
    """Of free memory: less is taken by something that an earlier job has left behind."""


@dataclass(frozen=True)
class Answer:
    """What came from one node: the figures of each check that ended, and errors of those that failed."""

    node: str
    found: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    errors: Mapping[str, str] = field(default_factory=dict)
    clock_ahead_seconds: float = 0.0


@dataclass(frozen=True)
class Finding:
    """Something about a node; ``says`` goes on after its name. ``share`` is the part of the others' figure."""

    node: str
    says: str
    broken: bool = False
    share: float = 0.0

    def __str__(self) -> str:
        return f"{self.node} {self.says}"


@dataclass(frozen=True)
class Figure:
    """A figure that is compared between nodes: where it stands, how it is told, and which limit it has."""

    check: str
    name: str
    says: str
    limit: str
    title: str
    unit: float


@dataclass(frozen=True)
class Choice:
    """The nodes that are to train, in the order of the job's, and what is said of it."""

    nodes: tuple[str, ...]
    sentences: tuple[str, ...]


FIGURES = (
    Figure("products", "flops", "multiplies matrices at {} of the others' speed", "compute", "TFLOP/s", 1e12),
    Figure("memory", "bytes_per_second", "copies memory at {} of the others' speed", "links", "memory GB/s", 1e9),
    Figure("memory", "free_bytes", "has {} of the free memory that the others have", "room", "free GB", 1e9),
    Figure("devices", "bytes_per_second", "copies to a device at {} of the others' speed", "links", "device GB/s", 1e9),
    Figure("devices", "free_bytes", "has a device with {} of the others' free memory", "room", "on device GB", 1e9),
    Figure("shared", "write_bytes_per_second", "writes to the run's folder at {} of the others' speed", "disks",
           "folder MB/s", 1e6),
    Figure("near", "write_bytes_per_second", "writes to checkpoint.near at {} of the others' speed", "disks",
           "near MB/s", 1e6),
)  # fmt: skip

# Check -> what a node was doing in it.
DOING = {
    "versions": "importing torch",
    "devices": "looking for its devices",
    "memory": "copying memory",
    "products": "multiplying matrices",
    "near": "writing to checkpoint.near",
    "shared": "writing to the run's folder",
    "mpi": "meeting the others through MPI",
}


def findings(answers: Sequence[Answer], pairs: Sequence[Pair], limits: Limits) -> list[Finding]:
    """All that is wrong with nodes: what is broken first, then what is slow, in the nodes' order."""
    broken = [*failed(answers), *others_differ(answers)]
    whole = [answer for answer in answers if answer.node not in {found.node for found in broken}]
    slow = [found for figure in FIGURES for found in below(figure, whole, getattr(limits, figure.limit))]
    return [*broken, *slow, *clocks(whole), *blamed(pairs, limits.links)[0]]


def failed(answers: Sequence[Answer]) -> list[Finding]:
    """Nodes whose checks failed."""
    return [
        Finding(answer.node, f"failed while {DOING[check]}: {error}" if check in DOING else error, broken=True)
        for answer in answers
        for check, error in answer.errors.items()
    ]


def others_differ(answers: Sequence[Answer]) -> list[Finding]:
    """Nodes that have other versions, or fewer devices, than most."""
    found = []
    for name in ("python", "torch", "hpctrain", "mpi4py"):
        usual = _usual([answer.found.get("versions", {}).get(name) for answer in answers])
        for answer in answers:
            value = answer.found.get("versions", {}).get(name)
            if value not in (None, usual):
                found.append(Finding(answer.node, f"has {name} {value}, and most others have {usual}", broken=True))
    return found + _devices(answers)


def _devices(answers: Sequence[Answer]) -> list[Finding]:
    seen = {answer.node: answer.found["devices"] for answer in answers if "devices" in answer.found}
    usual = _usual([(value["kind"], value["count"]) for value in seen.values()])
    return [
        Finding(node, f"sees {_count(value)}, and most others see {_count(dict(kind=usual[0], count=usual[1]))}", True)
        for node, value in seen.items()
        if value["kind"] != usual[0] or value["count"] < usual[1]
    ]


def below(figure: Figure, answers: Sequence[Answer], limit: float) -> list[Finding]:
    """Nodes whose figure is less than a part of the median of the others'; of several devices the worst counts."""
    values = {answer.node: value for answer in answers if (value := value_of(figure, answer)) is not None}
    found = []
    for node, usual in medians_of_others(values).items():
        share = values[node] / usual if usual else 1.0
        if share < limit:
            found.append(Finding(node, figure.says.format(f"{share:.0%}"), share=share))
    return found


def value_of(figure: Figure, answer: Answer) -> float | None:
    """A node's value of a figure, the least of its devices'; None where it has none."""
    value = answer.found.get(figure.check, {}).get(figure.name)
    return min(value) if isinstance(value, list) else value


def medians_of_others(values: Mapping[str, float]) -> dict[str, float]:
    """For each name, the median of the values of all other names; nothing where there is only one."""
    if len(values) < 2:
        return {}
    ordered, count = sorted(values.values()), len(values) - 1

    def without(at: int, place: int) -> float:
        return ordered[place + (place >= at)]

    places = {name: bisect_left(ordered, value) for name, value in values.items()}
    return {name: (without(at, (count - 1) // 2) + without(at, count // 2)) / 2 for name, at in places.items()}


def clocks(answers: Sequence[Answer]) -> list[Finding]:
    """Nodes whose clock differs from the usual by more than logs bear."""
    usual = median(answer.clock_ahead_seconds for answer in answers) if answers else 0.0
    apart = {answer.node: answer.clock_ahead_seconds - usual for answer in answers}
    return [
        Finding(node, f"has a clock that is {seconds:+.1f} s from the others'", share=1.0)
        for node, seconds in apart.items()
        if abs(seconds) > CLOCK_SECONDS
    ]


def blamed(pairs: Sequence[Pair], limit: float) -> tuple[list[Finding], list[str]]:
    """Nodes that are slow with most of those they met, and sentences on the slow pairs that no such node explains.

    The node with the largest part of slow pairs is taken out with all its pairs, as long as that part is more than a
    half: so a node is not blamed for the slow one that it met.
    """
    met: dict[str, dict[Pair, float]] = {}
    for pair, share in _shares(pairs).items():
        for node in (pair.one, pair.other):
            met.setdefault(node, {})[pair] = share
    parts = {node: _slow_part(own, limit) for node, own in met.items()}
    found = []
    while (worst := _worst(parts, met)) and parts[worst] > 0.5:
        found.append(_guilty(worst, met[worst]))
        for pair in tuple(met[worst]):
            for node in (pair.one, pair.other):
                del met[node][pair]
                parts[node] = _slow_part(met[node], limit)
    best: dict[frozenset[str], float] = {}  # of two that met twice
    for pair, share in ((pair, share) for own in met.values() for pair, share in own.items()):
        both = frozenset((pair.one, pair.other))
        best[both] = max(share, best.get(both, 0.0))
    slow = [(" and ".join(sorted(both)), share) for both, share in best.items() if share < limit]
    return found, [f"{names} exchange at {share:.0%} of the usual speed" for names, share in slow]


def _slow_part(own: Mapping[Pair, float], limit: float) -> float:
    return sum(share < limit for share in own.values()) / len(own) if own else 0.0


def _worst(parts: Mapping[str, float], met: Mapping[str, Mapping[Pair, float]]) -> str | None:
    """The node with the largest part of slow pairs; of equal ones the slowest, or the last."""
    most = max(parts.values(), default=0.0)
    equal = [node for node, part in parts.items() if part == most and met[node]]
    return min(reversed(equal), key=lambda node: median(met[node].values()), default=None)


def _guilty(node: str, own: Mapping[Pair, float]) -> Finding:
    """What is said of a node that is slow with those it met, or hung with one."""
    hung = next((pair for pair in own if not pair.bytes_per_second), None)
    if hung:
        other = hung.other if hung.one == node else hung.one
        return Finding(node, f"exchanged nothing with {other}", broken=True)
    share = median(own.values())
    says = f"exchanges with other nodes at {share:.0%} of the usual speed ({number(len(own), 'pair')})"
    return Finding(node, says, share=share)


def _shares(pairs: Sequence[Pair]) -> dict[Pair, float]:
    """Each pair's part of what is usual in its round: what one in eight exceeds, as one slow node slows several.

    Where rounds are small, it is that of all rounds.
    """
    rates: dict[int, list[float]] = {}
    for pair in pairs:
        rates.setdefault(pair.round, []).append(pair.bytes_per_second)
    every = [pair.bytes_per_second for pair in pairs]
    usual = {number: _upper(found if len(found) >= SMALL_ROUND else every) for number, found in rates.items()}
    return {pair: pair.bytes_per_second / usual[pair.round] if usual[pair.round] else 0.0 for pair in pairs}


def _upper(rates: Sequence[float]) -> float:
    return sorted(rates, reverse=True)[len(rates) // 8]


def choose(names: Sequence[str], found: Sequence[Finding], wanted: int) -> Choice:
    """The ``wanted`` nodes that are to train: good ones in the job's order, then slow ones, the least slow first.

    Raises NodesError where too few can train at all.
    """
    broken = {one.node for one in found if one.broken}
    share = {node: min(one.share for one in found if one.node == node) for node in {one.node for one in found}}
    usable = [name for name in names if name not in broken]
    if len(usable) < wanted:
        raise too_few(names, found, wanted)
    best = sorted(usable, key=lambda name: (name in share, -share.get(name, 0.0)))[:wanted]
    chosen = tuple(name for name in names if name in set(best))
    return Choice(chosen, tuple(sentences(names, found, chosen)))


def too_few(names: Sequence[str], found: Sequence[Finding], wanted: int) -> NodesError:
    """The error that names the broken nodes and says how to get on without them."""
    broken = list(dict.fromkeys(one.node for one in found if one.broken))
    what = f"{len(names) - len(broken)} of {len(names)} nodes can train, and {wanted} are wanted"
    if not broken:
        return NodesError(what, "the job has no more nodes", "ask for more nodes, or set job.nodes lower")
    why = "\n  ".join(str(one) for one in found if one.broken)
    if len(broken) == len(names):
        return NodesError(
            what, why, "what fails on every node is hardly their fault: mend it, or set job.check to false"
        )
    mend = f"hand the job in again with --exclude={','.join(broken)}, or with job.spares = {len(broken)} or more"
    return NodesError(what, why, mend)


def sentences(names: Sequence[str], found: Sequence[Finding], chosen: Collection[str]) -> list[str]:
    """What is said of each finding: whether its node trains all the same, and which spare takes its place."""
    first = names[: len(chosen)]
    absent = [name for name in first if name not in chosen]
    place = dict(zip(absent, (name for name in chosen if name not in first), strict=True))
    said = []
    for node in dict.fromkeys(one.node for one in found):
        what = "; it ".join(one.says for one in found if one.node == node)
        if node in chosen:
            said.append(f"{node} {what}: kept, as no better node is spare")
        elif node in place:
            said.append(f"{node} {what}: left out; {place[node]}, a spare, takes its place")
        else:
            said.append(f"{node}, a spare, {what}: left out")
    return said


def table(
    answers: Sequence[Answer], pairs: Sequence[Pair], found: Sequence[Finding], words: Mapping[str, str], most: int = 32
) -> str:
    """A line a node with its figures and its word, and the median; of many nodes only those with a finding."""
    figures = [f for f in FIGURES if any(value_of(f, answer) is not None for answer in answers)]
    bad = {one.node for one in found}
    shown = [answer for answer in answers if len(answers) <= most or answer.node in bad]
    rows = [
        ["node", *(f.title for f in figures), "link GB/s", ""],
        *([a.node, *(_cell(f, [a]) for f in figures), _link(pairs, a.node), words.get(a.node, "")] for a in shown),
        ["median", *(_cell(f, answers) for f in figures), _link(pairs, None), number(len(answers), "node")],
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _cell(figure: Figure, answers: Sequence[Answer]) -> str:
    values = [value for answer in answers if (value := value_of(figure, answer)) is not None]
    return f"{median(values) / figure.unit:.3g}" if values else "-"


def _link(pairs: Sequence[Pair], node: str | None) -> str:
    rates = [pair.bytes_per_second for pair in pairs if node in (None, pair.one, pair.other)]
    return f"{median(rates) / 1e9:.3g}" if rates else "-"


def _usual(values: Sequence[Any]) -> Any:
    """The most frequent value, the first of equally frequent ones; None of none."""
    counted = Counter(value for value in values if value is not None).most_common(1)
    return counted[0][0] if counted else None


def _count(devices: Mapping[str, Any]) -> str:
    return f"{number(devices['count'], 'device')} ({devices['kind']})"


def number(count: int, noun: str) -> str:
    """Such as ``1 node`` or ``3 nodes``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
