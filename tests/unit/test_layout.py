from __future__ import annotations

import json
from dataclasses import replace
from math import prod
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hpctrain.plan.layout
from hpctrain.errors import PlanError
from hpctrain.plan.layout import ITEMSIZE, Box, Cut, Flat, Layout, piece
from hpctrain.plan.mesh import Mesh

NAMES = ("pp", "dp", "cp", "tp")
PROPERTY = settings(derandomize=True, deadline=None, max_examples=250)

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    bounds = [sorted((draw(st.integers(0, length)), draw(st.integers(0, length)))) for length in shape]
    return Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    axes = tuple((name, draw(st.integers(1, 3))) for name in names)
    ranks = range(prod(size for _, size in axes))
    return Mesh(axes, draw(st.none() | st.permutations(ranks).map(tuple)))


@st.composite
def layouts_on_meshes(draw: st.DrawFn) -> tuple[Layout, Mesh]:
    """Any mesh, any shape, dims cut over any axes (also such that the mesh lacks), what is left cut flat or not."""
    mesh, shape = draw(meshes()), draw(shapes)
    axes = draw(st.permutations(NAMES))
    ends = sorted(draw(st.lists(st.integers(0, len(axes)), min_size=len(shape), max_size=len(shape))))
    shares = [tuple(axes[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    dims = draw(st.permutations(range(len(shape))))
    cuts = tuple(Cut(dim, share) for dim, share in zip(dims, shares, strict=True) if share)
    layout = Layout(shape, draw(st.sampled_from(sorted(ITEMSIZE))), cuts)
    free = tuple(axes[ends[-1] if ends else 0 :])
    if not draw(st.booleans()):
        return layout, mesh
    largest = max(layout.box(mesh, rank).size for rank in range(mesh.ranks_total))
    before, after = draw(st.integers(0, 30)), draw(st.integers(0, 30))
    return replace(layout, flat=Flat(free[: draw(st.integers(0, 4))], before, before + largest + after)), mesh


def indices(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(prod(shape), dtype=np.int64).reshape(shape)


def elements(shape: tuple[int, ...], held: tuple[Box, ...]) -> list[int]:
    """The global index of each element of the boxes, one box after another."""
    whole = indices(shape)
    return [int(index) for box in held for index in whole[box.slices].ravel()]


# ---- Box -----------------------------------------------------------------------------------------------------------


@PROPERTY
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape), boxes(shape))))
def test_boxes_meet_in_the_elements_that_both_have(case):
    shape, a, b = case
    meet = a.meet(b)
    both = sorted(set(elements(shape, (a,))) & set(elements(shape, (b,))))
    assert b.meet(a) == meet
    assert (meet is None) == (not both)
    if meet:
        assert elements(shape, (meet,)) == both
        inner = indices(shape)[a.slices][meet.within(a).slices]
        assert inner.ravel().tolist() == both


@PROPERTY
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape))))
def test_the_runs_of_a_box_are_its_elements_and_none_of_them_touch(case):
    shape, box = case
    runs = list(box.runs(shape))
    assert [index for offset, length in runs for index in range(offset, offset + length)] == elements(shape, (box,))
    assert all(a + length < b for (a, length), (b, _) in zip(runs, runs[1:], strict=False))


@PROPERTY
@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), boxes(shape))), st.data())
def test_part_of_a_box_is_a_few_boxes_with_just_its_elements_in_their_order(case, data):
    shape, box = case
    start, stop = sorted(data.draw(st.tuples(st.integers(0, box.size), st.integers(0, box.size))))
    parts = box.part(start, stop)
    assert elements(shape, parts) == elements(shape, (box,))[start:stop]
    assert all(part.size for part in parts)
    assert len(parts) <= max(1, 2 * len(shape) - 1)


def test_an_interval_inside_three_dims_is_five_boxes():
    parts = Box((0, 0, 0), (3, 3, 3)).part(5, 23)
    assert [(part.start, part.shape) for part in parts] == [
        ((0, 1, 2), (1, 1, 1)),
        ((0, 2, 0), (1, 1, 3)),
        ((1, 0, 0), (1, 3, 3)),
        ((2, 0, 0), (1, 1, 3)),
        ((2, 1, 0), (1, 1, 2)),
    ]


def test_a_box_without_dims_has_one_element():
    box = Box((), ())
    assert box.size == 1
    assert box.part(0, 1) == (box,)
    assert list(box.runs(())) == [(0, 1)]
    assert box.meet(box) == box


@PROPERTY
@given(st.integers(0, 50), st.integers(1, 12))
def test_pieces_follow_each_other_and_differ_by_at_most_one_the_first_being_larger(length, parts):
    pieces = [piece(length, parts, index) for index in range(parts)]
    lengths = [stop - start for start, stop in pieces]
    assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), length]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] <= 1


# ---- Layout --------------------------------------------------------------------------------------------------------


@PROPERTY
@given(layouts_on_meshes())
def test_the_ranks_of_one_replica_hold_each_element_once(case):
    layout, mesh = case
    held_by = {rank: elements(layout.shape, layout.boxes(mesh, rank)) for rank in range(mesh.ranks_total)}
    # Ranks that are at one place along all axes of replicas make up one whole tensor.
    for replica in mesh.groups(*(name for name, _ in mesh.axes if name in layout.axes)):
        assert sorted(index for rank in replica for index in held_by[rank]) == list(range(layout.size))


@PROPERTY
@given(layouts_on_meshes())
def test_replicas_hold_the_same(case):
    layout, mesh = case
    for replicas in mesh.groups(*layout.replicas(mesh)):
        assert len({(layout.boxes(mesh, rank), layout.interval(mesh, rank)) for rank in replicas}) == 1


@PROPERTY
@given(layouts_on_meshes(), st.integers(0, 9), st.sampled_from((8, 24, 1 << 20)))
def test_each_element_has_one_writer_who_holds_it(case, turn, write_bytes):
    layout, mesh = case
    written = []
    with patch.object(hpctrain.plan.layout, "WRITE_BYTES", write_bytes):
        for rank in range(mesh.ranks_total):
            mine = elements(layout.shape, layout.writes(mesh, rank, turn))
            assert set(mine) <= set(elements(layout.shape, layout.boxes(mesh, rank)))
            written += mine
    assert sorted(written) == list(range(layout.size))


@PROPERTY
@given(layouts_on_meshes())
def test_the_runs_of_a_rank_are_its_elements_and_none_of_them_touch(case):
    layout, mesh = case
    for rank in range(mesh.ranks_total):
        runs = list(layout.runs(mesh, rank))
        held = [index for offset, length in runs for index in range(offset, offset + length)]
        assert held == elements(layout.shape, layout.boxes(mesh, rank))
        assert all(a + length < b for (a, length), (b, _) in zip(runs, runs[1:], strict=False))


@PROPERTY
@given(layouts_on_meshes())
def test_what_a_rank_holds_is_one_run_when_only_dim_0_is_cut(case):
    layout, mesh = case
    cut = replace(layout, cuts=tuple(cut for cut in layout.cuts if cut.dim == 0), flat=None)
    flat = replace(cut, flat=Flat(cut.replicas(mesh), 3, 3 + cut.size))
    for rank in range(mesh.ranks_total):
        assert len(list(cut.runs(mesh, rank))) == (cut.box(mesh, rank).size > 0)
        assert len(list(flat.runs(mesh, rank))) <= 1


@PROPERTY
@given(layouts_on_meshes())
def test_the_interval_of_a_rank_has_as_many_elements_as_its_boxes(case):
    layout, mesh = case
    for rank in range(mesh.ranks_total):
        start, stop = layout.interval(mesh, rank)
        assert 0 <= start <= stop <= layout.box(mesh, rank).size
        assert stop - start == sum(box.size for box in layout.boxes(mesh, rank))


@PROPERTY
@given(layouts_on_meshes())
def test_a_layout_comes_back_from_json_as_the_same_value(case):
    layout, mesh = case
    back = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert back == layout
    assert hash(back) == hash(layout)
    for box in layout.boxes(mesh, 0):
        assert Box.from_json(json.loads(json.dumps(box.to_json()))) == box


def test_tensors_of_one_buffer_fill_the_interval_of_each_rank():
    mesh = Mesh((("dp", 3),))
    tensors = [((4, 3), 0), ((), 12), ((0, 5), 13), ((5,), 13)]
    layouts = [Layout(shape, "float32", flat=Flat(("dp",), offset, 18)) for shape, offset in tensors]
    sizes = [[stop - start for start, stop in (layout.interval(mesh, r) for layout in layouts)] for r in range(3)]
    assert sizes == [[6, 0, 0, 0], [6, 0, 0, 0], [0, 1, 0, 5]]
    assert layouts[0].boxes(mesh, 1) == (Box((2, 0), (2, 3)),)


def test_a_dim_shorter_than_its_pieces_leaves_some_ranks_with_nothing():
    mesh = Mesh((("tp", 4),))
    layout = Layout((2, 3), "float32", (Cut(0, ("tp",)),))
    assert [layout.boxes(mesh, rank) for rank in range(4)] == [
        (Box((0, 0), (1, 3)),),
        (Box((1, 0), (1, 3)),),
        (),
        (),
    ]


def test_replicas_share_a_large_tensor_evenly_in_whole_mebibytes():
    mesh = Mesh((("dp", 4),))
    layout = Layout((10, 1 << 18), "float32")  # 10 MiB, a MiB a row
    written = [layout.writes(mesh, rank) for rank in range(4)]
    assert [sum(box.shape[0] for box in boxes) for boxes in written] == [3, 3, 2, 2]
    assert [box for boxes in written for box in boxes] == [
        Box((row, 0), (rows, 1 << 18)) for row, rows in ((0, 3), (3, 3), (6, 2), (8, 2))
    ]


def test_a_small_tensor_is_written_by_one_replica_in_turn():
    mesh = Mesh((("dp", 3), ("tp", 2)))
    layout = Layout((6,), "bfloat16", (Cut(0, ("tp",)),))
    writers = [[rank for rank in range(6) if layout.writes(mesh, rank, turn)] for turn in range(4)]
    assert writers == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_a_layout_counts_the_bytes_of_the_global_tensor():
    assert Layout((3, 5), "bfloat16").nbytes == 30
    assert Layout((), "float64").nbytes == 8
    assert Layout((0, 5), "float32").nbytes == 0


WRONG = {
    "dtype": (
        lambda: Layout((2,), "float31"),
        "dtype 'float31' has no known size\n  a layout counts bytes\n  use one of float64, float32, bfloat16, float16, "
        "float8_e4m3fn, float8_e5m2, int64, int32, uint8, bool, complex64",
    ),
    "shape": (
        lambda: Layout((2, -1), "float32"),
        "shape [2, -1] has a negative dim\n  a dim has 0 elements or more",
    ),
    "dim": (
        lambda: Layout((2, 3), "float32", (Cut(2, ("tp",)),)),
        "cuts of dims [2] do not fit shape [2, 3]\n"
        "  a cut names a dim of the tensor, counted from 0, and each dim is cut once\n"
        "  name several axes in one cut to split a dim over all of them",
    ),
    "dim twice": (
        lambda: Layout((2, 3), "float32", (Cut(0, ("tp",)), Cut(0, ("ep",)))),
        "cuts of dims [0, 0] do not fit shape [2, 3]\n"
        "  a cut names a dim of the tensor, counted from 0, and each dim is cut once\n"
        "  name several axes in one cut to split a dim over all of them",
    ),
    "axis twice": (
        lambda: Layout((2, 3), "float32", (Cut(0, ("tp",)),), Flat(("dp", "tp"), 0, 6)),
        "the axes tp, dp, tp name one twice\n"
        "  ranks along an axis hold different parts of one dim, or of the flat buffer\n"
        "  use each axis in one cut, or in the flat buffer",
    ),
    "offset": (
        lambda: Layout((2,), "float32", flat=Flat(("dp",), -1, 6)),
        "flat offset -1 is before its buffer\n  it is counted from the start",
    ),
    "total": (
        lambda: Layout((2, 3), "float32", flat=Flat(("dp",), 4, 9)).boxes(Mesh((("dp", 2),)), 1),
        "a box of 6 elements at offset 4 ends after its flat buffer of 9\n"
        "  so rank 1 would lose elements of a tensor of shape [2, 3]\n"
        "  leave room for the largest box on all ranks",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_layout_that_cannot_be_is_refused_with_the_reason(case):
    wrong, message = WRONG[case]
    with pytest.raises(PlanError) as caught:
        wrong()
    assert str(caught.value) == message
