"""Groups: one communicator for each distinct sequence of ranks of a mesh."""

from __future__ import annotations

import pytest
import torch

from hpctrain.cluster.world import World
from hpctrain.comm.groups import Groups
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CommConfig
from hpctrain.errors import CommError, PlanError
from hpctrain.plan.mesh import Mesh

pytestmark = pytest.mark.mpi(min_size=4)

MESHES = [
    Mesh((("dp", 4),)),
    Mesh((("dp", 2), ("tp", 2))),
    Mesh((("pp", 2), ("dp", 1), ("tp", 2))),
    Mesh((("dp", 2), ("tp", 2)), order=(2, 0, 3, 1)),
]


@pytest.fixture
def world(first):
    """The World of the first four ranks."""
    comm = first(4)
    return World.of(comm, CommConfig(timeout_seconds=30)) if comm is not None else None


@pytest.fixture
def open_groups(world):
    """Opens the groups of a mesh, and closes them at the end."""
    opened = []

    def open_(mesh):
        opened.append(Groups.open(mesh, world))
        return opened[-1]

    yield open_
    for groups in opened:
        groups.close()


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_each_axis_has_its_group_in_coordinate_order(open_groups, world, mesh):
    groups = open_groups(mesh)
    for axes in [(name,) for name, _ in mesh.axes] + [tuple(name for name, _ in mesh.axes)]:
        group = groups[axes]
        assert group.ranks == mesh.ranks(world.rank, *axes)
        assert group.rank == mesh.index(world.rank, *axes)
        assert group.collect(world.rank) == list(group.ranks)


def test_axes_with_the_same_ranks_share_one_group(open_groups):
    groups = open_groups(Mesh((("pp", 1), ("dp", 4), ("tp", 1))))
    assert groups["dp"] is groups.whole is groups["pp", "dp"] is groups["dp", "tp"]
    assert groups["tp"] is groups["pp"] and groups["tp"].size == 1


def test_an_axis_that_the_mesh_lacks_is_a_group_of_one(open_groups, world):
    group = open_groups(Mesh((("dp", 4),)))["cp"]
    assert group.ranks == (world.rank,)
    x = torch.ones(3)
    group.all_reduce(x)
    assert x.tolist() == [1, 1, 1]


def test_a_group_of_two_axes_is_made_when_its_members_ask(open_groups, world):
    mesh = Mesh((("a", 2), ("b", 2), ("c", 1)))
    groups = open_groups(mesh)
    turned = groups["b", "a"]  # the same ranks as the whole mesh, in another order
    assert turned.ranks == mesh.ranks(world.rank, "b", "a") and isinstance(turned, MpiGroup)
    assert turned.collect(world.rank) == [0, 2, 1, 3]


def test_the_same_ranks_can_be_seen_under_other_axes(open_groups, world):
    groups = open_groups(Mesh((("dp", 4),)))
    others = groups.regroup(Mesh((("far", 2), ("near", 2))))
    assert others["near"].ranks == (world.rank // 2 * 2, world.rank // 2 * 2 + 1)
    assert others["far"].collect(world.rank) == [world.rank % 2, world.rank % 2 + 2]
    assert others["far", "near"] is groups["dp"]


def test_ranks_with_different_meshes_are_refused(world):
    mesh = MESHES[0] if world.rank == 2 else MESHES[1]
    with pytest.raises(CommError, match="rank 0 has the mesh .*dp 2 x tp 2, rank 2 has .*dp 4"):
        Groups.open(mesh, world)


def test_a_mesh_of_another_size_is_refused(world):
    with pytest.raises(PlanError, match="6 places for 4 ranks"):
        Groups.open(Mesh((("dp", 6),)), world)
