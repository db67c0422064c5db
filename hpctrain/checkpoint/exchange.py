"""Exchange: tensors that are cut along a later dim than the first, whose short runs take turns in the file.

The holders of such a tensor first send each other what they have, so that each of them gets whole blocks that lie one
after another, and writes them in long calls; at a load each reads whole blocks and sends the others their parts. So the
file is written and read once, by the same calls as for any other tensor, and no block is shared. It goes in rounds, so
that memory stays small. All ranks make the same rounds, whether they hold something of them or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch

from hpctrain.checkpoint.blocks import BLOCK_BYTES, count
from hpctrain.checkpoint.state import Entry
from hpctrain.comm.group import Group
from hpctrain.plan.layout import ITEMSIZE, Box, piece

RUN_BYTES = 1 << 22  # longer runs are written and read as they lie
WINDOW_BYTES = 1 << 24  # of one tensor, for one rank
ROUND_BYTES = 1 << 25  # for one rank

Boxes = Callable[[Entry, int], Sequence[Box]]
"""What a rank of an entry's mesh has, or wants, of it."""


def alternates(entry: Entry) -> bool:
    """Whether short runs of several ranks take turns in the file. The same answer on every rank."""
    layout, mesh = entry.layout, entry.mesh
    dim = max((cut.dim for cut in layout.cuts if mesh.size(*cut.axes) > 1), default=0)
    run = prod(layout.box(mesh, 0).shape[dim:]) * ITEMSIZE[layout.dtype]
    return dim > 0 and layout.nbytes > 0 and run < RUN_BYTES


@dataclass(frozen=True)
class Window:
    """A range of whole blocks for each holder of a tensor: the ``number``-th of those that are its own."""

    entry: Entry
    number: int
    shift: int

    @property
    def most(self) -> int:
        """Bytes that a holder has of it, from above."""
        return min(WINDOW_BYTES, -(-self.entry.layout.nbytes // self.entry.mesh.ranks_total))

    @property
    def last(self) -> bool:
        """Whether the tensor has no further window."""
        return self.number == _windows(self.entry) - 1

    def span(self, holder: int) -> tuple[int, int]:
        """Start and stop in the tensor's bytes; equal where this holder has nothing."""
        nbytes, holders = self.entry.layout.nbytes, self.entry.mesh.ranks_total
        first, last = piece(count(nbytes), holders, (holder + self.shift) % holders)
        stop = min(last * BLOCK_BYTES, nbytes)
        start = min(first * BLOCK_BYTES + self.number * WINDOW_BYTES, stop)
        return start, min(start + WINDOW_BYTES, stop)


def rounds(entries: Iterable[Entry]) -> Iterator[list[Window]]:
    """The windows of tensors that alternate, together as far as memory goes. The same on every rank."""
    gathered: list[Window] = []
    for shift, entry in enumerate(entries):
        for number in range(_windows(entry)):
            gathered.append(Window(entry, number, shift))
            if sum(window.most for window in gathered) >= ROUND_BYTES:
                yield gathered
                gathered = []
    if gathered:
        yield gathered


def _windows(entry: Entry) -> int:
    blocks = -(-count(entry.layout.nbytes) // entry.mesh.ranks_total)
    return -(-blocks * BLOCK_BYTES // WINDOW_BYTES)


@dataclass(frozen=True)
class Runs:
    """Contiguous runs of bytes, ascending: their places in the tensor and in a holder's memory, and their lengths."""

    at: np.ndarray
    start: np.ndarray
    length: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes in all of them."""
        return int(self.length.sum())

    @classmethod
    def of(cls, entry: Entry, rank: int, boxes: Sequence[Box]) -> Runs:
        """The runs of ``boxes`` that a rank of the entry's mesh holds."""
        size, whole = ITEMSIZE[entry.layout.dtype], entry.layout.box(entry.mesh, rank)
        first, _ = entry.layout.interval(entry.mesh, rank)
        grids = [_grid(box, whole, entry.layout.shape, first) for box in boxes if box.size] or [np.zeros((3, 0), int)]
        at, start, length = np.concatenate(grids, 1) * size
        return cls(at, start, length)

    def within(self, start: int, stop: int) -> Runs:
        """What of them lies in the tensor's bytes ``start`` to ``stop``."""
        first = int(np.searchsorted(self.at + self.length, start, "right"))
        last = max(first, int(np.searchsorted(self.at, stop, "left")))
        at, length = self.at[first:last], self.length[first:last]
        skipped = np.maximum(start - at, 0)
        ends = np.minimum(at + length, stop)
        return Runs(at + skipped, self.start[first:last] + skipped, ends - at - skipped)


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


Part = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Bytes in memory, where runs of them begin, and how long those are."""


class Round:
    """One round among all ranks of ``group``; ``boxes`` says what each holder has, or wants, of a tensor."""

    def __init__(self, windows: Sequence[Window], boxes: Boxes, group: Group) -> None:
        self.windows = [window for window in windows if window.entry.rank is not None]
        self._boxes, self._group = boxes, group

    def gather(self, held: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The bytes of this rank's range of each window, from what all ranks hold of the tensors. Collective."""
        made = [np.empty(stop - start, np.uint8) for start, stop in map(own, self.windows)]
        mine, theirs = self._parts(held, made)
        _meet(self._group, mine, theirs)
        return made

    def scatter(self, held: Sequence[np.ndarray], ranges: Sequence[np.ndarray]) -> None:
        """Fill what this rank holds of the tensors from all ranks' ranges of the windows. Collective."""
        mine, theirs = self._parts(held, ranges)
        _meet(self._group, theirs, mine)

    def _parts(self, held: Sequence[np.ndarray], ranges: Sequence[np.ndarray]) -> tuple[list[list[Part]], ...]:
        """By rank: what this rank holds of the other's ranges, and what the other holds of this one's."""
        mine, theirs = ([[] for _ in range(self._group.size)] for _ in range(2))
        for window, memory, here in zip(self.windows, held, ranges, strict=True):
            entry, (begin, end) = window.entry, own(window)
            all_mine = Runs.of(entry, entry.rank or 0, self._boxes(entry, entry.rank or 0))
            for holder, rank in enumerate(entry.holders):
                runs = all_mine.within(*window.span(holder))
                mine[rank].append((memory, runs.start, runs.length))
                runs = Runs.of(entry, holder, self._boxes(entry, holder)).within(begin, end)
                theirs[rank].append((here, runs.at - begin, runs.length))
        return mine, theirs


def own(window: Window) -> tuple[int, int]:
    """The range of the tensor's bytes that this rank gets of a window."""
    return window.span(window.entry.rank or 0)


def _meet(group: Group, sent: Sequence[Sequence[Part]], taken: Sequence[Sequence[Part]]) -> None:
    """Send each rank its parts, and take those that it sends into their places. Collective."""
    sizes, out_sizes = ([sum(int(part[2].sum()) for part in parts) for parts in side] for side in (sent, taken))
    x, out = (torch.empty(sum(one), dtype=torch.uint8) for one in (sizes, out_sizes))
    _move(x.numpy(), sent, True)
    got = out.to(group.device)
    group.all_to_all(got, x.to(group.device), out_sizes=out_sizes, sizes=sizes)
    _move(got.cpu().numpy(), taken, False)


def _move(packed: np.ndarray, sides: Sequence[Sequence[Part]], pack: bool) -> None:
    """Between the parts' runs, one after another, and ``packed``."""
    done = 0
    for memory, starts, lengths in (part for parts in sides for part in parts):
        for first, last in _even(starts, lengths):
            size, length = last - first, int(lengths[first])
            flat = packed[done : done + size * length].reshape(size, length)
            runs = _rows(memory, int(starts[first]), int(starts[min(first + 1, last - 1)]), size, length)
            (flat if pack else runs)[:] = runs if pack else flat
            done += size * length


def _even(starts: np.ndarray, lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """First and last of stretches of runs that are equally long and equally far apart."""
    if not lengths.size:
        return
    gaps = np.diff(starts)
    broken = (np.diff(lengths) != 0) | np.concatenate([[False], np.diff(gaps) != 0])[: gaps.size]
    edges = [0, *(np.flatnonzero(broken) + 1).tolist(), lengths.size]
    yield from ((first, last) for first, last in zip(edges, edges[1:], strict=False))


def _rows(memory: np.ndarray, first: int, second: int, size: int, length: int) -> np.ndarray:
    """Runs of ``length`` bytes, as far apart as ``first`` and ``second``, as rows of one array."""
    return np.lib.stride_tricks.as_strided(memory[first:], (size, length), (second - first, 1))
