"""Ranks that share a model over MPI, where what is asked for later is really under way: the answers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from mpi4py import MPI

from hpctrain.comm.group import Group
from hpctrain.comm.mpi import MpiGroup
from hpctrain.plan import rules
from hpctrain.plan.mesh import Mesh
from tests.support.layers import LAYERS, check
from tests.support.tensors import Case, boxes, difference

pytestmark = pytest.mark.mpi(min_size=4)

CASES = {
    "gpt2": Case(dict(family="gpt2", dropout=0.2, kv_heads=2), documents=True, terms=dict(smoothing=0.1)),
    "gpt2, tokens whole": Case(dict(family="gpt2", tied=False), sequence=False, terms=dict(z_loss=0.01)),
    "llama": Case(dict(family="llama", kv_heads=1, mlp_width=37), recompute="full"),
    "llama, tokens whole": Case(dict(family="llama", kv_heads=2, tied=True, dropout=0.2), sequence=False),
}


@pytest.fixture(params=[2, 4], scope="module")
def group(request: pytest.FixtureRequest, first: Callable[[int], MPI.Comm | None]) -> Iterator[Group]:
    """A group of the first ranks; each other rank has one of its own meanwhile."""
    group = MpiGroup(first(request.param) or MPI.COMM_SELF)
    yield group
    group.close()


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_and_its_gradients_are_those_of_one_rank(name: str, sequence: bool, group: Group) -> None:
    check(name, sequence, group, fast=True)


@pytest.mark.parametrize("name", CASES)
def test_ranks_that_share_a_model_answer_as_one_rank_does(name: str, group: MpiGroup) -> None:
    case = CASES[name]
    mesh, whole = Mesh(rules.axes(case.shape, group.size)), case.alone()
    part = group.comm.Split(min(mesh.ranks(group.rank, rules.COPY)), group.rank)
    copies = MpiGroup(part, "copies")
    found = case.answers(case.shared(group, copies))
    copies.close()
    part.Free()
    assert difference(found, boxes(case, group.size, group.rank, whole), whole) < 1e-10
