"""Ranks that share a model over MPI, where what is asked for later is really under way: the answers of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from mpi4py import MPI

from hpctrain.cluster.world import World
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.comm.groups import Groups
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import OptimConfig
from hpctrain.model.noise import Noise
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import AdamW
from hpctrain.parallel.tensor import tensor_parallel
from hpctrain.parallel.zero import shard
from hpctrain.plan import rules
from hpctrain.plan.mesh import Mesh
from tests.support.layers import LAYERS, check
from tests.support.tensors import VOCABULARY, Case, boxes, difference

pytestmark = pytest.mark.mpi(min_size=4)

CASES = {
    "gpt2": Case(dict(family="gpt2", dropout=0.2, kv_heads=2), documents=True, terms=dict(smoothing=0.1)),
    "gpt2, tokens whole": Case(dict(family="gpt2", tied=False), sequence=False, terms=dict(z_loss=0.01)),
    "llama": Case(dict(family="llama", kv_heads=1, mlp_width=37), recompute="full"),
    "qwen3": Case(dict(family="qwen3", kv_heads=2, head_dim=6)),
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


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_each_part_of_a_model_may_be_shared_by_zero_over_other_ranks(stage: int, comm: MPI.Comm) -> None:
    case = Case(dict(family="llama", kv_heads=1, mlp_width=37, dropout=0.1))
    mesh = Mesh((("dp", comm.size // 2), *rules.axes(case.shape, 2)))
    groups = Groups.open(mesh, World.of(comm))
    expected = trained(case.whole(), SoloGroup(), stage)
    model = case.whole()
    tensor_parallel(model, groups[rules.TENSOR], copies=groups[rules.COPY])
    found, layouts = trained(model, groups["dp"], stage), rules.layouts(case.shape, "float64")
    groups.close()
    for name, layout in layouts.items():
        (box,) = layout.boxes(mesh, comm.rank)
        torch.testing.assert_close(found[name], expected[name][box.slices], rtol=1e-10, atol=1e-10)


def trained(model: Transformer, group: Group, stage: int) -> dict[str, torch.Tensor]:
    """The weights after some steps on samples that the ranks of ``group`` share."""
    tokens = torch.randint(VOCABULARY, (8, 7), generator=torch.Generator().manual_seed(2))
    own = range(8)[group.rank * 8 // group.size : (group.rank + 1) * 8 // group.size]
    sharded = shard(model, group, stage)
    optimizer = AdamW(sharded.flats(), OptimConfig(decay=0.1), sharded.group)
    for step in range(3):
        sharded.begin()
        with sharded.reducing():
            part = tokens[own.start : own.stop]
            loss, _ = model.loss(part, part.roll(-1, 1), noise=Noise(1, step, tuple(own)))
            (loss / tokens.numel()).backward()
        sharded.finish()
        optimizer.update(0.01, step)
    with sharded.whole() as whole:
        return {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}
