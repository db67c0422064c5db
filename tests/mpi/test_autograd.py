"""Gradients through collectives are the slopes of what all ranks compute together.

A derivative of one rank's own result says little here: a rank's input moves the results of all. So the ranks step
together. The value is the sum of what each rank makes of its output; one element of one rank's input (of every rank's,
where they hold the same) is moved a little, everybody computes again, and the slope is compared with the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm import autograd
from hpctrain.comm.group import Group
from hpctrain.comm.mpi import MpiGroup
from hpctrain.errors import ShapeError

pytestmark = pytest.mark.mpi(min_size=4)

STEP = 1e-5


class Case(NamedTuple):
    """A collective and what its input and its output mean on the ranks: their own tensors, or the same on all."""

    name: str
    takes: str
    gives: str
    shape: Callable[[Group], tuple[int, ...]]
    more: Callable[[Group], dict[str, Any]] = lambda group: {}


def lengths(group: Group) -> list[int]:
    """One piece a rank, of different lengths, one of them empty."""
    return [2, 0, 1, 3][: group.size]


def traded(group: Group) -> dict[str, list[int]]:
    """Rows from each rank to each, none the same way back."""
    return {
        "sizes": [(group.rank + 2 * to) % 3 for to in range(group.size)],
        "out_sizes": [(source + 2 * group.rank) % 3 for source in range(group.size)],
    }


def uneven(group: Group) -> dict[str, Any]:
    return {"dim": 1, "sizes": lengths(group)}


CASES = {
    "copy": Case("copy", "alike", "own", lambda g: (2, 2)),
    "reduce": Case("reduce", "own", "alike", lambda g: (2, 2)),
    "gather": Case("gather", "own", "own", lambda g: (1, 2)),
    "gather uneven": Case("gather", "own", "own", lambda g: (2, lengths(g)[g.rank]), uneven),
    "reduce_scatter": Case("reduce_scatter", "own", "own", lambda g: (g.size, 2)),
    "reduce_scatter uneven": Case("reduce_scatter", "own", "own", lambda g: (2, sum(lengths(g))), uneven),
    "split": Case("split", "alike", "own", lambda g: (g.size, 2)),
    "split uneven": Case("split", "alike", "own", lambda g: (2, sum(lengths(g))), uneven),
    "join": Case("join", "own", "alike", lambda g: (1, 2)),
    "join uneven": Case("join", "own", "alike", lambda g: (2, lengths(g)[g.rank]), uneven),
    "exchange": Case("exchange", "own", "own", lambda g: (g.size, 2)),
    "exchange uneven": Case("exchange", "own", "own", lambda g: (sum(traded(g)["sizes"]), 2), traded),
    "shift": Case("shift", "own", "own", lambda g: (2, 2)),
    "shift back": Case("shift", "own", "own", lambda g: (2, 2), lambda g: {"by": -1}),
}


@pytest.fixture(params=[1, 2, 4], scope="module")
def group(request: pytest.FixtureRequest, first: Callable[[int], MPI.Comm | None]) -> Iterator[Group]:
    """A group of the first ranks; each other rank has one of its own meanwhile."""
    group = MpiGroup(first(request.param) or MPI.COMM_SELF)
    yield group
    group.close()


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


def test_the_gradient_is_the_slope_of_what_all_ranks_compute(group: Group, case: Case) -> None:
    x = values(case.shape(group), case.takes, group, 1)
    compare_with_slopes(group, x, case.takes, case.gives, lambda y: value(group, case, y))


def test_the_gradient_of_the_gradient_is_a_slope_too(group: Group, case: Case) -> None:
    x = values(case.shape(group), case.takes, group, 1)
    weights = values(x.shape, case.takes, group, 3)

    def slope(y: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(value(group, case, y), y, create_graph=True)
        return (weights * gradient).sum()

    compare_with_slopes(group, x, case.takes, case.takes, slope)


def test_gather_joins_what_split_cut(group: Group) -> None:
    whole = torch.arange(6.0 * sum(lengths(group))).view(2, -1, 3)
    piece = autograd.split(whole, group, **uneven(group))
    assert piece.shape == (2, lengths(group)[group.rank], 3)
    assert torch.equal(autograd.gather(piece, group, **uneven(group)), whole)


def test_a_shift_all_the_way_round_comes_back(group: Group) -> None:
    x = torch.full((3,), float(group.rank))
    moved = autograd.shift(x, group)
    assert moved[0].item() == (group.rank - 1) % group.size
    for _ in range(group.size - 1):
        moved = autograd.shift(moved, group)
    assert torch.equal(moved, x)


def test_a_column_and_a_row_parallel_product_give_one_ranks_gradients(group: Group) -> None:
    x, a, b = (values(shape, "alike", group, i).requires_grad_() for i, shape in enumerate([(3, 4), (4, 8), (8, 4)]))
    (x @ a @ b).square().sum().backward()
    wanted, (x.grad, a.grad, b.grad) = (x.grad, a.grad, b.grad), (None,) * 3

    half = autograd.copy(x, group) @ a.chunk(group.size, 1)[group.rank]
    autograd.reduce(half @ b.chunk(group.size)[group.rank], group).square().sum().backward()
    torch.testing.assert_close(x.grad, wanted[0])
    torch.testing.assert_close(a.grad.chunk(group.size, 1)[group.rank], wanted[1].chunk(group.size, 1)[group.rank])
    torch.testing.assert_close(b.grad.chunk(group.size)[group.rank], wanted[2].chunk(group.size)[group.rank])


def test_a_length_that_does_not_cut_is_refused(comm: MPI.Comm) -> None:
    group = MpiGroup(comm)
    with pytest.raises(ShapeError, match=f"split: a length of {comm.size + 1} does not cut into {comm.size} equal"):
        autograd.split(torch.zeros(2, comm.size + 1), group, dim=1)
    group.close()


# ---- values and slopes -----------------------------------------------------------------------------------------------


def values(shape: tuple[int, ...], meaning: str, group: Group, seed: int) -> Tensor:
    """Random numbers, the same on all ranks or each rank's own."""
    rank = group.rank if meaning == "own" else 0
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * seed + rank))


def value(group: Group, case: Case, x: Tensor) -> Tensor:
    """What this rank makes of its output: nothing linear, so that second gradients go through the collective."""
    y = getattr(autograd, case.name)(x, group, **case.more(group)).sin()
    return (values(y.shape, case.gives, group, 2) * y).sum()


def compare_with_slopes(
    group: Group, x: Tensor, takes: str, gives: str, local: Callable[[Tensor], Tensor]
) -> None:
    """Compare the gradient of ``local`` at every element of every rank's ``x`` with the slope of its sum over ranks."""
    (gradient,) = torch.autograd.grad(local(x.requires_grad_()), x)
    for rank, count in enumerate(group.collect(x.numel())):
        if takes == "alike" and rank > 0:
            break
        moves = takes == "alike" or rank == group.rank
        for element in range(count):
            ends = [together(group, gives, local, moved(x, element, step * moves)) for step in (STEP, -STEP)]
            if moves:
                assert gradient.view(-1)[element].item() == pytest.approx((ends[0] - ends[1]) / (2 * STEP), abs=1e-8)


def moved(x: Tensor, element: int, step: float) -> Tensor:
    x = x.detach().clone()
    if step:
        x.view(-1)[element] += step
    return x.requires_grad_()


def together(group: Group, gives: str, local: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The sum of all ranks' values; one that all ranks hold alike counts once."""
    told = local(x).detach().clone()
    group.all_reduce(told) if gives == "own" else group.broadcast(told)
    return told.item()
