"""A unit of cut parameters on a rank: it owns what a checkpoint's layouts give it, and an optimizer sees no gaps."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from hpctrain.comm.group import SoloGroup
from hpctrain.parallel.place import build
from hpctrain.parallel.units import Kind, Part, Ranks
from hpctrain.plan.layout import Cut
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.units import SHARD, STAGES, Member, Unit, arrange

CUTS = {"whole": (), "heads": (Cut(0, ("tp", "tp_copy")),), "kv": (Cut(0, ("tp",)),)}
members = st.lists(
    st.tuples(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.booleans(), st.sampled_from(list(CUTS))),
    min_size=1,
    max_size=7,
).map(lambda rows: [
    Member(f"p{number}", tuple(shape), decay, "float64", "block", False, CUTS[cut])
    for number, (shape, decay, cut) in enumerate(rows)
])  # fmt: skip
meshes = st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 2)).map(
    lambda sizes: Mesh(((SHARD, sizes[0]), ("tp", sizes[1]), ("tp_copy", sizes[2])))
)


class One(SoloGroup):
    """A rank of a group of which the others are not there: enough to lay memory out."""

    def __init__(self, size: int, rank: int) -> None:
        super().__init__()
        self.size, self.rank = size, rank


def numbers(name: str, first: int, out: Tensor) -> None:
    """Every element is its number in the whole parameter."""
    out.copy_(torch.arange(first, first + out.numel()))


def part_of(unit: Unit, mesh: Mesh, rank: int, stage: int = 1) -> Part:
    """The unit as a rank of the mesh has it."""
    boxes = {slot.name: slot.box(mesh, rank) for slot in unit.slots}
    parameters = {name: nn.Parameter(torch.empty(box.shape, dtype=torch.float64)) for name, box in boxes.items()}
    inner = One(mesh.size(SHARD), mesh.index(rank, SHARD))
    (part,) = build([unit], parameters, STAGES[stage], Ranks(inner), fill=numbers, box=lambda slot: boxes[slot.name])
    return part


@given(members=members, mesh=meshes, stage=st.sampled_from([1, 2, 3]))
def test_a_rank_owns_the_elements_that_the_layout_gives_it(members: list[Member], mesh: Mesh, stage: int) -> None:
    (unit,) = arrange(members, mesh)
    for rank in range(mesh.ranks_total):
        part = part_of(unit, mesh, rank, stage)
        for slot in unit.slots:
            runs = unit.layout(slot, (SHARD,), "float64").runs(mesh, rank)
            owned = [element for start, length in runs for element in range(start, start + length)]
            share = part.share(slot, part.master)
            assert share.tolist() == owned
            assert part.first(slot) == owned[0] if owned else share.numel() == 0


@given(members=members, mesh=meshes)
def test_over_the_ranks_that_count_them_each_element_is_owned_once(members: list[Member], mesh: Mesh) -> None:
    (unit,) = arrange(members, mesh)
    found: dict[str, list[int]] = {slot.name: [] for slot in unit.slots}
    for rank in range(mesh.ranks_total):
        part = part_of(unit, mesh, rank)
        for slot in unit.slots:
            if mesh.index(rank, *({"tp", "tp_copy"} - set(slot.axes))) == 0:
                found[slot.name] += part.share(slot, part.master).long().tolist()
    for slot in unit.slots:
        assert sorted(found[slot.name]) == list(range(prod(slot.shape)))


@given(members=members, mesh=meshes)
def test_gaps_are_what_no_parameter_fills(members: list[Member], mesh: Mesh) -> None:
    (unit,) = arrange(members, mesh)
    for rank in range(mesh.ranks_total):
        part = part_of(unit, mesh, rank)
        gaps = [place for start, stop in part.gaps() for place in range(start, stop)]
        filled = [slot.start + n for slot in unit.slots for n in range(part.boxes[slot.name].size)]
        assert sorted(gaps + filled) == list(range(unit.total))
    first = part_of(unit, mesh, 0)
    assert all(start == stop for start, stop in first.gaps())  # it has the largest boxes


@given(members=members, mesh=meshes)
def test_an_optimizer_gets_each_kind_in_runs_without_gaps(members: list[Member], mesh: Mesh) -> None:
    (unit,) = arrange(members, mesh)
    kinds = {Kind(slot.axes, slot.decay) for slot in unit.slots}
    for rank in range(mesh.ranks_total):
        part = part_of(unit, mesh, rank)
        found = part.flats()
        assert found.keys() == kinds  # the same on every rank, also where it owns nothing of one
        for kind, flats in found.items():
            slots = {slot.name: slot for slot in unit.slots if Kind(slot.axes, slot.decay) == kind}
            for flat in flats:
                edges = [0, *(edge for piece in flat.pieces for edge in (piece.start, piece.stop)), len(flat.parameter)]
                assert edges[::2] == edges[1::2] and flat.decay == kind.decay
                for piece in flat.pieces:
                    expected = torch.arange(piece.first, piece.first + piece.stop - piece.start)
                    assert flat.parameter[piece.start : piece.stop].tolist() == expected.tolist()
            pieces = [piece for flat in flats for piece in flat.pieces]
            owned = {name: part.share(slot, part.master).numel() for name, slot in slots.items()}
            assert {p.name: p.stop - p.start for p in pieces} == {name: size for name, size in owned.items() if size}
            starts = [flat.parameter.storage_offset() for flat in flats if len(flat.parameter)]
            assert all(a < b for a, b in pairwise(starts))


@given(members=members, mesh=meshes)
def test_a_parameter_is_a_view_of_its_box_in_the_shape_of_the_box(members: list[Member], mesh: Mesh) -> None:
    (unit,) = arrange(members, mesh)
    for rank in range(mesh.ranks_total):
        part = part_of(unit, mesh, rank)
        part.full.copy_(torch.arange(unit.total))
        for slot in unit.slots:
            box, parameter = part.boxes[slot.name], part.parameters[slot.name]
            assert parameter.shape == box.shape
            assert parameter.flatten().tolist() == list(range(slot.start, slot.start + box.size))
