from __future__ import annotations

import json
from itertools import chain
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.errors import PlanError
from hpctrain.plan.mesh import Mesh

NAMES = ("pp", "dp", "cp", "tp")
PROPERTY = settings(derandomize=True, deadline=None, max_examples=200)


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True))
    axes = tuple((name, draw(st.integers(1, 4))) for name in names)
    ranks = range(prod(size for _, size in axes))
    return Mesh(axes, draw(st.none() | st.permutations(ranks).map(tuple)))


# Any axes in any sequence, with those that a mesh does not have among them.
some_axes = st.lists(st.sampled_from((*NAMES, "ep")), unique=True)


@PROPERTY
@given(meshes(), some_axes)
def test_groups_hold_each_rank_once_and_are_the_groups_of_their_members(mesh, axes):
    groups = mesh.groups(*axes)
    assert sorted(chain(*groups)) == list(range(mesh.ranks_total))
    for group in groups:
        assert len(group) == mesh.size(*axes)
        for index, rank in enumerate(group):
            assert mesh.ranks(rank, *axes) == group
            assert mesh.index(rank, *axes) == index


@PROPERTY
@given(meshes(), some_axes)
def test_members_of_a_group_differ_only_in_their_coordinates_along_it(mesh, axes):
    for group in mesh.groups(*axes):
        coords = [mesh.coord(rank) for rank in group]
        assert len({tuple(coord.get(axis, 0) for axis in axes) for coord in coords}) == len(group)
        assert len({tuple(at for axis, at in coord.items() if axis not in axes) for coord in coords}) == 1


@PROPERTY
@given(meshes())
def test_coordinates_count_the_ranks_in_mesh_order_row_major(mesh):
    for position, rank in enumerate(mesh.order or range(mesh.ranks_total)):
        count = 0
        for (name, size), at in zip(mesh.axes, mesh.coord(rank).values(), strict=True):
            count = count * size + at
            assert at == mesh.index(rank, name)
        assert count == position


@PROPERTY
@given(meshes(), st.data())
def test_a_regrouped_mesh_has_the_same_ranks_in_the_same_order(mesh, data):
    outer = data.draw(st.sampled_from([n for n in range(1, mesh.ranks_total + 1) if mesh.ranks_total % n == 0]))
    regrouped = mesh.regroup(("edp", outer), ("ep", mesh.ranks_total // outer))
    names = [name for name, _ in mesh.axes]
    assert regrouped.ranks(0, "edp", "ep") == mesh.ranks(0, *names)
    assert regrouped.order == mesh.order
    assert regrouped.regroup(*mesh.axes) == mesh


@PROPERTY
@given(meshes())
def test_a_mesh_comes_back_from_json_as_the_same_value(mesh):
    back = Mesh.from_json(json.loads(json.dumps(mesh.to_json())))
    assert back == mesh
    assert hash(back) == hash(mesh)


def test_an_order_that_counts_up_is_no_order():
    assert Mesh((("dp", 2), ("tp", 2)), (0, 1, 2, 3)) == Mesh((("dp", 2), ("tp", 2)))


def test_a_group_lists_its_ranks_by_the_axes_as_they_are_named():
    mesh = Mesh((("dp", 2), ("cp", 2), ("tp", 2)))
    assert mesh.ranks(1, "dp", "cp") == (1, 3, 5, 7)
    assert mesh.ranks(1, "cp", "dp") == (1, 5, 3, 7)
    assert mesh.ranks(1, "cp") == (1, 3)
    assert mesh.groups("tp") == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_rank_is_alone_along_an_axis_that_the_mesh_does_not_have():
    mesh = Mesh((("dp", 4),), (3, 1, 2, 0))
    assert mesh.size("tp") == 1
    assert mesh.index(2, "tp") == 0
    assert mesh.ranks(2, "tp") == mesh.ranks(2) == (2,)


def test_a_mesh_without_axes_is_one_rank():
    mesh = Mesh(())
    assert mesh.ranks_total == 1
    assert mesh.groups() == mesh.groups("dp") == ((0,),)
    assert str(mesh) == "one rank"


def test_a_mesh_of_131072_ranks_answers_without_looking_at_every_rank():
    mesh = Mesh((("pp", 16), ("dp", 64), ("cp", 16), ("tp", 8)))
    assert mesh.coord(131_071) == {"pp": 15, "dp": 63, "cp": 15, "tp": 7}
    assert mesh.ranks(131_071, "pp") == tuple(range(8191, 131_072, 8192))
    assert vars(mesh).keys() <= {"axes", "order", "ranks_total", "_strides"}  # no table of ranks was made


WRONG = {
    "fit": (
        lambda: Mesh((("dp", 2), ("tp", 3))).fit(8),
        "the mesh dp 2 x tp 3 has 6 places for 8 ranks\n"
        "  the sizes of the axes multiply to the number of ranks\n"
        "  start 6 ranks, or give axes whose sizes multiply to 8",
    ),
    "regroup": (
        lambda: Mesh((("dp", 4), ("cp", 2))).regroup(("edp", 3), ("ep", 2)),
        "the mesh edp 3 x ep 2 has 6 places for 8 ranks\n"
        "  the sizes of the axes multiply to the number of ranks\n"
        "  start 6 ranks, or give axes whose sizes multiply to 8",
    ),
    "order": (
        lambda: Mesh((("dp", 4),), (0, 1, 1, 2)),
        "the order of the mesh dp 4, of 4 entries, does not name each rank once\n"
        "  it must be a permutation of 0 to 3\n"
        "  leave order out for 0, 1, 2 ...",
    ),
    "short order": (
        lambda: Mesh((("dp", 4),), (0, 1)),
        "the order of the mesh dp 4, of 2 entries, does not name each rank once\n"
        "  it must be a permutation of 0 to 3\n"
        "  leave order out for 0, 1, 2 ...",
    ),
    "size": (
        lambda: Mesh((("dp", 0),)),
        "axis dp has size 0\n  an axis has at least one coordinate\n  give dp a size of 1 or more, or leave it out",
    ),
    "name": (
        lambda: Mesh((("dp", 2), ("dp", 2))),
        "axis 'dp' among ['dp', 'dp'] is no name of its own\n  axes are told apart by name",
    ),
    "twice": (
        lambda: Mesh((("dp", 2),)).ranks(0, "dp", "dp"),
        "the axes dp, dp name one twice\n  a group runs along each axis once",
    ),
    "rank": (
        lambda: Mesh((("dp", 2),)).coord(2),
        "rank 2 is not in the mesh dp 2\n  its ranks are 0 to 1",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_mesh_that_cannot_be_is_refused_with_the_reason(case):
    wrong, message = WRONG[case]
    with pytest.raises(PlanError) as caught:
        wrong()
    assert str(caught.value) == message


@PROPERTY
@given(meshes(), st.randoms(use_true_random=False))
def test_a_mesh_among_members_has_each_of_them_where_its_rank_is(mesh, random):
    members = list(range(mesh.ranks_total))
    random.shuffle(members)
    among = mesh.among(members)
    assert [among.coord(place) for place in range(len(members))] == [mesh.coord(rank) for rank in members]


def test_members_with_numbers_of_another_job_are_called_by_their_places():
    mesh = Mesh((("dp", 4),), (2, 0, 3, 1))
    assert mesh.among((8, 9, 10, 11)) == mesh.among(()) == mesh


def test_a_group_in_mesh_order_sees_a_mesh_without_an_order():
    mesh = Mesh((("dp", 2), ("tp", 2)), (2, 0, 3, 1))
    assert mesh.among(mesh.ranks(0, "dp", "tp")) == Mesh(mesh.axes)
