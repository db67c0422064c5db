"""Differentiable collectives on a rank alone: the identity, with every order of gradient."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from hpctrain.comm import autograd
from hpctrain.comm.group import Group, SoloGroup
from hpctrain.errors import ShapeError
from tests.support import threads

NAMES = ("copy", "reduce", "gather", "reduce_scatter", "split", "join", "exchange", "shift")


@pytest.mark.parametrize("name", NAMES)
def test_a_rank_alone_gets_the_identity_and_its_gradients(name: str) -> None:
    collective, group = getattr(autograd, name), SoloGroup()
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.equal(collective(x, group), x)
    assert torch.autograd.gradcheck(lambda y: collective(y.sin(), group), (x,))
    assert torch.autograd.gradgradcheck(lambda y: collective(y.sin(), group), (x,))


@pytest.mark.parametrize("name", ("gather", "reduce_scatter", "split", "join"))
def test_a_cut_along_an_inner_dim_gives_a_contiguous_result(name: str) -> None:
    x = torch.randn(2, 3, 4).transpose(0, 2)
    y = getattr(autograd, name)(x, SoloGroup(), dim=-2)
    assert torch.equal(y, x) and y.is_contiguous()


def test_copies_have_the_gradients_of_copy_to_any_order_by_one_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    def rank(group: Group) -> list[tuple[list[Tensor], int]]:
        own, found = torch.tensor(1.0 + group.rank, dtype=torch.float64), []
        for several in (False, True):
            xs = [torch.full(shape, 0.5, dtype=torch.float64, requires_grad=True) for shape in ((2, 3), (), (4,))]
            ys = autograd.copies(xs, group) if several else [autograd.copy(x, group) for x in xs]
            before = counts[group.rank]
            firsts = torch.autograd.grad(sum((own * y.exp()).sum() for y in ys), xs, create_graph=True)
            summed = counts[group.rank] - before
            seconds = torch.autograd.grad(sum((own * one.sin()).sum() for one in firsts), xs)
            found.append(([*ys, *firsts, *seconds], summed))
        return found

    counts: Counter[int] = Counter()
    plain = threads.ThreadGroup.all_reduce
    monkeypatch.setattr(
        threads.ThreadGroup, "all_reduce", lambda self, x: (counts.update([self.rank]), plain(self, x))[1]
    )
    for (expected, many), (found, one) in threads.run(2, rank):
        assert (many, one) == (3, 1)
        assert all(map(torch.equal, found, expected))


def test_sizes_must_name_every_rank() -> None:
    with pytest.raises(ShapeError, match="split: 2 sizes for the 1 ranks of group solo"):
        autograd.split(torch.zeros(4), SoloGroup(), sizes=[2, 2])


def test_a_piece_that_is_not_as_long_as_its_size_is_refused() -> None:
    with pytest.raises(ShapeError, match="the piece of rank 0 has 4 elements, not 3"):
        autograd.gather(torch.zeros(4), SoloGroup(), sizes=[3])
