"""Units: every parameter once, decayed ones first, and intervals that cover them whatever the number of ranks."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from hpctrain.plan.layout import Flat, Layout
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.units import Member, arrange

MODULES = ("blocks.0", "blocks.1", "blocks.1.inner")
PREFIXES = ("embed.", "blocks.0.", "blocks.1.", "blocks.1.inner.", "blocks.10.", "head.", "")
members = st.lists(
    st.tuples(st.sampled_from(PREFIXES), st.lists(st.integers(0, 5), max_size=3), st.booleans(), st.booleans()),
    max_size=15,
).map(lambda rows: [
    Member.of(f"{prefix}p{number}", tuple(shape), decay, "float64" if double else "float32", MODULES)
    for number, (prefix, shape, decay, double) in enumerate(rows)
])  # fmt: skip


@given(members=members)
def test_every_parameter_with_elements_is_in_one_unit_of_its_module_and_dtype(members: list[Member]) -> None:
    units = arrange(members)
    found = {(slot.name, slot.shape, slot.decay, unit.dtype, unit.name, unit.held) for unit in units
             for slot in unit.slots}  # fmt: skip
    assert found == {(m.name, m.shape, m.decay, m.dtype, m.unit, m.held) for m in members if prod(m.shape)}
    assert sum(len(unit.slots) for unit in units) == len(found)


@given(members=members)
def test_slots_follow_without_gaps_the_decayed_ones_first(members: list[Member]) -> None:
    for unit in arrange(members):
        assert [slot.start for slot in unit.slots] == [0, *(slot.stop for slot in unit.slots)][:-1]
        assert all(slot.stop - slot.start == prod(slot.shape) for slot in unit.slots)
        assert all(slot.decay == (slot.stop <= unit.decayed) for slot in unit.slots)


@given(members=members, ranks=st.integers(1, 7))
def test_the_layouts_of_a_unit_give_each_rank_its_interval(members: list[Member], ranks: int) -> None:
    mesh = Mesh((("replica", 2), ("dp", ranks)))
    for unit in arrange(members):
        for rank in range(2 * ranks):
            layouts = [unit.layout(slot, ("dp",), "float32") for slot in unit.slots]
            bounds = [layout.interval(mesh, rank) for layout in layouts]
            start, stop = unit.interval(ranks, rank % ranks)
            assert sum(last - first for first, last in bounds) == stop - start


def test_a_parameter_belongs_to_the_innermost_unit_and_else_is_held() -> None:
    def of(name: str) -> tuple[str, bool]:
        member = Member.of(name, (1,), True, "float32", MODULES)
        return member.unit, member.held

    assert of("blocks.1.inner.weight") == ("blocks.1.inner", False)
    assert of("blocks.1.weight") == ("blocks.1", False)
    assert of("blocks.10.weight") == ("blocks", True)
    assert of("embed.tokens") == ("embed", True)
    assert of("scale") == ("", True)


def test_units_come_in_the_order_of_their_first_parameters() -> None:
    names = ("embed.w", "blocks.1.b", "blocks.0.w", "blocks.1.w", "head.w")
    units = arrange(Member.of(name, (3,), name.endswith("w"), "float32", MODULES) for name in names)
    assert [unit.name for unit in units] == ["embed", "blocks.1", "blocks.0", "head"]
    assert [slot.name for slot in units[1].slots] == ["blocks.1.w", "blocks.1.b"]


def test_a_unit_that_nobody_shares_is_not_cut() -> None:
    (unit,) = arrange([Member.of("head.w", (3, 2), True, "float32", MODULES)])
    assert unit.layout(unit.slots[0], (), "float32") == Layout((3, 2), "float32")
    assert unit.layout(unit.slots[0], ("dp",), "float32") == Layout((3, 2), "float32", flat=Flat(("dp",), 0, 6))
