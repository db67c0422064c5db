"""Ways to send less: a second copy among neighbours, and 8 bits on the way, against the exact way of one group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import ModelConfig, OptimConfig
from hpctrain.errors import ShapeError
from hpctrain.model.init import initialise
from hpctrain.model.transformer import Transformer
from hpctrain.optim.adamw import AdamW
from hpctrain.parallel.units import Ranks
from hpctrain.parallel.zero import Formats, Sharded, shard
from hpctrain.plan.weights import ModelShape
from tests.support import threads
from tests.support.shards import gradients

SHAPE = ModelShape.of(ModelConfig(layers=3, width=24, heads=2, sequence=16), vocabulary=41)
EXACT = Formats()
STEPS, MICROBATCHES = 3, 2
GRIDS = [(1, 2), (2, 1), (2, 2), (3, 2), (2, 3)]

Course = tuple[list[float], dict[str, Tensor], Counter[tuple[str, int]]]


def course(group: Group, near: tuple[Group, Group] | None, stage: int, formats: Formats) -> Course:
    """Losses of a few steps, the last gradients, and how often each group gathered and exchanged in the last step."""
    model = Transformer(SHAPE).double()
    initialise(model, SHAPE, seed=1)
    data = shard(model, group, stage, near=near, formats=formats)
    optimizer = AdamW(data.flats(), OptimConfig(), data.group)
    counted: Counter[tuple[str, int]] = Counter()
    groups = dict(zip(("all", "near", "far"), (group, *(near or ())), strict=False))
    losses = []
    for step in range(STEPS):
        for name, one in groups.items() if step == STEPS - 1 else ():
            for op in ("_all_gather", "_all_to_all", "_reduce_scatter"):
                setattr(one, op, partial(_count, counted, f"{op} {name}", getattr(one, op)))
        losses.append(take(model, data, group, step))
        for one in groups.values():
            for op in ("_all_gather", "_all_to_all", "_reduce_scatter"):
                one.__dict__.pop(op, None)
        optimizer.update(1e-3, step)
    return losses, gradients(data), counted


def _count(counted: Counter, name: str, call: Callable, *args):
    counted[name] += 1
    return call(*args)


def take(model: Transformer, data: Sharded, group: Group, step: int) -> float:
    """The summed loss of a step's samples on this rank."""
    make = torch.Generator().manual_seed(100 * step + group.rank)
    data.begin()
    total = 0.0
    for number in range(MICROBATCHES):
        tokens = torch.randint(41, (1, 9), generator=make)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])[0] / (8 * MICROBATCHES * group.size)
        with data.reducing(last=number == MICROBATCHES - 1):
            loss.backward()
        total += float(loss.detach())
    data.finish()
    return total


def on_grid(far: int, near: int, stage: int, formats: Formats = EXACT, neighbours: bool = True) -> list[Course]:
    return threads.grid(far, near, lambda g, n, f: course(g, (n, f) if neighbours else None, stage, formats))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The norm of the error of all gradients, as a part of theirs."""
    error = torch.cat([(found[name] - expected[name]).flatten() for name in expected])
    return float(error.norm() / torch.cat([x.flatten() for x in expected.values()]).norm())


@pytest.mark.parametrize(("far", "near"), GRIDS)
def test_a_second_copy_changes_no_number(far: int, near: int) -> None:
    plain, found = on_grid(far, near, 3, neighbours=False), on_grid(far, near, 3)
    for one, other in zip(found, plain, strict=True):
        assert one[0] == other[0]
        assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


def test_with_a_second_copy_weights_come_from_afar_once_a_step() -> None:
    blocks, held = SHAPE.layers, 2
    _, _, counted = on_grid(2, 2, 3)[0]
    assert counted["_all_gather all"] == blocks + held
    assert counted["_all_gather near"] > 0
    _, _, without = on_grid(2, 2, 3, neighbours=False)[0]
    assert without["_all_gather all"] == counted["_all_gather all"] + counted["_all_gather near"]


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.02), ("fp8", 0.08)])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_in_8_bits_are_near_the_exact_ones(stage: int, neighbours: bool, form: str, bound: float) -> None:
    exact = on_grid(2, 2, stage, neighbours=False)
    found = on_grid(2, 2, stage, Formats(reduced=form), neighbours)
    assert all(0 < difference(one[1], exact[0][1]) < bound for one in found)
    hops = {"_all_to_all near", "_all_to_all far"} if neighbours else {"_all_to_all all"}
    assert {name for name in found[0][2] if "to_all" in name} == hops and found[0][2]["_reduce_scatter all"] == 0


@pytest.mark.parametrize(("form", "bound"), [("int8", 0.05), ("fp8", 0.2)])
@pytest.mark.parametrize("neighbours", [False, True])
def test_weights_in_8_bits_are_alike_on_all_ranks_and_near_the_exact_ones(
    neighbours: bool, form: str, bound: float
) -> None:
    exact = on_grid(2, 2, 3, neighbours=False)
    found = on_grid(2, 2, 3, Formats(gathered=form), neighbours)
    assert all(0 < difference(one[1], exact[0][1]) < bound for one in found)

    def seen(group: Group, near: Group, far: Group) -> list[Tensor]:
        model = Transformer(SHAPE)
        initialise(model, SHAPE, seed=1)
        data = shard(model, group, 3, near=(near, far), formats=Formats(gathered=form))
        with data.whole():
            return [parameter.detach().clone() for parameter in model.parameters()]

    first, *others = threads.grid(2, 2, seen)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_group_of_one_has_exact_numbers_whatever_is_asked() -> None:
    (found,), (exact,) = (on_grid(1, 1, 3, formats) for formats in (Formats(None, None, "int8", "fp8"), Formats()))
    assert found[0] == exact[0] and all(torch.equal(found[1][name], exact[1][name]) for name in exact[1])


def test_neighbours_that_do_not_follow_one_another_are_refused() -> None:
    def act(group: Group, near: Group, far: Group) -> str:
        try:
            Ranks(group, near=far, far=near)
        except ShapeError as error:
            return str(error)
        return ""

    told = threads.grid(2, 2, act)
    assert "number 0 of its 2 neighbours, and these are number 1" in told[1] and "follow one another" in told[1]
