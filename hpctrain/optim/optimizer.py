"""Optimizer: the promise that every optimizer keeps, whatever part of the parameters this rank owns.

The ranks of a group own each element of their parameters once, in any intervals: a rank may have a part of a matrix,
or nothing of it. What an update does to an element depends only on the whole parameter, its gradient, its states, the
rate and the step; so the shards of any cut, put together, are what one rank has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import OptimConfig
from hpctrain.errors import ShapeError
from hpctrain.optim.flat import Flat, Piece

CHUNKS = {"cpu": 1 << 18}  # elements worked on at once: so few that they stay in a core's cache
CHUNK = 1 << 22  # on other devices, where each call costs as much as many elements


@dataclass(frozen=True)
class State:
    """What a checkpoint keeps of one parameter under one name. The tensor stays where it is: read it, or fill it."""

    parameter: str
    tensor: Tensor
    """1-D: an element for each element of the parameter that this rank has, in their order. Where ``whole`` is set:
    a tensor of a shape of its own, equal on all ranks of the group, which no cut of the parameter changes."""
    whole: bool = False


@dataclass(frozen=True)
class Entry:
    """A parameter as the ranks of a group have it."""

    name: str
    shape: tuple[int, ...]
    decay: bool
    runs: tuple[tuple[int, int], ...]
    """Start and stop of what each rank has of the flattened parameter, in rank order."""

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return prod(self.shape)


class Optimizer(ABC):
    """Updates the flat tensors that this rank owns. Collective: all ranks of the group make it, and call ``update``.

    ``group`` is the ranks that share the parameters out among them; a group of one where each rank has all of them.
    ``seed`` is where rounding takes its random bits from, in the optimizers that round so.
    """

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        for flat in flats:
            _check_named(flat)
        self.flats, self.config, self.group, self.seed = tuple(flats), config, group, seed
        self.entries = catalog(self.flats, group)
        self.places = {piece.name: (index, piece) for index, flat in enumerate(flats) for piece in flat.pieces}

    @property
    def like(self) -> Tensor:
        """A tensor of the device and dtype that is worked in; torch's own where there is nothing to update."""
        return self.flats[0].parameter if self.flats else torch.empty(0)

    @property
    def chunk(self) -> int:
        """How many elements are worked on at once."""
        return CHUNKS.get(self.like.device.type, CHUNK)

    @abstractmethod
    def update(self, rate: float, step: int) -> None:
        """Move the parameters against their gradients, which keep their values. ``step`` counts from 0 over the whole
        run, resumed or not."""

    @abstractmethod
    def states(self) -> dict[str, list[State]]:
        """By name, what the next updates depend on; every parameter of the group is there, also with no element."""

    def here(self, name: str, tensors: Sequence[Tensor] | None = None) -> Tensor:
        """This rank's elements of a parameter, out of one tensor for each flat; its weights when none are given."""
        tensors = [flat.parameter for flat in self.flats] if tensors is None else tensors
        if name not in self.places:
            return tensors[0][:0]
        index, piece = self.places[name]
        return tensors[index][piece.start : piece.stop]

    def parts(self, wanted: Callable[[Entry], bool]) -> list[Flat]:
        """This rank's pieces of some of the parameters, each a flat tensor of its own; the first one is empty."""
        nothing = Flat(self.like[:0], self.flats[0].gradient[:0] if self.flats else self.like, decay=False)
        return [nothing] + [
            self.flats[index].part(piece) for index, piece in self.places.values() if wanted(self.entries[piece.name])
        ]

    def blocks(self, name: str, every: int) -> Iterator[tuple[Piece, Flat]]:
        """What this rank has of a parameter, cut at multiples of ``every`` of its elements, each as a flat tensor.

        Gradients are in the format of the parameters.
        """
        if name in self.places:
            index, whole = self.places[name]
            for piece in whole.split(every):
                yield piece, self.flats[index].part(piece).wide

    def spread(self, tensors: Sequence[Tensor]) -> list[State]:
        """One tensor for each flat, as the states of the parameters in it."""
        return [State(name, self.here(name, tensors)) for name in self.entries]


def catalog(flats: Sequence[Flat], group: Group) -> dict[str, Entry]:
    """Every parameter that the ranks share, by name, the same on all of them. Collective.

    Raises ShapeError, on all ranks, where an element has no owner or several.
    """
    mine = [
        (piece.name, piece.shape, flat.decay, piece.first, piece.first + piece.stop - piece.start)
        for flat in flats
        for piece in flat.pieces
    ]
    known: dict[str, tuple[tuple[int, ...], bool]] = {}
    runs: dict[str, list[tuple[int, int]]] = {}
    for rank, theirs in enumerate(group.collect(mine)):
        for name, shape, decay, first, stop in theirs:
            known.setdefault(name, (tuple(shape), decay))
            runs.setdefault(name, [(0, 0)] * group.size)[rank] = (first, stop)
    entries = {name: Entry(name, shape, decay, tuple(runs[name])) for name, (shape, decay) in known.items()}
    for entry in entries.values():
        _check(entry, group)
    return entries


def _check_named(flat: Flat) -> None:
    named, total = sum(piece.stop - piece.start for piece in flat.pieces), flat.parameter.numel()
    if named != total:
        raise ShapeError(
            f"the pieces of a flat tensor have {named} elements, the tensor {total}",
            "the states of elements without a name would be lost from checkpoints",
            "give Flat a Piece for each parameter in it",
        )


def _check(entry: Entry, group: Group) -> None:
    runs = sorted(run for run in entry.runs if run[0] < run[1])
    if [0, *(stop for _, stop in runs)] != [*(start for start, _ in runs), entry.size]:
        raise ShapeError(
            f"{entry.name}: the {group.size} ranks of group {group.name} have elements {list(entry.runs)}"
            f" of {entry.size}",
            "each element of a parameter has one owner, who updates it",
            "give the optimizer the group of the ranks that share the parameters, or a group of one where none do",
        )
