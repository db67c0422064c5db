"""Mesh: the ranks of a job as a grid with named axes.

Ranks are laid along the axes row-major: the outermost axis is named first, the last one varies fastest. ``order`` lists
the ranks in that sequence where placement wants another one than 0, 1, 2 ... An axis that the mesh does not have is one
of size 1: every rank is at coordinate 0 of it, alone. So code names the axes that it means and never asks whether they
are there. Every answer is arithmetic on strides, and costs no more than its own length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from hpctrain.errors import PlanError
from hpctrain.plan.packed import pack, unpack


@dataclass(frozen=True)
class Mesh:
    """Named axes over ranks, outermost first, and the ranks in mesh order (0, 1, 2 ... when None)."""

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", tuple((name, size) for name, size in self.axes))
        _check_axes(self.axes)
        if self.order is not None:
            _check_order(self.order, self)
            # One form for one mesh, so that equal meshes are equal values.
            natural = all(rank == position for position, rank in enumerate(self.order))
            object.__setattr__(self, "order", None if natural else tuple(self.order))

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.axes) or "one rank"

    @cached_property
    def ranks_total(self) -> int:
        """How many ranks the mesh spans."""
        return prod(size for _, size in self.axes)

    def size(self, *axes: str) -> int:
        """How many ranks are in a group along ``axes``."""
        return prod(self._stride_and_size(axis)[1] for axis in axes)

    def coord(self, rank: int) -> dict[str, int]:
        """Where ``rank`` is on each axis."""
        return {name: self.index(rank, name) for name, _ in self.axes}

    def index(self, rank: int, *axes: str) -> int:
        """Which member ``rank`` is of its group along ``axes``: its coordinates there, as one row-major number."""
        return self._index(self._position(rank), axes)

    def ranks(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The group of ``rank`` along ``axes``, member ``index(rank, *axes)`` being ``rank`` itself.

        Coordinates run in the order in which the axes are named here, the last one fastest.
        """
        position = self._position(rank)
        offsets = self._offsets(axes)
        return self._at(position - offsets[self._index(position, axes)], offsets)

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups along ``axes``: each rank is in one of them."""
        offsets = self._offsets(axes)
        others = [name for name, _ in self.axes if name not in axes]
        return tuple(self._at(first, offsets) for first in self._offsets(others))

    def regroup(self, *axes: tuple[str, int]) -> Mesh:
        """The same ranks in the same order under other axes."""
        return replace(Mesh(axes).fit(self.ranks_total), order=self.order)

    def among(self, members: Sequence[int]) -> Mesh:
        """The same mesh with each rank called by its place in ``members``, which has all of them, in any sequence.

        Members that are not the ranks of this mesh are called by their places already.
        """
        places = {rank: place for place, rank in enumerate(members)}
        if places.keys() != set(range(self.ranks_total)):
            return self
        return replace(self, order=tuple(places[rank] for rank in self.order or range(self.ranks_total)))

    def fit(self, ranks: int) -> Mesh:
        """This mesh, if it spans just ``ranks`` ranks; PlanError if not."""
        if self.ranks_total != ranks:
            raise PlanError(
                f"the mesh {self} has {self.ranks_total} places for {ranks} ranks",
                "the sizes of the axes multiply to the number of ranks",
                f"start {self.ranks_total} ranks, or give axes whose sizes multiply to {ranks}",
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """The mesh as dicts and lists."""
        return {"axes": [[name, size] for name, size in self.axes], "order": self.order and pack(self.order)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Mesh:
        """The mesh that ``to_json`` gave."""
        order = value["order"] and tuple(unpack(value["order"]))
        return cls(tuple((name, size) for name, size in value["axes"]), order)

    # ---- positions: places in mesh order ---------------------------------------------------------------------------

    @cached_property
    def _strides(self) -> dict[str, tuple[int, int]]:
        strides, stride = {}, 1
        for name, size in reversed(self.axes):
            strides[name] = stride, size
            stride *= size
        return strides

    @cached_property
    def _positions(self) -> tuple[int, ...]:
        positions = [0] * self.ranks_total
        for position, rank in enumerate(self.order or ()):
            positions[rank] = position
        return tuple(positions)

    def _stride_and_size(self, axis: str) -> tuple[int, int]:
        return self._strides.get(axis, (1, 1))

    def _position(self, rank: int) -> int:
        if not 0 <= rank < self.ranks_total:
            raise PlanError(f"rank {rank} is not in the mesh {self}", f"its ranks are 0 to {self.ranks_total - 1}")
        return rank if self.order is None else self._positions[rank]

    def _index(self, position: int, axes: Sequence[str]) -> int:
        index = 0
        for axis in axes:
            stride, size = self._stride_and_size(axis)
            index = index * size + position // stride % size
        return index

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """How far each member of a group along ``axes`` is from the first one."""
        if len(set(axes)) < len(axes):
            raise PlanError(f"the axes {', '.join(axes)} name one twice", "a group runs along each axis once")
        offsets = [0]
        for axis in axes:
            stride, size = self._stride_and_size(axis)
            offsets = [offset + stride * coord for offset in offsets for coord in range(size)]
        return offsets

    def _at(self, first: int, offsets: list[int]) -> tuple[int, ...]:
        if self.order is None:
            return tuple(first + offset for offset in offsets)
        return tuple(self.order[first + offset] for offset in offsets)


def _check_axes(axes: tuple[tuple[str, int], ...]) -> None:
    names = [name for name, _ in axes]
    for name, size in axes:
        if not name or names.count(name) > 1:
            raise PlanError(f"axis {name!r} among {names} is no name of its own", "axes are told apart by name")
        if size < 1:
            raise PlanError(
                f"axis {name} has size {size}",
                "an axis has at least one coordinate",
                f"give {name} a size of 1 or more, or leave it out",
            )


def _check_order(order: Sequence[int], mesh: Mesh) -> None:
    if sorted(order) != list(range(mesh.ranks_total)):
        raise PlanError(
            f"the order of the mesh {mesh}, of {len(order)} entries, does not name each rank once",
            f"it must be a permutation of 0 to {mesh.ranks_total - 1}",
            "leave order out for 0, 1, 2 ...",
        )
