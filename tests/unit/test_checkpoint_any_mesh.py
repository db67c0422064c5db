"""What any mesh saved loads under any other: pairs of meshes by chance, their ranks being threads."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.plan.layout import Cut, Flat, Layout
from hpctrain.plan.mesh import Mesh
from tests.support.saving import SAVES, Layouts, resume, save

AXES = ("pp", "dp", "cp", "tp", "ep")
MOST_RANKS = 12
DTYPES = ("float32", "bfloat16", "float64", "int64", "bool", "complex64", "float8_e4m3fn")
SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 12]), max_size=3).map(tuple)


@dataclass(frozen=True)
class Spread:
    """A tensor over a mesh: how it is cut, and at which coordinates of which axes it is held."""

    layout: Layout
    held: dict[str, frozenset[int]]

    def at(self, mesh: Mesh, rank: int) -> bool:
        """Whether a rank holds a part of it."""
        return all(mesh.index(rank, axis) in places for axis, places in self.held.items())


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Up to MOST_RANKS ranks on five axes, in any order."""
    sizes: dict[str, int] = {}
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, min(4, MOST_RANKS // prod(sizes.values()))))
    ranks = prod(sizes.values())
    return Mesh(tuple((axis, sizes[axis]) for axis in AXES), tuple(draw(st.permutations(range(ranks)))))


@st.composite
def spreads(draw: st.DrawFn, mesh: Mesh, shape: tuple[int, ...], dtype: str) -> Spread:
    """Each axis cuts a dim, or a flat buffer, or makes replicas, or only some of its coordinates hold the tensor."""
    uses = {axis: draw(st.sampled_from(["replica", "some", "flat", *range(len(shape))])) for axis in AXES}
    cuts = [Cut(dim, axes) for dim in range(len(shape)) if (axes := tuple(axis for axis in AXES if uses[axis] == dim))]
    flat_axes = tuple(axis for axis in AXES if uses[axis] == "flat")
    offset, more = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    flat = Flat(flat_axes, offset, offset + prod(shape) + more) if flat_axes else None
    some = [axis for axis in AXES if uses[axis] == "some"]
    held = {axis: draw(st.frozensets(st.integers(0, mesh.size(axis) - 1), min_size=1)) for axis in some}
    return Spread(Layout(shape, dtype, tuple(cuts), flat), held)


Kind = tuple[tuple[int, ...], str]  # a tensor's shape and dtype
KINDS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4)


@settings(max_examples=90)
@given(st.data(), meshes(), st.tuples(meshes(), meshes(), meshes()), KINDS)
def test_what_any_mesh_saved_loads_under_any_other(
    data: st.DataObject, one: Mesh, others: tuple[Mesh, ...], kinds: list[Kind]
):
    def drawn(mesh: Mesh) -> Callable[[int], Layouts]:
        found = {f"model/{number}": data.draw(spreads(mesh, *kind)) for number, kind in enumerate(kinds)}
        return lambda rank: {name: spread.layout for name, spread in found.items() if spread.at(mesh, rank)}

    with tempfile.TemporaryDirectory() as folder:
        save(Path(folder), drawn(one), one, way=data.draw(st.sampled_from(list(SAVES))))
        for other in others:
            assert resume(Path(folder), drawn(other), other) == 1
