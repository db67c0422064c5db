"""The rules of tensor parallelism: which weights are cut, which part is whose, and which numbers of ranks fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ModelConfig
from hpctrain.errors import PlanError
from hpctrain.plan import rules
from hpctrain.plan.layout import Box
from hpctrain.plan.mesh import Mesh
from hpctrain.plan.weights import ModelShape, weights


def shape_of(**knobs) -> ModelShape:
    own = dict(layers=1, width=48, heads=12, sequence=8) | knobs
    return ModelShape.of(ModelConfig(**own), 51)


shapes = st.builds(
    shape_of,
    family=st.sampled_from(["gpt2", "llama", "mixtral"]),
    kv_heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    mlp_width=st.integers(12, 70),
)


@given(shapes, st.data())
def test_each_element_is_on_one_rank_or_on_copies_or_on_all(shape: ModelShape, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(rules.fitting(shape)))
    mesh = Mesh(rules.axes(shape, ranks))
    for weight in weights(shape):
        boxes = [rules.local(weight, mesh, rank) for rank in range(ranks)]
        rows = [range(box.start[0], box.start[0] + box.shape[0]) for box in boxes]
        held = [sum(row in own for own in rows) for row in range(weight.shape[0])]
        copies = {"kv_heads": max(1, ranks // shape.kv_heads)}
        cut = weight.dims[0] in rules.RULES
        assert set(held) == {copies.get(weight.dims[0], 1) if cut else ranks}, weight.name
        assert not cut or all(box.shape[1:] == weight.shape[1:] for box in boxes)


@given(shapes, st.data())
def test_every_rank_has_whole_heads_and_the_keys_that_its_queries_look_at(
    shape: ModelShape, data: st.DataObject
) -> None:
    ranks = data.draw(st.sampled_from(rules.fitting(shape)))
    mesh, found = Mesh(rules.axes(shape, ranks)), {weight.name: weight for weight in weights(shape)}
    for rank in range(ranks):
        names = ("blocks.0.attention.query.weight", "blocks.0.attention.key.weight")
        queries, keys = (heads(rules.local(found[name], mesh, rank), shape) for name in names)
        assert {query * shape.kv_heads // shape.heads for query in queries} == set(keys)
        assert len(queries) * ranks == shape.heads


def heads(box: Box, shape: ModelShape) -> range:
    """The heads in a box."""
    assert box.start[0] % shape.head_dim == box.shape[0] % shape.head_dim == 0
    return range(box.start[0] // shape.head_dim, (box.start[0] + box.shape[0]) // shape.head_dim)


@given(shapes, st.data())
def test_a_sum_over_all_ranks_counts_each_element_once(shape: ModelShape, data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from(rules.fitting(shape)))
    mesh = Mesh((("dp", 2), *rules.axes(shape, ranks)))
    for weight in weights(shape):
        for first in (0, ranks):  # of either replica
            counting = [rank for rank in range(first, first + ranks) if rules.counts(weight, mesh, rank)]
            assert sum(rules.local(weight, mesh, rank).size for rank in counting) == weight.size, weight.name


def test_an_mlp_and_a_vocabulary_of_any_size_are_cut_without_padding() -> None:
    shape = shape_of(family="llama", mlp_width=37)
    mesh, layouts = Mesh((("tp", 4),)), rules.layouts(shape, "float32")
    sizes = {name: [layouts[name].box(mesh, rank).shape[0] for rank in range(4)] for name in layouts}
    assert sizes["blocks.0.mlp.down.weight"] == [10, 9, 9, 9]
    assert sizes["embed.tokens"] == sizes["head.logits.weight"] == [13, 13, 13, 12]


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "axes"),
    [(12, 12, (("tp", 12),)), (4, 2, (("tp", 2),)), (2, 4, (("tp", 2), ("tp_copy", 2))), (1, 1, (("tp", 1),))],
)
def test_ranks_beyond_the_heads_of_keys_are_an_axis_of_copies(kv_heads: int, ranks: int, axes: tuple) -> None:
    assert rules.axes(shape_of(kv_heads=kv_heads), ranks) == axes


def test_the_mesh_of_a_run_keeps_its_other_axes_and_its_ranks() -> None:
    mesh = Mesh((("replica", 2), ("dp", 2), ("tp", 4)), order=tuple(reversed(range(16))))
    found = rules.split(mesh, shape_of(kv_heads=2))
    assert found.axes == (("replica", 2), ("dp", 2), ("tp", 2), ("tp_copy", 2))
    assert all(found.ranks(rank, *rules.TENSOR) == mesh.ranks(rank, "tp") for rank in range(16))
    assert found.ranks(15, "tp_copy") == (15, 14)
    assert rules.split(mesh, shape_of(kv_heads=4)) == mesh


@given(shapes)
def test_the_numbers_that_fit_are_those_that_are_not_refused(shape: ModelShape) -> None:
    fit = rules.fitting(shape)
    assert 1 in fit and (shape.heads in fit) == (shape.experts % shape.heads == 0)
    for ranks in range(1, 16):
        if ranks in fit:
            rules.check(shape, ranks)
        else:
            with pytest.raises(PlanError, match=f"parallel.tp = {ranks} does not fit") as told:
                rules.check(shape, ranks)
            assert told.value.mend == f"set parallel.tp to one of {', '.join(map(str, fit))}"


def test_ranks_that_would_have_no_token_do_not_fit() -> None:
    shape = ModelShape.of(ModelConfig(layers=1, width=48, heads=12, sequence=8), 5)
    assert rules.fitting(shape) == (1, 2, 3, 4)
