"""Diff: how two checkpoints differ, tensor by tensor."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.parts import Part, Tell, mine, quiet, read
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError

Side = tuple[Path, Index]


@dataclass(frozen=True)
class Difference:
    """A tensor that two checkpoints do not have alike.

    ``one`` and ``other`` are its dtype and shape in each, None where it is not there. Where the shapes are equal,
    ``elements`` have other values, by at most ``largest`` among those that are finite in both.
    """

    name: str
    one: str | None
    other: str | None
    elements: int | None = None
    of: int | None = None
    largest: float | None = None


def diff(one: Side, other: Side, group: Group, pattern: str | None = None, tell: Tell = quiet) -> list[Difference]:
    """Every tensor that differs in being there, in shape, dtype or value, by name; equal bits are equal, NaNs too.

    Collective: ranks share the reading, and all get the answer. ``pattern`` is a shell pattern of names.
    """
    ours, theirs = ({slot.name: slot for slot in index.slots if _fits(slot, pattern)} for _, index in (one, other))
    if pattern is not None and not ours and not theirs:
        raise CheckpointError(f"neither file has a tensor {pattern}", "", "run it without --tensor to see the names")
    common = [slot for name, slot in ours.items() if name in theirs and theirs[name].shape == slot.shape]
    counted = together(group, lambda: _counted(one[0], other[0], common, theirs, group, tell), "comparing checkpoints")
    values: dict[str, tuple[int, float | None]] = {}
    for name, elements, largest in (row for rows in group.collect(counted) for row in rows):
        before = values.get(name, (0, None))
        values[name] = before[0] + elements, _greater(before[1], largest)
    found = [_difference(ours.get(name), theirs.get(name), values.get(name)) for name in sorted(ours | theirs)]
    return [difference for difference in found if difference]


def _fits(slot: Slot, pattern: str | None) -> bool:
    return pattern is None or fnmatchcase(slot.name, pattern)


def _counted(
    one: Path, other: Path, common: list[Slot], theirs: dict[str, Slot], group: Group, tell: Tell
) -> list[tuple[str, int, float | None]]:
    """(name, elements that differ, largest difference) of the parts that this rank read."""
    rows = []
    for parts in mine(common, group, tell):
        across = [part.of(theirs[part.slot.name]) for part in parts]
        pairs = zip(parts, read(one, parts), read(other, across), strict=True)
        rows += [row for part, a, b in pairs if (row := _row(part, a, b))]
    return rows


def _row(part: Part, a: Tensor, b: Tensor) -> tuple[str, int, float | None] | None:
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    if a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
        return None
    a, b = a.to(wide), b.to(wide)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    finite = (a - b).abs()[differs & a.isfinite() & b.isfinite()]
    count = int(differs.sum())
    return (part.slot.name, count, float(finite.max()) if finite.numel() else None) if count else None


def _greater(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _difference(one: Slot | None, other: Slot | None, values: tuple[int, float | None] | None) -> Difference | None:
    name = (one or other).name
    if one is None or other is None or one.shape != other.shape:
        return Difference(name, one and _kind(one), other and _kind(other))
    if values is None and one.dtype == other.dtype:
        return None
    elements, largest = values or (0, None)
    return Difference(name, _kind(one), _kind(other), elements, prod(one.shape), largest)


def _kind(slot: Slot) -> str:
    return f"{slot.dtype} {list(slot.shape)}"
