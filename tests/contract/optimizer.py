"""What every optimizer promises: subclass ``OptimizerContract`` in a test file, say how it is made, and run it.

    class TestAdamW(OptimizerContract):
        make = staticmethod(partial(AdamW, config=OptimConfig()))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import ShapeError
from hpctrain.optim.flat import Flat
from hpctrain.optim.optimizer import Optimizer
from tests.support import shards, threads

SHAPES = {  # matrices that are tall, wide, batched and empty; vectors; what hidden layers have and what they do not
    "embed.tokens": (30, 8),
    "blocks.0.up.weight": (24, 8),
    "blocks.0.up.bias": (24,),
    "blocks.0.down.weight": (8, 24),
    "blocks.0.experts": (3, 5, 7),
    "blocks.0.none": (0, 4),
    "blocks.1.large.weight": (70, 67),
    "head.norm.weight": (8,),
    "head.one": (1,),
}
UPDATES = 4
cuts = st.lists(st.floats(0, 1), min_size=1, max_size=3)  # of two to four ranks, some with nothing


class OptimizerContract:
    """The promise. A subclass gives ``make``, and how far shards may be from one rank: 0 for bit for bit."""

    bounds: dict[torch.dtype, float] = {torch.float32: 1e-6, torch.float64: 1e-12}

    @staticmethod
    def make(flats: list[Flat], *, group: Group, **more: Any) -> Optimizer:
        raise NotImplementedError

    def course(self, dtype: torch.dtype, updates: range = range(UPDATES), **more: Any) -> tuple[Any, Any]:
        """Weights and states after some updates of SHAPES."""
        weights = more.pop("weights", None) or shards.random(SHAPES, 1, dtype)
        gradients = [shards.random(SHAPES, 10 + step, dtype) for step in updates]
        make: Callable = lambda flats, group: self.make(flats, group=group, seed=5)  # noqa: E731
        return shards.course(make, weights, gradients, start=updates.start, **more)

    def same(self, found: Any, expected: Any, dtype: torch.dtype) -> None:
        """Compare weights and states, each with its largest value as the measure."""
        for a, b in zip(_leaves(found), _leaves(expected), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype
            if not self.bounds[dtype] or not a.is_floating_point():
                assert torch.equal(a, b)
            elif a.numel():
                assert (a.double() - b.double()).abs().max() <= self.bounds[dtype] * b.double().abs().max()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_shards_of_any_cut_are_what_one_rank_has(self, dtype):
        expected = self.course(dtype)

        @settings(max_examples=12)
        @given(cuts)
        def check(cuts: list[float]) -> None:
            self.same(self.course(dtype, cuts=cuts), expected, dtype)

        check()

    def test_a_run_goes_on_from_its_states_under_another_cut(self):
        dtype, expected = torch.float64, self.course(torch.float64)

        @settings(max_examples=8)
        @given(cuts, cuts, st.integers(1, UPDATES - 1))
        def check(before: list[float], after: list[float], turn: int) -> None:
            weights, states = self.course(dtype, range(turn), cuts=before)
            found = self.course(dtype, range(turn, UPDATES), weights=weights, states=states, cuts=after)
            self.same(found, expected, dtype)

        check()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_an_update_is_a_pure_function_of_weights_gradients_states_and_step(self, dtype):
        weights, states = self.course(dtype, range(2))
        unbroken = self.course(dtype)
        for found in (self.course(dtype, range(2, UPDATES), weights=weights, states=states) for _ in range(2)):
            assert all(torch.equal(a, b) for a, b in zip(_leaves(found), _leaves(unbroken), strict=True))

    def test_gradients_keep_their_values(self):
        gradients = shards.random(SHAPES, 3)
        flats = shards.flats(shards.random(SHAPES, 1), gradients)
        before = [flat.gradient.clone() for flat in flats]
        self.make(flats, group=SoloGroup()).update(0.1, 0)
        assert all(torch.equal(flat.gradient, kept) for flat, kept in zip(flats, before, strict=True))

    def test_gradients_in_16_bits_count_as_the_numbers_that_they_are(self):
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            flats = shards.flats(shards.random(SHAPES, 1, torch.float32), shards.random(SHAPES, 3, torch.bfloat16))
            flats = [replace(flat, gradient=flat.gradient.to(dtype)) for flat in flats]
            optimizer = self.make(flats, group=SoloGroup())
            for step in range(UPDATES):
                optimizer.update(0.01, step)
            states = {name: {one.parameter: one.tensor for one in parts} for name, parts in optimizer.states().items()}
            found.append(({name: x for name, _, x in shards.own_parameters(flats)}, states))
        self.same(*found, torch.float32)

    def test_a_loss_comes_down(self):
        weights = shards.random(SHAPES, 1)
        flats = shards.flats(weights, weights)  # of half the sum of squares, each weight is its own gradient
        optimizer = self.make(flats, group=SoloGroup())
        norms = [float(sum(flat.parameter.square().sum() for flat in flats))]
        for step in range(20):
            for flat in flats:
                flat.gradient.copy_(flat.parameter)
            optimizer.update(0.02, step)
            norms.append(float(sum(flat.parameter.square().sum() for flat in flats)))
        assert norms == sorted(norms, reverse=True) and norms[-1] < 0.9 * norms[0]

    def test_every_rank_names_every_state(self):
        def names(group: Group) -> list[tuple[str, str, bool]]:
            part = (0.0, 1.0) if group.rank == 1 else (1.0, 1.0) if group.rank else (0.0, 0.0)
            weights = shards.random(SHAPES, 1)
            states = self.make(shards.flats(weights, weights, part), group=group).states()
            return [(name, one.parameter, one.whole) for name, parts in states.items() for one in parts]

        found = threads.run(3, names)
        assert all(sorted(one) == sorted(found[0]) for one in found)
        assert {name for _, name, _ in found[0]} == set(SHAPES)

    def test_elements_with_two_owners_are_refused_on_all_ranks(self):
        def refused(group: Group) -> str:
            weights = shards.random(SHAPES, 1)
            with pytest.raises(ShapeError, match="the 2 ranks of group threads have elements") as told:
                self.make(shards.flats(weights, weights), group=group)
            return told.value.mend

        assert all("a group of one" in mend for mend in threads.run(2, refused))

    def test_elements_without_a_name_are_refused(self):
        x = torch.zeros(9)
        with pytest.raises(ShapeError, match="have 0 elements, the tensor 9") as told:
            self.make([Flat(x, x.clone(), True)], group=SoloGroup())
        assert "a Piece for each parameter" in told.value.mend


def _leaves(course: Any) -> list[torch.Tensor]:
    """The tensors of weights and states, in the order of their names."""
    if isinstance(course, torch.Tensor):
        return [course]
    parts = [course[key] for key in sorted(course)] if isinstance(course, dict) else course
    return [leaf for part in parts for leaf in _leaves(part)]
