"""Shares: which ranges of a file each rank takes of tensors whose short runs take turns in it, and in which round.

Tensors that are cut along a later dim than the first have runs that alternate between their holders, often within one
block. The tensors with the same holders are one line of blocks, of which each holder takes a share in one piece: it
goes through the file from there on as through a tensor that is all its own. It does so in rounds, so that memory stays
small. All ranks make the same rounds, whether they hold something or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from math import prod

import numpy as np

from hpctrain.checkpoint.blocks import BLOCK_BYTES, count
from hpctrain.checkpoint.ranges import file_order, turns
from hpctrain.checkpoint.state import Entry
from hpctrain.plan.layout import ITEMSIZE, Box, piece

RUN_BYTES = 1 << 22  # longer runs are written and read as they lie
ROUND_BYTES = (1 << 20, 1 << 23)  # for one rank, at least and at most
NODE_BYTES = 1 << 27  # for all ranks, as long as each has the least
SECTION_BYTES = 1 << 28  # for one rank; what is on a GPU is on the host as well, a section at a time


def alternates(entry: Entry) -> bool:
    """Whether short runs of several ranks take turns in the file. The same answer on every rank."""
    layout, mesh = entry.layout, entry.mesh
    dim = max((cut.dim for cut in layout.cuts if mesh.size(*cut.axes) > 1), default=0)
    if not dim or not layout.nbytes:
        return False
    return prod(layout.box(mesh, 0).shape[dim:]) * ITEMSIZE[layout.dtype] < RUN_BYTES


def round_bytes(ranks: int) -> int:
    """What each of a group's ``ranks`` takes in a round at most: whole blocks."""
    least, most = ROUND_BYTES
    return max(least, min(most, NODE_BYTES // ranks // BLOCK_BYTES * BLOCK_BYTES))


def crossing(entries: Sequence[Entry], ranks: int) -> dict[str, int]:
    """The names of those that alternate, and whose turn each is among its replicas; none where there is one rank."""
    names = {entry.name for entry in entries if ranks > 1 and alternates(entry)}
    return {entry.name: turn for entry, turn in turns(entries) if entry.name in names} if names else {}


@dataclass(frozen=True)
class Stretch:
    """Bytes ``start`` to ``stop`` of a tensor, whole blocks, that one ``rank`` of the group takes in a round.

    It has them at ``place`` in its memory for ranges.
    """

    entry: Entry
    rank: int
    start: int
    stop: int
    place: int

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return self.stop - self.start


@dataclass(frozen=True)
class Section:
    """Tensors that alternate, as many as memory is for, and what the ranks take of them in each round."""

    entries: tuple[Entry, ...]
    rounds: tuple[tuple[Stretch, ...], ...]


def sections(entries: Sequence[Entry], ranks: int) -> Iterator[Section]:
    """All that alternate among a group's ``ranks``, in the file's order. The same on every rank.

    Each section has something of every line, so that the stages of a pipeline work side by side.
    """
    names = crossing(entries, ranks)
    lines = [list(_parts(line)) for line in _lines(entry for entry in file_order(entries) if entry.name in names)]
    for parts in zip_longest(*lines, fillvalue=()):
        yield Section(tuple(entry for part in parts for entry in part), _rounds(parts, ranks))


def own(entries: Sequence[Entry], ranks: int, rank: int) -> Iterator[Stretch]:
    """What one rank takes of all that alternate, in its order: of each tensor bytes that lie one after another."""
    found = (stretch for section in sections(entries, ranks) for one in section.rounds for stretch in one)
    yield from (stretch for stretch in found if stretch.rank == rank)


def _lines(entries: Iterable[Entry]) -> list[list[Entry]]:
    """The tensors with the same holders."""
    lines: dict[tuple[int, ...], list[Entry]] = {}
    for entry in entries:
        lines.setdefault(entry.holders, []).append(entry)
    return list(lines.values())


def _parts(line: Iterable[Entry]) -> Iterator[tuple[Entry, ...]]:
    part, nbytes = [], 0
    for entry in line:
        nbytes += entry.layout.nbytes
        if part and nbytes > SECTION_BYTES * len(entry.holders):
            yield tuple(part)
            part, nbytes = [], entry.layout.nbytes
        part.append(entry)
    yield tuple(part)


def _rounds(lines: Iterable[Sequence[Entry]], ranks: int) -> tuple[tuple[Stretch, ...], ...]:
    made: list[list[Stretch]] = []
    used, each = [0] * ranks, round_bytes(ranks) // BLOCK_BYTES
    for line in filter(None, lines):
        for entry, rank, first, last in _shares(line):
            for stretch, number in _cut(entry, rank, first, last, used[rank], each):
                made += [[] for _ in range(number + 1 - len(made))]
                made[number].append(stretch)
            used[rank] += last - first
    return tuple(map(tuple, made))


def _shares(line: Sequence[Entry]) -> Iterator[tuple[Entry, int, int, int]]:
    """Equal shares of a line, each in one piece: of which tensor, for which rank, from which block to which."""
    holders, edges = line[0].holders, [0, *accumulate(count(entry.layout.nbytes) for entry in line)]
    for holder, rank in enumerate(holders):
        first, last = piece(edges[-1], len(holders), holder)
        for entry, begin, end in zip(line, edges, edges[1:], strict=False):
            if max(first, begin) < min(last, end):
                yield entry, rank, max(first, begin) - begin, min(last, end) - begin


def _cut(entry: Entry, rank: int, first: int, last: int, used: int, each: int) -> Iterator[tuple[Stretch, int]]:
    """Blocks of a tensor by rounds of ``each`` blocks, and those rounds' numbers; ``used`` are taken by others."""
    while first < last:
        number, place = divmod(used, each)
        step = min(last - first, each - place)
        stop = min((first + step) * BLOCK_BYTES, entry.layout.nbytes)
        yield Stretch(entry, rank, first * BLOCK_BYTES, stop, place * BLOCK_BYTES), number
        first, used = first + step, used + step


@dataclass(frozen=True)
class Runs:
    """Contiguous runs of bytes, ascending: their places in a stretch and in a holder's memory, and their lengths."""

    at: np.ndarray
    start: np.ndarray
    length: np.ndarray

    @classmethod
    def of(cls, stretch: Stretch, rank: int, boxes: Sequence[Box]) -> Runs:
        """The runs of ``boxes``, which a rank of the entry's mesh holds, as far as they are in the stretch."""
        layout, mesh = stretch.entry.layout, stretch.entry.mesh
        size, whole = ITEMSIZE[layout.dtype], layout.box(mesh, rank)
        row = prod(layout.shape[1:]) * size
        rows = range(stretch.start // row, -(-stretch.stop // row))
        first, _ = layout.interval(mesh, rank)
        parts = (part for box in boxes if (part := _rows_of(box, rows)))
        grids = [_grid(box, whole, layout.shape, first) for box in parts] or [np.zeros((3, 0), int)]
        at, start, length = np.concatenate(grids, 1) * size
        return cls._within(at - stretch.start, start, length, stretch.stop - stretch.start)

    @classmethod
    def _within(cls, at: np.ndarray, start: np.ndarray, length: np.ndarray, nbytes: int) -> Runs:
        skipped = np.clip(-at, 0, length)
        at, start, length = at + skipped, start + skipped, np.minimum(at + length, nbytes) - at - skipped
        some = length > 0
        return cls(at[some], start[some], length[some])


def _rows_of(box: Box, rows: range) -> Box | None:
    """The box's part in these rows of the tensor."""
    start, stop = max(box.start[0], rows.start), min(box.start[0] + box.shape[0], rows.stop)
    part = Box((start, *box.start[1:]), (stop - start, *box.shape[1:]))
    return part if start < stop and part.size else None


def _grid(box: Box, whole: Box, shape: tuple[int, ...], first: int) -> np.ndarray:
    """(place in the tensor, place in memory, length) of a box's runs, as three rows."""
    within = box.within(whole)
    broken = max((dim for dim in range(len(shape)) if box.shape[dim] < shape[dim]), default=0)
    at, start = _offsets(box, shape, broken), _offsets(within, whole.shape, broken) - first
    return np.stack([at, start, np.full_like(at, prod(box.shape[broken:]))])


def _offsets(box: Box, shape: tuple[int, ...], broken: int) -> np.ndarray:
    """Where the box's runs begin in an array of ``shape``; each goes over all dims from ``broken`` on."""
    strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found = np.array([sum(start * stride for start, stride in zip(box.start, strides, strict=True))], np.int64)
    for dim in range(broken):
        found = (found[:, None] + np.arange(box.shape[dim]) * strides[dim]).ravel()
    return found
