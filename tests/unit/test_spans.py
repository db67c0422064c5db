"""Spans: all blocks in one stage each, the dearest one as cheap as can be, and a tied weight where it is needed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.config import ModelConfig
from hpctrain.errors import PlanError
from hpctrain.plan.spans import mine, spans
from hpctrain.plan.weights import ModelShape, weights
from hpctrain.schedule.action import Schedule
from hpctrain.schedule.kinds import make


def shape(layers: int, vocabulary: int = 300, **more: object) -> ModelShape:
    return ModelShape.of(ModelConfig(layers=layers, width=32, heads=2, sequence=16, **more), vocabulary)


def pipe(count: int) -> Schedule:
    """A pipeline of one stage a rank."""
    return make("1f1b", count, count)


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from([10, 300, 50000]))
def test_each_block_is_in_one_stage_and_the_ends_are_where_they_belong(layers: int, count: int, words: int) -> None:
    if count > layers:
        with pytest.raises(PlanError, match=f"a pipeline of {count} stages for model.layers = {layers}"):
            spans(shape(layers), pipe(count))
        return
    parts = spans(shape(layers, words), pipe(count))
    assert [layer for part in parts for layer in part.layers] == list(range(layers))
    assert [part.embed for part in parts] == [True] + [False] * (count - 1)
    assert [part.head for part in parts] == [False] * (count - 1) + [True]
    assert max(map(len, (part.layers for part in parts[:-1])), default=0) <= layers


def test_a_head_that_costs_as_much_as_blocks_gets_fewer_of_them() -> None:
    # a block has 12 x 32^2 + 2 x 32 x 16 = 13312; a head of 416 tokens as much as one block, of 1248 as much as three
    assert [len(part.layers) for part in spans(shape(8, 416), pipe(3))] == [3, 3, 2]
    assert [len(part.layers) for part in spans(shape(9, 1248), pipe(2))] == [6, 3]
    assert [len(part.layers) for part in spans(shape(8, 10), pipe(4))] == [2, 2, 2, 2]


def test_experts_cost_what_a_token_is_multiplied_with_and_not_what_they_weigh() -> None:
    # attention 4 x 32^2 + 2 x 32 x 16, router 64 x 32, two of 64 experts 2 x 3 x 32^2: 13312 as well
    experts = dict(family="mixtral", experts=64, experts_per_token=2, mlp_width=32)
    assert [len(part.layers) for part in spans(shape(8, 416, **experts), pipe(3))] == [3, 3, 2]
    assert [len(part.layers) for part in spans(shape(9, 1248, **experts), pipe(2))] == [6, 3]


@pytest.mark.parametrize("given", [(1, 2), (2, 2, 1), (4, 0), (5, -1)])
def test_numbers_that_do_not_fit_are_refused(given: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="parallel.layers_per_stage") as told:
        spans(shape(4), pipe(2), given)
    assert "2 numbers that add up to 4" in told.value.mend


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_stages_have_all_weights_and_share_none_but_a_tied_one(tied: bool, count: int) -> None:
    whole = shape(4, tied=tied)
    found = [weight.name for part in spans(whole, pipe(count)) for weight in mine(whole, [part])]
    twice = {name for name in found if found.count(name) > 1}
    assert set(found) == {weight.name for weight in weights(whole)}
    assert twice == ({"embed.tokens"} if tied and count > 1 else set())
