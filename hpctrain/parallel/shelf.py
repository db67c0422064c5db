"""Shelves: where the weights of units that come and go have their places.

In the first step each unit has memory of its own, whose pages come with each gather and go after each use; every page
costs a fault. Once a step has shown that no two units are in use at the same moment, they get places that stay: as many
shelves as there is room for, on which they take turns, and one for each held unit. Ranks of a node have the shelves in
common where they can: each brings its own interval there, and the node holds gathered weights once and not once for
each rank. None writes to a shelf before all have asked for that gather, and a rank asks for it when it is done with the
unit that was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle

import torch
from torch import Tensor

from hpctrain.errors import HpctrainError
from hpctrain.parallel.place import common
from hpctrain.parallel.travel import Travel
from hpctrain.parallel.units import Part, Shelf

Make = Callable[[int, torch.dtype], Tensor]


def settle(parts: Sequence[Part], travel: Travel, room_bytes: int, alone: bool) -> None:
    """Give every unit a place, if on all ranks no two were in use at once (``alone``). None is whole now. Collective.

    Only weights that all ranks gather together, as they are, can lie in memory that the ranks of a node have in common.
    """
    inner = travel.ranks.inner
    agreed = torch.tensor(alone, dtype=torch.int64, device=inner.device)
    inner.all_reduce(agreed, "min")
    if agreed:
        _shelve(parts, room_bytes, common(inner) if travel.plain else _private)


def _shelve(parts: Sequence[Part], room_bytes: int, make: Make) -> None:
    for key in dict.fromkeys(map(_kind, parts)):
        held, dtype, device = key
        alike = [part for part in parts if _kind(part) == key]
        largest = max(part.unit.total for part in alike)
        turns = [largest] * min(len(alike), room_bytes // (largest * dtype.itemsize))
        sizes = [part.unit.total for part in alike] if held else turns
        shelves = [Shelf(make(size, dtype).to(device)) for size in sizes]
        for part, shelf in zip(alike, cycle(shelves), strict=False):
            part.put_up(shelf)


@contextmanager
def off_shelves(parts: Sequence[Part]) -> Iterator[None]:
    """Inside, every unit has memory of its own. None is whole before and after."""
    places = [(part, part.shelf) for part in parts if part.shelf]
    for part, _ in places:
        part.put_up(None)
    yield
    for part, shelf in places:
        part.put_up(shelf)


def crowded(part: Part, other: Part) -> HpctrainError:
    """The error for a unit that is wanted while another one on its shelf is in use."""
    return HpctrainError(
        f"unit {part.unit.name!r} is used inside of unit {other.unit.name!r}, which it was not in the first step",
        "their weights take turns in one place, and the backward of what ran before needs them there",
        "make the two one unit, or let the first step use them as the others do",
    )


def _private(numel: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(numel, dtype=dtype)


def _kind(part: Part) -> tuple[bool, torch.dtype, torch.device]:
    return part.unit.held, part.full.dtype, part.full.device
