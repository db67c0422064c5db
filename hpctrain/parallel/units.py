"""Part: a unit of parameters on this rank.

The ``nn.Parameter`` of each slot is a view into the unit's flat weights. A rank owns an interval of them: what it
updates, and whose reduced gradient it has. Where tensor parallelism cuts a parameter, it is this rank's box of it.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.errors import ShapeError
from hpctrain.optim.flat import Flat, Piece
from hpctrain.plan.layout import Box
from hpctrain.plan.units import Slot, Unit
from hpctrain.precision.masters import Masters


class Kind(NamedTuple):
    """What parameters have in common that are updated alike."""

    axes: tuple[str, ...]
    """Along which tensor parallelism cuts them: other ranks there own other elements."""
    decay: bool


@dataclass(frozen=True)
class Ranks:
    """The groups that a model is shared by, as this rank is in them."""

    inner: Group
    """Share one copy of the model."""
    outer: Group = field(default_factory=SoloGroup)
    """Have the same part, in other copies."""
    near: Group | None = None
    """Of ``inner`` those with quick links, in its order and next to each other: the ranks of a node."""
    far: Group | None = None
    """Of ``inner`` those at the same place among their neighbours; given where ``near`` is."""

    def __post_init__(self) -> None:
        if self.near and self.far and self.far.rank * self.near.size + self.near.rank != self.inner.rank:
            raise ShapeError(
                f"rank {self.inner.rank} is number {self.near.rank} of its {self.near.size} neighbours, and these are"
                f" number {self.far.rank} of {self.far.size}",
                "neighbours follow one another in the group that shares a copy",
                "make both groups from the mesh, or split the group by rank // neighbours and rank % neighbours",
            )


@dataclass
class Second:
    """A copy of a unit's weights that neighbours share; live."""

    own: Tensor
    """This rank's interval of it."""
    sizes: tuple[int, ...]
    """Elements of each neighbour's interval."""
    start: int
    kept: bool = False
    """Whether it holds the weights of this step."""

    def keep(self, full: Tensor) -> None:
        """Take the own interval out of the whole weights."""
        self.own.copy_(full[self.start : self.start + self.own.numel()])
        self.kept = True


class Alone:
    """Memory of one unit, that is there from ``show`` to ``hide``; live. What a graph saved of it stays a view of it.

    On a host it is a range of addresses that keeps no pages while it is hidden: memory that an allocator gave and took
    back would leave holes between tensors that live longer.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._pages = _pages(numel * dtype.itemsize) if device.type == "cpu" else None
        if self._pages is None:
            self.tensor = torch.empty(numel, dtype=dtype, device=device)
        else:
            self.tensor = torch.frombuffer(self._pages, dtype=dtype, count=numel)
        self.hide()

    def show(self) -> None:
        """Have memory."""
        if self._pages is None:
            self.tensor.untyped_storage().resize_(self.tensor.nbytes)

    def hide(self) -> None:
        """Have none."""
        if self._pages is None:
            self.tensor.untyped_storage().resize_(0)
        else:
            self._pages.madvise(mmap.MADV_DONTNEED)


def _pages(nbytes: int) -> mmap.mmap | None:
    """Addresses of as many bytes; None where the system cannot take their pages back."""
    if sys.platform != "linux" or not nbytes:
        return None
    return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


@dataclass(eq=False)
class Shelf:
    """Memory on which units that come and go take turns, large enough for each of them; live."""

    memory: Tensor
    on: Part | None = None
    """The unit that was brought last."""


@dataclass(eq=False)
class Part:
    """A unit on this rank; live: its weights come and go, and it counts the gradients that have come."""

    unit: Unit
    parameters: Mapping[str, nn.Parameter]
    sizes: tuple[int, ...]
    """Elements of each rank's interval."""
    start: int
    """Where this rank's own interval begins."""
    full: Tensor
    """All weights; without memory while they are away."""
    own: Tensor
    """This rank's interval of the weights."""
    masters: Masters
    """The own interval in the format in which it is updated."""
    gradient: Tensor
    """The own interval of the reduced gradients."""
    buffer: Tensor | None
    """All gradients, as they come; None while there is no memory for them."""
    boxes: Mapping[str, Box]
    """What of each parameter is here, of all of it, where tensor parallelism cuts it: a run of its elements."""
    near: Second | None = None
    """What neighbours keep of the weights; None where they keep nothing."""
    place_at: Alone | Shelf | None = None
    """Where the weights are while they are here; None where they always are."""
    pooled: Tensor | None = None
    """The lent memory that ``buffer`` is in."""
    whole: bool = False
    """Whether all weights are here, or on their way."""
    busy: bool = False
    """Whether its backward goes on; a forward then is a second one, made inside of it."""
    gathering: Handle = field(default_factory=Handle)
    reducing: Handle = field(default_factory=Handle)
    stale: set[str] = field(default_factory=set)
    """Names whose place in ``buffer`` holds nothing of this step."""
    missing: set[str] = field(default_factory=set)
    """Names whose gradient has not come in this backward."""
    reduced: bool = False
    """Whether ``gradient`` holds something of this step."""

    @property
    def names(self) -> set[str]:
        return {slot.name for slot in self.unit.slots}

    @property
    def stop(self) -> int:
        """Where this rank's own interval ends."""
        return self.start + self.own.numel()

    @property
    def master(self) -> Tensor:
        """What the optimizer updates."""
        return self.masters.tensors[0]

    def place(self, slot: Slot, whole: Tensor) -> Tensor:
        """A parameter's elements in a tensor of the whole unit, in the parameter's shape."""
        box = self.boxes[slot.name]
        return whole[slot.start : slot.start + box.size].view(box.shape)

    def share(self, slot: Slot, own: Tensor) -> Tensor:
        """A parameter's elements in a tensor of the own interval: none, a run of them, or all."""
        start, stop = (edge - self.start for edge in self._run(slot))
        return own[start:stop]

    def first(self, slot: Slot) -> int:
        """The number, in the whole parameter, of the first element of the own share."""
        box = self.boxes[slot.name]
        before = box.start[0] * (box.size // box.shape[0]) if box.size and box.shape else 0
        return before + self._run(slot)[0] - slot.start

    def gaps(self) -> list[tuple[int, int]]:
        """What of the unit no parameter fills on this rank."""
        return [(slot.start + self.boxes[slot.name].size, slot.stop) for slot in self.unit.slots]

    def _run(self, slot: Slot) -> tuple[int, int]:
        """Start and stop, in the unit, of what is owned of a parameter."""
        edges = (slot.start, slot.start + self.boxes[slot.name].size)
        return tuple(min(max(edge, self.start), self.stop) for edge in edges)

    def flats(self) -> dict[Kind, list[Flat]]:
        """What is to be updated, by kind, in runs without gaps; the same kinds on every rank, perhaps empty."""
        found: dict[Kind, list[Flat]] = {}
        for kind, slots in groupby(sorted(self.unit.slots, key=_order), key=_kind):
            runs = _joined([(*self._run(slot), slot) for slot in slots])
            found[kind] = [self._flat(kind.decay, *run) for run in runs]
        return found

    def _flat(self, decay: bool, start: int, stop: int, slots: Sequence[Slot]) -> Flat:
        pieces, own = [], slice(start - self.start, stop - self.start)
        for slot in slots:
            first, last = self._run(slot)
            if first < last:
                pieces.append(Piece(slot.name, slot.shape, self.first(slot), first - start, last - start))
        return Flat(self.master[own], self.gradient[own], decay, tuple(pieces))

    @property
    def shelf(self) -> Shelf | None:
        """The shelf on which the unit takes turns with others; None where it has memory of its own."""
        return self.place_at if isinstance(self.place_at, Shelf) else None

    def put_up(self, shelf: Shelf | None) -> None:
        """Give the weights, which are away, a place on a shelf, or with None memory of their own."""
        total = self.unit.total
        self.place_at = shelf or Alone(total, self.full.dtype, self.full.device)
        self.full = shelf.memory[:total] if shelf else self.place_at.tensor

    def show(self) -> None:
        """Give the weights their memory back."""
        if self.shelf:
            self.shelf.on = self
        else:
            self.place_at.show()
        self.bind()

    def bind(self) -> None:
        """Make every parameter a view of the weights."""
        for slot in self.unit.slots:
            self.parameters[slot.name].data = self.place(slot, self.full)

    def hide(self) -> None:
        """Take the weights' memory away. Views that a graph saved are whole again when the weights come back."""
        nothing = torch.full((), torch.nan, dtype=self.full.dtype, device=self.full.device)  # a read finds no numbers
        for slot in self.unit.slots:
            self.parameters[slot.name].data = nothing.expand(self.boxes[slot.name].shape)
        if not self.shelf:
            self.place_at.hide()


def _kind(slot: Slot) -> Kind:
    return Kind(slot.axes, slot.decay)


def _order(slot: Slot) -> tuple[tuple[str, ...], bool]:
    return slot.axes, not slot.decay


Run = tuple[int, int, list[Slot]]


def _joined(runs: Iterable[tuple[int, int, Slot]]) -> list[Run]:
    """Runs of elements that touch made one, with the parameters in it; one that is empty where all of them are."""
    every = sorted(runs, key=lambda run: run[:2])
    found: list[Run] = []
    for start, stop, slot in [run for run in every if run[0] < run[1]] or every[:1]:
        if found and start == found[-1][1]:
            found[-1] = (found[-1][0], stop, [*found[-1][2], slot])
        else:
            found.append((start, stop, [slot]))
    return found
