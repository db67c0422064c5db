"""Units: the parameters that are gathered, reduced and updated together, as values.

The parameters of a unit lie one after another in a flat buffer, those with weight decay first: so a rank, which owns
one interval of the buffer, has at most two runs that an optimizer treats alike. Nothing is padded; intervals differ by
at most one element, and may be empty.

Where tensor parallelism cuts a parameter, its place in the buffer has room for the largest box of it, so that offsets
are the same on all ranks; a rank whose box is smaller leaves the rest of its place unused.

A unit is a module that a person or the model's plan names, usually a block. What no unit names is *held*: it is used
by more than one module or around all of them, as embeddings are, so it stays whole while a step runs. Held parameters
are grouped by the first part of their names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import groupby
from math import prod

from hpctrain.errors import ConfigError
from hpctrain.plan.layout import ITEMSIZE, Box, Cut, Flat, Layout, piece
from hpctrain.plan.mesh import Mesh

REPLICA, SHARD = "replica", "dp"  # axes: ranks that hold the same, and ranks that share one copy
PIPE = "pp"  # an axis: ranks that have other blocks
FAR, NEAR = "far", "near"  # axes that SHARD is made of, where neighbours keep something of their own


@dataclass(frozen=True)
class Stage:
    """What ranks share rather than hold each in full (Rajbhandari 2020, ZeRO)."""

    states: bool
    gradients: bool
    weights: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which units are cut; along the other one their gradients are summed."""
        return (SHARD,) if self.states else ()

    @property
    def replicas(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same."""
        return (REPLICA,) if self.states else (REPLICA, SHARD)


STAGES = {
    0: Stage(states=False, gradients=False, weights=False),
    1: Stage(states=True, gradients=False, weights=False),
    2: Stage(states=True, gradients=True, weights=False),
    3: Stage(states=True, gradients=True, weights=True),
}


@dataclass(frozen=True)
class Member:
    """A parameter and the unit that it belongs to."""

    name: str
    shape: tuple[int, ...]
    decay: bool
    dtype: str
    unit: str
    held: bool
    cuts: tuple[Cut, ...] = ()
    """How tensor parallelism cuts it: in dim 0 or not at all."""

    @classmethod
    def of(
        cls,
        name: str,
        shape: tuple[int, ...],
        decay: bool,
        dtype: str,
        modules: Collection[str],
        cuts: tuple[Cut, ...] = (),
    ) -> Member:
        """The parameter in the innermost of ``modules`` that it is in, else held."""
        around = [module for module in modules if name.startswith(f"{module}.")]
        first, dot, _ = name.partition(".")
        return cls(name, shape, decay, dtype, max(around, key=len, default=first if dot else ""), not around, cuts)


@dataclass(frozen=True)
class Slot:
    """Where a parameter lies in its unit, in elements."""

    name: str
    shape: tuple[int, ...]
    """Of the whole parameter."""
    decay: bool
    start: int
    stop: int
    cuts: tuple[Cut, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """Along which tensor parallelism cuts it."""
        return tuple(axis for cut in self.cuts for axis in cut.axes)

    def box(self, mesh: Mesh, rank: int) -> Box:
        """What a rank has of it before units are shared: all of it where nothing cuts it."""
        return Layout(self.shape, "float32", self.cuts).box(mesh, rank)


@dataclass(frozen=True)
class Unit:
    """Parameters end to end in one flat buffer."""

    name: str
    held: bool
    dtype: str
    slots: tuple[Slot, ...]

    @property
    def total(self) -> int:
        """Elements."""
        return self.slots[-1].stop

    @property
    def decayed(self) -> int:
        """How many elements have weight decay: the first ones."""
        return sum(slot.stop - slot.start for slot in self.slots if slot.decay)

    def interval(self, ranks: int, rank: int) -> tuple[int, int]:
        """Start and stop of what a rank owns."""
        return piece(self.total, ranks, rank)

    def layout(self, slot: Slot, axes: tuple[str, ...], dtype: str) -> Layout:
        """Where a tensor like the parameter, in ``dtype``, lies on ranks that share the unit along ``axes``."""
        return Layout(slot.shape, dtype, slot.cuts, Flat(axes, slot.start, self.total) if axes else None)


def arrange(members: Iterable[Member], mesh: Mesh | None = None) -> tuple[Unit, ...]:
    """Units in the order in which their first parameters come; each has one dtype. Empty parameters are in none.

    ``mesh`` is given where parameters are cut.
    """
    members = [member for member in members if prod(member.shape)]
    places = {_key(member): place for place, member in reversed(list(enumerate(members)))}
    ordered = sorted(members, key=lambda member: (places[_key(member)], not member.decay))
    return tuple(_unit(key, list(part), mesh) for key, part in groupby(ordered, key=_key))


def choose(stage: int, ranks: int, shard: int | None) -> tuple[tuple[str, int], ...]:
    """The axes of ``ranks`` data-parallel ranks, of which ``shard`` share one copy where it is given."""
    if shard is None or shard == ranks:
        return ((SHARD, ranks),)
    if not STAGES[stage].states:
        raise ConfigError(
            f"parallel.shard = {shard} with parallel.zero = {stage}",
            "stage 0 shares nothing: every rank has its own copy",
            "set parallel.zero to 1, 2 or 3, or leave parallel.shard out",
        )
    if ranks % shard:
        fitting = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise ConfigError(
            f"parallel.shard = {shard} does not divide {ranks} data-parallel ranks",
            "each copy of the model is shared by equally many ranks",
            f"set parallel.shard to one of {fitting}",
        )
    return ((REPLICA, ranks // shard), (SHARD, shard))


def neighbours(mesh: Mesh, near: int) -> Mesh:
    """The mesh with its ranks that share a copy cut into ``near`` neighbours, and those at the same place in each."""
    sharers = mesh.size(SHARD)
    if sharers % near:
        fitting = ", ".join(str(n) for n in range(1, sharers + 1) if sharers % n == 0)
        raise ConfigError(
            f"parallel.near = {near} does not divide {sharers} ranks that share one copy",
            "each part of the second copy is held by one of equally many neighbours",
            f"set parallel.near to one of {fitting}",
        )
    cut = {SHARD: ((FAR, sharers // near), (NEAR, near))}
    return mesh.regroup(*(part for axis in mesh.axes for part in cut.get(axis[0], (axis,))))


def room(units: Iterable[Unit], dtype: str | None = None, gather_bytes: int | None = None) -> int:
    """Bytes of gathered weights alive at once, besides held ones: as given, or one unit in use and one on its way.

    ``dtype`` is what weights multiply in, where that is not the units' own.
    """
    largest = max((unit.total * ITEMSIZE[dtype or unit.dtype] for unit in units if not unit.held), default=0)
    return max(largest, 2 * largest if gather_bytes is None else gather_bytes)


def _key(member: Member) -> tuple[str, bool, str]:
    return member.unit, member.held, member.dtype


def _unit(key: tuple[str, bool, str], members: list[Member], mesh: Mesh | None) -> Unit:
    slots, stop = [], 0
    for member in members:
        start, stop = stop, stop + _room(member, mesh)
        slots.append(Slot(member.name, member.shape, member.decay, start, stop, member.cuts))
    return Unit(*key, tuple(slots))


def _room(member: Member, mesh: Mesh | None) -> int:
    """Elements of the largest box of a parameter: that of the first rank."""
    layout = Layout(member.shape, member.dtype, member.cuts if mesh else ())
    return layout.box(mesh or Mesh(()), 0).size
