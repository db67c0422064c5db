"""The rows of a matrix of tests: every pair of choices that can be is in one, and no row is that cannot be."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from tests.support.pairs import Row, all_pairs, met, pairs_of

AXES = st.lists(st.integers(1, 4), min_size=2, max_size=5).map(
    lambda sizes: {f"axis {number}": list(range(size)) for number, size in enumerate(sizes)}
)


@st.composite
def refused(draw: st.DrawFn) -> tuple[dict[str, list[int]], list[Row]]:
    """Axes, and parts of rows that are refused: one, two or three choices that do not go together."""
    axes = draw(AXES)
    some = st.lists(st.sampled_from(sorted(axes)), min_size=1, max_size=3, unique=True)
    parts = [{axis: draw(st.sampled_from(axes[axis])) for axis in names} for names in draw(st.lists(some, max_size=6))]
    return axes, parts


@given(refused())
def test_every_two_choices_meet_wherever_a_possible_row_has_both(given: tuple[dict[str, list[int]], list[Row]]) -> None:
    axes, parts = given

    def possible(row: Row) -> bool:
        return not any(part.items() <= row.items() for part in parts)

    every = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    expected = {pair for row in every if possible(row) for pair in met(row)}
    rows = all_pairs(axes, possible)
    assert {pair for row in rows for pair in met(row)} == expected
    assert all(possible(row) for row in rows) and all(list(row) == list(axes) for row in rows)


@given(AXES)
def test_there_are_far_fewer_rows_than_combinations(axes: dict[str, list[int]]) -> None:
    rows, sizes = all_pairs(axes), sorted((len(values) for values in axes.values()), reverse=True)
    assert sizes[0] * sizes[1] <= len(rows) <= 2 * sizes[0] * sizes[1]
    assert len({tuple(row.values()) for row in rows}) == len(rows)


@given(AXES)
def test_the_rows_are_the_same_at_each_call(axes: dict[str, list[int]]) -> None:
    assert all_pairs(axes) == all_pairs(axes)


def test_a_pair_is_of_two_axes() -> None:
    assert list(pairs_of({"a": [1, 2], "b": [1]})) == [frozenset({("a", 1), ("b", 1)}), frozenset({("a", 2), ("b", 1)})]
