"""All pairs: few combinations of choices in which any two choices meet, instead of every combination there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

Row = dict[str, Any]
"""A value for each axis, or for some of them."""
Pair = frozenset[tuple[str, Any]]
"""Two axes and a value of each."""


def all_pairs(axes: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Rows in which every two values of two axes meet, wherever a possible row has both; the same rows at each call.

    ``possible`` is also asked about rows that have only some axes yet: what it refuses stays refused when more come.
    """
    rows: list[Row] = []
    open_ = pairs_of(axes)
    while open_:
        first = next(iter(open_))
        row = _filled(dict(first), axes, open_, possible)
        if row is None:
            del open_[first]  # no row has both
            continue
        rows.append({axis: row[axis] for axis in axes})
        for pair in met(row):
            open_.pop(pair, None)
    return rows


def pairs_of(axes: Mapping[str, Sequence[Any]]) -> dict[Pair, None]:
    """Every pair that there is, in a fixed order."""
    return {
        frozenset({(a, x), (b, y)}): None for a, b in combinations(axes, 2) for x in axes[a] for y in axes[b]
    }  # fmt: skip


def met(row: Row) -> Iterable[Pair]:
    """The pairs that a row has."""
    return (frozenset(two) for two in combinations(row.items(), 2))


def _filled(row: Row, axes: Mapping[str, Sequence[Any]], open_: Mapping[Pair, None], possible) -> Row | None:
    """The row with a value for each axis, each the one that meets most others for the first time; None if none fits."""
    if not possible(row):
        return None
    axis = next((axis for axis in axes if axis not in row), None)
    if axis is None:
        return row

    def gain(value: Any) -> int:
        return sum(frozenset({(axis, value), other}) in open_ for other in row.items())

    fillings = (_filled(row | {axis: x}, axes, open_, possible) for x in sorted(axes[axis], key=gain, reverse=True))
    return next((filling for filling in fillings if filling is not None), None)
