"""Exchange: what ranks hold of tensors whose short runs take turns in the file, to and from ranges of whole blocks.

The holders of such tensors first send each other what they have, so that each of them gets whole blocks that lie one
after another (``shares``), and writes them in long calls; at a load each reads whole blocks and sends the others their
parts. So the file is written and read once, by the same calls as for any other tensor, and no block is shared.

Ranks of one node have the ranges of a round in common memory: a run is copied once, between where it is held and its
place in the range. To and from a rank that shares no memory, runs are packed into a message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.ranges import flat_bytes
from hpctrain.checkpoint.shares import Runs, Stretch, crossing, round_bytes, sections
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.plan.layout import Box

Ranges = list[tuple[Stretch, Tensor]]
"""What a rank takes in a round, and the memory for it."""
Boxes = Callable[[Entry, int], Sequence[Box]]
"""What a rank of an entry's mesh has, or wants, of it."""


def gathered(entries: Sequence[Entry], state: State, group: Group, doing: str) -> Iterator[Ranges]:
    """What of all that alternates this rank writes, round by round; ``doing`` says what an error comes in.

    Collective, each round; every rank has as many. The memory of a round is used again in the second after it.
    """
    turns = crossing(entries, group.size)

    def writes(entry: Entry, rank: int) -> Sequence[Box]:
        return entry.layout.writes(entry.mesh, rank, turns[entry.name])

    for section in sections(entries, group.size):
        names = [entry.name for entry in section.entries if entry.rank is not None]
        held = together(group, lambda names=names: {name: _bytes(state, name) for name in names}, doing)
        for stretches in section.rounds:
            one = Round(stretches, writes, group)
            one.gather(held)
            yield one.ranges


def _bytes(state: State, name: str) -> np.ndarray:
    return flat_bytes(state[name].tensor).cpu().numpy()


class Area:
    """Memory for the ranges of two rounds, of this rank or, where they can share it, of all; live, as its group is.

    Rounds have the halves in turns: while some ranks are still at the ranges of one, others fill those of the next.
    """

    _made: WeakKeyDictionary[Group, Area] = WeakKeyDictionary()

    def __init__(self, group: Group) -> None:
        self._bytes = round_bytes(group.size)
        own = 2 * self._bytes
        common = group.common(group.size * own, torch.uint8)
        self.shared = common is not None
        parts = common.split(own) if self.shared else [torch.empty(own, dtype=torch.uint8)]
        ranks = range(group.size) if self.shared else [group.rank]
        self._half = 0
        self._parts = {rank: part.numpy() for rank, part in zip(ranks, parts, strict=True)}

    @classmethod
    def of(cls, group: Group) -> Area:
        """The group's own. Collective."""
        if group not in cls._made:
            cls._made[group] = cls(group)
        return cls._made[group]

    def turn(self) -> int:
        """The half that the next round has. All ranks ask, once a round."""
        self._half = 1 - self._half
        return self._half

    def __contains__(self, rank: int) -> bool:
        return rank in self._parts

    def range(self, stretch: Stretch, half: int) -> np.ndarray:
        """The memory for a stretch whose rank is in reach."""
        place = half * self._bytes + stretch.place
        return self._parts[stretch.rank][place : place + stretch.nbytes]


@dataclass(frozen=True)
class Side:
    """Bytes in memory: where runs of them begin, and how long those are."""

    memory: np.ndarray
    start: np.ndarray
    length: np.ndarray

    def take(self, other: Side) -> None:
        """Fill the runs from those of another memory, one for one."""
        for first, last in _even(self.length, self.start, other.start):
            self._rows(first, last)[:] = other._rows(first, last)

    def _rows(self, first: int, last: int) -> np.ndarray:
        """Runs that are equally long and equally far apart, as rows of one array."""
        begin, next_one = (int(self.start[number]) for number in (first, min(first + 1, last - 1)))
        shape, strides = (last - first, int(self.length[first])), (next_one - begin, 1)
        return np.lib.stride_tricks.as_strided(self.memory[begin:], shape, strides)


class Round:
    """One round among all ranks of ``group``; ``boxes`` says what each holder has, or wants, of a tensor.

    ``ranges`` has this rank's stretches, and memory for each.
    """

    def __init__(self, stretches: Sequence[Stretch], boxes: Boxes, group: Group) -> None:
        self._boxes, self._group, self._area = boxes, group, Area.of(group)
        self._half = self._area.turn()
        self._held = [stretch for stretch in stretches if stretch.entry.rank is not None]
        own = (stretch for stretch in stretches if stretch.rank == group.rank)
        self.ranges = [(stretch, torch.from_numpy(self._area.range(stretch, self._half))) for stretch in own]

    def gather(self, held: Mapping[str, np.ndarray]) -> None:
        """Fill this rank's ``ranges`` from what all ranks hold of the tensors, by their names. Collective."""
        for mine, there in self._pairs(held):
            there.take(mine)
        if self._area.shared:
            self._group.barrier()
        else:
            _meet(self._group, self._mine(held), self._theirs())

    def scatter(self, held: Mapping[str, np.ndarray]) -> None:
        """Fill what this rank holds of the tensors, by their names, from all ranks' ranges. Collective."""
        if self._area.shared:
            self._group.barrier()
        else:
            _meet(self._group, self._theirs(), self._mine(held))
        for mine, there in self._pairs(held):
            mine.take(there)

    def _pairs(self, held: Mapping[str, np.ndarray]) -> Iterator[tuple[Side, Side]]:
        """What this rank holds of the ranges in reach, here and there."""
        for stretch in self._held:
            if stretch.rank in self._area:
                runs = self._runs(stretch, stretch.entry.rank)
                there = Side(self._area.range(stretch, self._half), runs.at, runs.length)
                yield Side(held[stretch.entry.name], runs.start, runs.length), there

    def _mine(self, held: Mapping[str, np.ndarray]) -> list[list[Side]]:
        """What this rank holds of the ranges out of reach, by their ranks."""
        sides: list[list[Side]] = [[] for _ in range(self._group.size)]
        for stretch in self._held:
            if stretch.rank not in self._area:
                runs = self._runs(stretch, stretch.entry.rank)
                sides[stretch.rank].append(Side(held[stretch.entry.name], runs.start, runs.length))
        return sides

    def _theirs(self) -> list[list[Side]]:
        """What ranks out of reach hold of this rank's ranges, by rank."""
        sides: list[list[Side]] = [[] for _ in range(self._group.size)]
        for stretch, memory in self.ranges:
            for holder, rank in enumerate(stretch.entry.holders):
                if rank not in self._area:
                    runs = self._runs(stretch, holder)
                    sides[rank].append(Side(memory.numpy(), runs.at, runs.length))
        return sides

    def _runs(self, stretch: Stretch, holder: int) -> Runs:
        return Runs.of(stretch, holder, self._boxes(stretch.entry, holder))


def _meet(group: Group, sent: Sequence[Sequence[Side]], taken: Sequence[Sequence[Side]]) -> None:
    """Send each rank its sides, and take those that it sends into their places. Collective."""
    sizes, out_sizes = ([sum(int(one.length.sum()) for one in sides) for sides in ways] for ways in (sent, taken))
    x, out = (torch.empty(sum(one), dtype=torch.uint8) for one in (sizes, out_sizes))
    for side, packed in _packed(sent, x.numpy()):
        packed.take(side)
    got = out.to(group.device)
    group.all_to_all(got, x.to(group.device), out_sizes=out_sizes, sizes=sizes)
    for side, packed in _packed(taken, got.cpu().numpy()):
        side.take(packed)


def _packed(ways: Sequence[Sequence[Side]], memory: np.ndarray) -> Iterator[tuple[Side, Side]]:
    """Each side, and the same runs one after another in ``memory``."""
    done = 0
    for side in (side for sides in ways for side in sides):
        ends = done + np.cumsum(side.length)
        yield side, Side(memory, ends - side.length, side.length)
        done = int(ends[-1]) if ends.size else done


def _even(lengths: np.ndarray, *starts: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last of stretches of runs that are equally long and, in each memory, equally far apart."""
    if not lengths.size:
        return
    broken = np.diff(lengths) != 0
    for one in starts:
        gaps = np.diff(one)
        broken |= np.concatenate([[False], np.diff(gaps) != 0])[: gaps.size]
    edges = [0, *(np.flatnonzero(broken) + 1).tolist(), lengths.size]
    yield from ((first, last) for first, last in zip(edges, edges[1:], strict=False))
