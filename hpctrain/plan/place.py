"""Place: in which order ranks are laid along the axes of a mesh, so that what is sent most goes the shortest way.

Ranks are put together from the inside out. The ranks of a group along the axis with the most traffic come from one
domain of the nearest level that has as many left; what is left over of a level is put together a level up, so nodes
need not have as many ranks as divide. The groups of that axis are then put together along the next one, and so on, for
a few sequences of the axes. Each order is weighed, and the one in which ranks were numbered is among them and wins
where no other is better.

A byte costs the time that it takes of its link, and more on a farther one in any case (``topology.rates``). An order
is weighed by what all bytes of a step cost together; orders that are as good in that are told apart by the bytes over
the farthest links, then over the next. All of it is sums of whole numbers and a few divisions: every rank finds the
same order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from hpctrain.plan.mesh import Mesh
from hpctrain.plan.topology import NODE, Level, Topology
from hpctrain.plan.traffic import Flow


@dataclass(frozen=True)
class Load:
    """What a step sends over the links of each level, from the nearest to the farthest."""

    levels: tuple[str, ...]
    bytes: tuple[int, ...]
    """Of all ranks, over the links between domains of the level before, or between ranks in the nearest one."""
    cost: float
    """Seconds of one rank's links that the bytes take by the topology's ``rates``, added up."""
    seconds: float | None
    """Of all flows one after another, each as slow as the domain with most to send over links that its ranks share;
    None where a link that is used is of unknown speed."""

    @property
    def score(self) -> tuple[float, ...]:
        """What is less for the better order."""
        return (float(f"{self.cost:.9g}"), *reversed(self.bytes))  # equal, whatever the last bits of sums are

    def to_json(self) -> dict[str, Any]:
        """Bytes by level, and the seconds where they are known."""
        told = dict(zip(self.levels, self.bytes, strict=True))
        return {"bytes": told, "seconds": self.seconds}

    def beyond(self, level: str) -> int:
        """Bytes that leave a domain of this level."""
        return sum(self.bytes[self.levels.index(level) + 1 :])


@dataclass(frozen=True)
class Placement:
    """An order of ranks, beside the one in which they were numbered."""

    mesh: Mesh
    """Its ``order`` is the one chosen."""
    flows: tuple[Flow, ...]
    """What travels along its axes in a step."""
    load: Load
    given: Load
    """Of the order 0, 1, 2 ..."""
    reason: str
    """In a sentence; empty where all ranks are alike."""


@lru_cache(maxsize=8)
def place(topology: Topology, mesh: Mesh, flows: tuple[Flow, ...]) -> Mesh:
    """The mesh in the best order that was found; in its own where no other is better."""
    if len(_parted(topology)) == 0 or not flows:
        return mesh
    best, least = mesh, weigh(topology, mesh, flows).score
    for order in _orders(topology, mesh, flows):
        found = replace(mesh, order=order)
        score = weigh(topology, found, flows).score
        if score < least:
            best, least = found, score
    return best


def compare(topology: Topology, mesh: Mesh, flows: Sequence[Flow]) -> Placement:
    """What the order of a mesh is worth."""
    load = given = weigh(topology, mesh, flows)
    if mesh.order is not None:
        given = weigh(topology, Mesh(mesh.axes), flows)
    return Placement(mesh, tuple(flows), load, given, _reason(topology, mesh, flows, load, given))


# ---- what an order costs ---------------------------------------------------------------------------------------------


def weigh(topology: Topology, mesh: Mesh, flows: Sequence[Flow]) -> Load:
    """What a step sends over the links of each level."""
    sizes = [level.count for level in topology.levels]
    ranks = [np.bincount(level.array, minlength=level.count) for level in topology.levels]
    speeds = [level.bytes_per_second or math.nan for level in topology.levels]
    seconds, total = 0.0, np.zeros(len(sizes) + 1, np.int64)
    for flow in flows:
        sent, out = _sent(topology, groups(mesh, flow), flow)
        needed = [sent.max() / speeds[0]]
        for at, level in enumerate(topology.levels[:-1]):
            leaving = float((np.bincount(level.array, out[at], sizes[at]) / ranks[at]).max())
            needed.append(leaving / speeds[at + 1] if leaving else 0.0)
        seconds += max(needed, key=lambda one: (math.isnan(one), one))
        total += [sent.sum(), *(out[at].sum() for at in range(len(sizes)))]
    each = tuple(int(nearer - farther) for nearer, farther in zip(total, total[1:], strict=False))
    cost = sum(size / rate for size, rate in zip(each, topology.rates, strict=True))
    return Load(topology.names, each, cost, None if math.isnan(seconds) else float(seconds))


def groups(mesh: Mesh, flow: Flow) -> np.ndarray:
    """The groups of a flow, a row each."""
    names, sizes = [name for name, _ in mesh.axes], [size for _, size in mesh.axes]
    order = np.arange(mesh.ranks_total) if mesh.order is None else np.array(mesh.order)
    along = [names.index(axis) for axis in flow.axes if axis in names]
    others = [at for at in range(len(names)) if at not in along]
    return order.reshape(sizes).transpose([*others, *along]).reshape(-1, mesh.size(*flow.axes))


def _sent(topology: Topology, groups_GN: np.ndarray, flow: Flow) -> tuple[np.ndarray, np.ndarray]:
    """Bytes that each rank sends, and for each level those that leave its domain there."""
    ranks = len(topology.hosts)
    sent, out = np.zeros(ranks, np.int64), np.zeros((len(topology.levels), ranks), np.int64)
    PATTERNS[flow.pattern](topology.levels, groups_GN, flow, sent, out)
    return sent, out


def _ring(levels: Sequence[Level], groups_GN: np.ndarray, flow: Flow, sent: np.ndarray, out: np.ndarray) -> None:
    _link(levels, groups_GN, np.roll(groups_GN, -1, 1), flow.bytes, sent, out)


def _links(levels: Sequence[Level], groups_GN: np.ndarray, flow: Flow, sent: np.ndarray, out: np.ndarray) -> None:
    for source, to, size in flow.links:
        _link(levels, groups_GN[:, source], groups_GN[:, to], size, sent, out)


def _all(levels: Sequence[Level], groups_GN: np.ndarray, flow: Flow, sent: np.ndarray, out: np.ndarray) -> None:
    """To those of the group that are elsewhere, as many as it has less those in the same domain."""
    count, members = groups_GN.shape
    sent[groups_GN] += flow.bytes
    for at, level in enumerate(levels):
        keys = np.arange(count)[:, None] * level.count + level.array[groups_GN]
        _, place, here = np.unique(keys, return_inverse=True, return_counts=True)
        elsewhere = members - here[place].reshape(groups_GN.shape)
        out[at, groups_GN] += elsewhere * flow.bytes // (members - 1)


def _link(
    levels: Sequence[Level], sources: np.ndarray, to: np.ndarray, size: int, sent: np.ndarray, out: np.ndarray
) -> None:
    """Each of ``sources``, all of them different, sends to its own of ``to``."""
    sent[sources] += size
    for at, level in enumerate(levels[:-1]):
        out[at, sources] += size * (level.array[sources] != level.array[to])


PATTERNS = {"ring": _ring, "links": _links, "all": _all}


# ---- orders that may be better ---------------------------------------------------------------------------------------


def _orders(topology: Topology, mesh: Mesh, flows: Sequence[Flow]) -> Iterator[tuple[int, ...]]:
    """Orders by other sequences of the axes, none of them twice."""
    seen: set[bytes] = set()
    for nest in _nests(mesh, flows):
        order = _nested(topology, mesh, nest)
        if order.tobytes() not in seen:
            seen.add(order.tobytes())
            yield tuple(order.tolist())


def _nests(mesh: Mesh, flows: Sequence[Flow]) -> Iterator[tuple[str, ...]]:
    """Sequences of the axes, innermost first: by their traffic, the same with two neighbours changed about, and that
    of the mesh."""
    names = [name for name, size in reversed(mesh.axes) if size > 1]
    sent = {name: sum(flow.bytes for flow in flows if name in flow.axes) for name in names}
    busiest = sorted(names, key=lambda name: -sent[name])
    yield tuple(busiest)
    for at in range(len(busiest) - 1):
        yield (*busiest[:at], busiest[at + 1], busiest[at], *busiest[at + 2 :])
    yield tuple(names)


def _nested(topology: Topology, mesh: Mesh, nest: Sequence[str]) -> np.ndarray:
    """The order of ranks in which groups are put together along the axes of ``nest``, the first one first."""
    levels = [level.array for level in topology.levels]
    items = np.lexsort([np.arange(len(topology.hosts)), *levels])[:, None]  # the last key, the farthest, counts most
    nearest = np.zeros(len(items), np.int64)
    for axis in nest:
        items, nearest = _together(items, nearest, mesh.size(axis), levels)
    shape = [mesh.size(axis) for axis in reversed(nest)]
    names = [name for name, size in mesh.axes if size > 1]
    return items.reshape(shape).transpose([tuple(reversed(nest)).index(name) for name in names]).ravel()


def _together(
    items: np.ndarray, nearest: np.ndarray, size: int, levels: Sequence[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Rows of ranks put together by ``size``; ``nearest`` is the first level at which a row is in one domain."""
    left, free, made, places = np.arange(len(items)), np.ones(len(items), bool), [], []
    for at, domains in enumerate(levels):
        here = left[nearest[left] <= at]
        around = domains[items[here, 0]]
        here = here[np.argsort(around, kind="stable")]
        counts = np.bincount(around)
        counts = counts[counts > 0]
        place = np.arange(len(here)) - np.repeat(np.cumsum(counts) - counts, counts)
        taken = here[place < np.repeat(counts // size * size, counts)].reshape(-1, size)
        made.append(taken)
        places.append(np.full(len(taken), at))
        free[taken] = False
        left = left[free[left]]
    groups, found = np.concatenate(made), np.concatenate(places)
    first = np.argsort(groups[:, 0], kind="stable")
    return items[groups[first]].reshape(len(groups), -1), found[first]


# ---- why -------------------------------------------------------------------------------------------------------------


def _parted(topology: Topology) -> list[Level]:
    """The levels that have several domains."""
    return [level for level in topology.levels if level.count > 1]


def _reason(topology: Topology, mesh: Mesh, flows: Sequence[Flow], load: Load, given: Load) -> str:
    """What the order does for the heaviest flow, and what crosses nodes."""
    parted = [level.name for level in _parted(topology)]
    if not parted or not flows:
        return ""
    border = NODE if NODE in parted else parted[-1]
    now, before = (told(one.beyond(border)) for one in (load, given))
    instead = f" instead of {before}" if mesh.order is not None else ""
    where = " in the order given" if mesh.order is not None else ", in the order given"
    return f"{_whereabouts(topology, mesh, flows)}; {now} a step cross {border}s{instead}{where}"


def _whereabouts(topology: Topology, mesh: Mesh, flows: Sequence[Flow]) -> str:
    """Where the groups of the flow with most bytes are."""
    flow = max(flows, key=lambda one: one.bytes)
    axes = " and ".join(axis for axis in flow.axes if mesh.size(axis) > 1)
    together, all_of_them, nearest = spread(topology, mesh, flow)
    if together == all_of_them:
        return f"ranks along {axes} are on one {nearest}"
    if together:
        return f"{together:,} of {all_of_them:,} groups along {axes} are on one node each"
    return f"ranks along {axes} are on several nodes"


def spread(topology: Topology, mesh: Mesh, flow: Flow) -> tuple[int, int, str]:
    """How many of a flow's groups are each on one node, of how many, and the nearest level that has every one whole."""
    found = groups(mesh, flow)
    whole = {level.name: (level.array[found] == level.array[found[:, :1]]).all(1) for level in topology.levels}
    nearest = next(name for name, here in whole.items() if here.all())
    return int(whole[NODE].sum()), len(found), nearest


def told(size: float) -> str:
    """Bytes for a person."""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:,.1f} {unit}" if unit != "bytes" else f"{size:.0f} {unit}"
        size /= 1024
    raise AssertionError
