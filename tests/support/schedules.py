"""Pipelines of all sizes to try schedules with."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st

from hpctrain.schedule.action import Schedule
from hpctrain.schedule.kinds import SCHEDULES, Shape, find, make

RANKS, MICROBATCHES, CHUNKS = 16, 64, 4
LARGEST = Shape(RANKS, MICROBATCHES, CHUNKS, RANKS)

kinds = st.sampled_from(list(SCHEDULES))


def examples(number: int) -> settings:
    """The same examples each time, however long one takes."""
    return settings(derandomize=True, deadline=None, max_examples=number)


@st.composite
def shapes(draw, kind: str, ranks: int = RANKS, microbatches: int = MICROBATCHES) -> Shape:
    """Any shape that a kind can have, with fewer micro-batches than ranks too."""
    p, m = draw(st.integers(1, ranks)), draw(st.integers(1, microbatches))
    chunks = draw(st.sampled_from(find(kind).chunks or range(1, CHUNKS + 1)))
    return Shape(p, m, chunks, draw(st.integers(p, p + m)) if find(kind).grouped else p)


def build(kind: str, shape: Shape) -> Schedule:
    """The schedule of that kind and shape."""
    group = shape.group if find(kind).grouped else None
    return make(kind, shape.ranks, shape.microbatches, shape.chunks, group)


@st.composite
def schedules(draw, ranks: int = RANKS, microbatches: int = MICROBATCHES):
    """A schedule of any kind and shape."""
    kind = draw(kinds)
    return build(kind, draw(shapes(kind, ranks, microbatches)))
