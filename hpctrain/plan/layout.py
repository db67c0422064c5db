"""Layout: which elements of a global tensor each rank holds, and which it writes.

A tensor has one global shape. ``Cut`` splits a dim over axes of the mesh, and what is left to a rank is its ``Box``.
``Flat`` says that boxes of many tensors lie one after another in a buffer that is cut over further axes, whatever
tensor is there: a rank then holds only an interval of its box (ZeRO). Ranks that differ only along the other axes are
replicas: they hold the same, and share the work of writing it. All counts are in elements, all orders row-major.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from hpctrain.errors import PlanError
from hpctrain.plan.mesh import Mesh

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
}

# Replicas cut what they write at whole multiples of this, so that no disk sees small pieces or shared pages.
WRITE_BYTES = 1 << 20

Run = tuple[int, int]


def piece(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of ``parts`` pieces of ``length``; they differ by at most 1, the first ones are larger."""
    least, larger = divmod(length, parts)
    start = index * least + min(index, larger)
    return start, start + least + (index < larger)


@dataclass(frozen=True)
class Box:
    """A block of an array: where it starts and how far it goes, in each dim."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Elements in the box."""
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """What to index the array with, to get the box."""
        return tuple(slice(start, start + length) for start, length in zip(self.start, self.shape, strict=True))

    def meet(self, other: Box) -> Box | None:
        """The elements that both have, or None."""
        pairs = tuple(zip(self.slices, other.slices, strict=True))
        start = tuple(max(a.start, b.start) for a, b in pairs)
        shape = tuple(min(a.stop, b.stop) - first for (a, b), first in zip(pairs, start, strict=True))
        return Box(start, shape) if all(length > 0 for length in shape) else None

    def within(self, outer: Box) -> Box:
        """This box as counted from the start of ``outer``, which holds all of it."""
        return Box(tuple(a - b for a, b in zip(self.start, outer.start, strict=True)), self.shape)

    def part(self, start: int, stop: int) -> tuple[Box, ...]:
        """Elements ``start`` to ``stop`` of this box as boxes, in their order; at most 2n - 1 of them in n dims."""
        return tuple(_part(self, start, stop))

    def runs(self, shape: tuple[int, ...]) -> Iterator[Run]:
        """(offset, length) of each contiguous run of the box in an array of ``shape``; no two of them touch."""
        if not self.size:
            return
        # The last dim that the box does not fill ends a run; the dims after it are in the run, those before it repeat.
        broken = max((dim for dim in range(len(shape)) if self.shape[dim] < shape[dim]), default=0)
        strides = [prod(shape[dim + 1 :]) for dim in range(len(shape))]
        first = sum(start * stride for start, stride in zip(self.start, strides, strict=True))
        length = prod(self.shape[broken:])
        for steps in product(*(range(0, self.shape[dim] * strides[dim], strides[dim]) for dim in range(broken))):
            yield first + sum(steps), length

    def to_json(self) -> dict[str, Any]:
        """The box as dicts and lists."""
        return {"start": list(self.start), "shape": list(self.shape)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Box:
        """The box that ``to_json`` gave."""
        return cls(tuple(value["start"]), tuple(value["shape"]))


@dataclass(frozen=True)
class Cut:
    """One dim, split over the product of axes: pieces differ by at most 1, the first ones are larger."""

    dim: int
    axes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The cut as dicts and lists."""
        return {"dim": self.dim, "axes": list(self.axes)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cut:
        """The cut that ``to_json`` gave."""
        return cls(value["dim"], tuple(value["axes"]))


@dataclass(frozen=True)
class Flat:
    """A flat buffer of ``total`` elements that is cut over axes, with the tensor's box at ``offset``.

    Offset and total are the same on all ranks: where cuts are uneven, they leave room for the largest box.
    """

    axes: tuple[str, ...]
    offset: int
    total: int

    def to_json(self) -> dict[str, Any]:
        """The flat buffer as dicts and lists."""
        return {"axes": list(self.axes), "offset": self.offset, "total": self.total}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Flat:
        """The flat buffer that ``to_json`` gave."""
        return cls(tuple(value["axes"]), value["offset"], value["total"])


@dataclass(frozen=True)
class Layout:
    """How a global tensor lies on the ranks of a mesh."""

    shape: tuple[int, ...]
    dtype: str
    cuts: tuple[Cut, ...] = ()
    flat: Flat | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def size(self) -> int:
        """Elements in the global tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.size * ITEMSIZE[self.dtype]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold different elements."""
        cut = tuple(axis for cut in self.cuts for axis in cut.axes)
        return cut + (self.flat.axes if self.flat else ())

    def replicas(self, mesh: Mesh) -> tuple[str, ...]:
        """The axes of ``mesh`` along which ranks hold the same elements."""
        return tuple(name for name, _ in mesh.axes if name not in self.axes)

    def box(self, mesh: Mesh, rank: int) -> Box:
        """What the cuts leave to ``rank``, before a flat buffer cuts further."""
        bounds = [(0, length) for length in self.shape]
        for cut in self.cuts:
            bounds[cut.dim] = piece(self.shape[cut.dim], mesh.size(*cut.axes), mesh.index(rank, *cut.axes))
        return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))

    def interval(self, mesh: Mesh, rank: int) -> tuple[int, int]:
        """Start and stop of what ``rank`` holds, counted within its box; all of the box without a flat buffer."""
        return self._interval(mesh, rank, self.box(mesh, rank).size)

    def boxes(self, mesh: Mesh, rank: int) -> tuple[Box, ...]:
        """What ``rank`` holds, none of it twice, in the order of its box: a 1-D local tensor is cut by their sizes."""
        box = self.box(mesh, rank)
        return box.part(*self._interval(mesh, rank, box.size))

    def runs(self, mesh: Mesh, rank: int) -> Iterator[Run]:
        """(offset, length) of what ``rank`` holds in the global tensor; one single run where only dim 0 is cut."""
        return _joined(run for box in self.boxes(mesh, rank) for run in box.runs(self.shape))

    def writes(self, mesh: Mesh, rank: int, turn: int = 0) -> tuple[Box, ...]:
        """What ``rank`` writes: over the mesh, each element of the tensor is written once.

        Replicas share in pieces of at least 1 MiB. What is too small for all of them goes to the first few, counted
        from ``turn``: give each tensor another turn and small ones are spread.
        """
        box = self.box(mesh, rank)
        start, stop = self._interval(mesh, rank, box.size)
        replicas = self.replicas(mesh)
        place = (mesh.index(rank, *replicas) - turn) % mesh.size(*replicas)
        first, last = _share(stop - start, WRITE_BYTES // ITEMSIZE[self.dtype], mesh.size(*replicas), place)
        return box.part(start + first, start + last)

    def _interval(self, mesh: Mesh, rank: int, size: int) -> tuple[int, int]:
        if self.flat is None:
            return 0, size
        axes, offset, total = self.flat.axes, self.flat.offset, self.flat.total
        if offset + size > total:
            raise PlanError(
                f"a box of {size} elements at offset {offset} ends after its flat buffer of {total}",
                f"so rank {rank} would lose elements of a tensor of shape {list(self.shape)}",
                "leave room for the largest box on all ranks",
            )
        start, stop = piece(total, mesh.size(*axes), mesh.index(rank, *axes))
        start, stop = max(start - offset, 0), min(stop - offset, size)
        return (start, stop) if start < stop else (0, 0)

    def to_json(self) -> dict[str, Any]:
        """The layout as dicts and lists."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "cuts": [cut.to_json() for cut in self.cuts],
            "flat": self.flat and self.flat.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Layout:
        """The layout that ``to_json`` gave."""
        cuts = tuple(Cut.from_json(cut) for cut in value["cuts"])
        return cls(tuple(value["shape"]), value["dtype"], cuts, value["flat"] and Flat.from_json(value["flat"]))


def _part(box: Box, start: int, stop: int) -> Iterator[Box]:
    """The rest of a row, whole rows, the beginning of a row; a row being a box of one dim less."""
    if start >= stop:
        return
    if not box.shape:
        yield box
        return
    row = prod(box.shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:
        yield from _part_of_row(box, last, start - last * row, stop - last * row)
        return
    yield from _part_of_row(box, first - 1, start - (first - 1) * row, row)
    if first < last:
        yield Box((box.start[0] + first, *box.start[1:]), (last - first, *box.shape[1:]))
    yield from _part_of_row(box, last, 0, stop - last * row)


def _part_of_row(box: Box, row: int, start: int, stop: int) -> Iterator[Box]:
    for part in _part(Box(box.start[1:], box.shape[1:]), start, stop):
        yield Box((box.start[0] + row, *part.start), (1, *part.shape))


def _joined(runs: Iterable[Run]) -> Iterator[Run]:
    """Ascending runs, with those that touch made one."""
    offset, length = 0, 0
    for next_offset, next_length in runs:
        if next_offset == offset + length:
            length += next_length
            continue
        if length:
            yield offset, length
        offset, length = next_offset, next_length
    if length:
        yield offset, length


def _share(size: int, least: int, sharers: int, place: int) -> tuple[int, int]:
    """Start and stop of one sharer's piece of ``size``, cut at multiples of ``least``; the last takes the remainder."""
    units = max(1, size // least)
    pieces = min(units, sharers)
    if place >= pieces:
        return 0, 0
    first, last = piece(units, pieces, place)
    return first * least, size if last == units else last * least


def _check(layout: Layout) -> None:
    if layout.dtype not in ITEMSIZE:
        raise PlanError(
            f"dtype {layout.dtype!r} has no known size", "a layout counts bytes", f"use one of {', '.join(ITEMSIZE)}"
        )
    if any(length < 0 for length in layout.shape):
        raise PlanError(f"shape {list(layout.shape)} has a negative dim", "a dim has 0 elements or more")
    dims = [cut.dim for cut in layout.cuts]
    if any(dim not in range(len(layout.shape)) or dims.count(dim) > 1 for dim in dims):
        raise PlanError(
            f"cuts of dims {dims} do not fit shape {list(layout.shape)}",
            "a cut names a dim of the tensor, counted from 0, and each dim is cut once",
            "name several axes in one cut to split a dim over all of them",
        )
    if len(set(layout.axes)) < len(layout.axes):
        raise PlanError(
            f"the axes {', '.join(layout.axes)} name one twice",
            "ranks along an axis hold different parts of one dim, or of the flat buffer",
            "use each axis in one cut, or in the flat buffer",
        )
    if layout.flat and layout.flat.offset < 0:
        raise PlanError(f"flat offset {layout.flat.offset} is before its buffer", "it is counted from the start")
