"""A backward in two: the input's gradient now, the weights' later, and both what one backward gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hpctrain.comm.group import Handle
from hpctrain.model.parts import Gather, Spread
from hpctrain.parallel.deferred import Deferred, Notes, defer
from hpctrain.plan import rules
from hpctrain.plan.mesh import Mesh
from tests.support.tensors import VOCABULARY, Case, run
from tests.support.threads import ThreadGroup


class Pair(nn.Module):
    """A map that is used as it lies, a norm, and one that is used turned about, without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Spread(5, 7, bias=True), Gather(7, 4, bias=False)
        self.scale = nn.Parameter(torch.ones(7))
        make = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            nn.init.normal_(parameter, generator=make)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)) * self.scale)


def inputs() -> Tensor:
    return torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()


def expected() -> tuple[Tensor, dict[str, Tensor]]:
    model, x = Pair(), inputs()
    model(x).square().sum().backward()
    return x.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_what_is_put_off_is_what_one_backward_gives() -> None:
    model, x, deferred, notes = Pair(), inputs(), Deferred(), Notes()
    defer(model, deferred)
    with deferred.put_off(notes):
        model(x).square().sum().backward()
    x_grad, gradients = expected()
    torch.testing.assert_close(x.grad, x_grad, rtol=0, atol=1e-12)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"scale"}  # no product's
    notes.done()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=0, atol=1e-12)


def test_hooks_are_told_of_a_gradient_once_and_only_when_it_is_there() -> None:
    model, deferred, notes, told = Pair(), Deferred(), Notes(), []
    defer(model, deferred)
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: told.extend([name] * (p.grad is not None)))
    with deferred.put_off(notes):
        model(inputs()).sum().backward()
    assert told == ["scale"]
    notes.done()
    assert sorted(told[1:]) == ["first.bias", "first.weight", "second.weight"]
    notes.done()
    assert len(told) == 4


def test_without_notes_a_backward_is_whole() -> None:
    model = Pair()
    defer(model, Deferred())
    model(inputs()).square().sum().backward()
    for name, gradient in expected()[1].items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=0, atol=1e-12)


def test_experts_are_put_off_and_their_router_is_not() -> None:
    case, deferred, notes = Case(dict(family="mixtral", experts=4, layers=1, balance_loss=0.5)), Deferred(), Notes()
    tokens = torch.arange(12).view(2, 6) % VOCABULARY
    whole, model = case.whole(), case.whole()
    whole.loss(tokens, tokens.roll(-1, 1), balanced=True)[0].backward()
    defer(model, deferred)
    with deferred.put_off(notes):
        model.loss(tokens, tokens.roll(-1, 1), balanced=True)[0].backward()
    there = {name for name, p in model.blocks["0"].mlp.named_parameters() if p.grad is not None}
    assert there == {"norm.weight", "router.weight"}
    notes.done()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad, rtol=0, atol=1e-12)


def test_maps_in_another_format_stay_as_they_are() -> None:
    model = Pair()
    model.first.product = other = lambda x, weight, bias: F.linear(x, weight, bias)
    defer(model, Deferred())
    assert model.first.product is other and model.second.product is not F.linear


def test_a_forward_that_is_made_again_puts_off_the_same_gradients() -> None:
    model, deferred, notes = Pair(), Deferred(), Notes()
    defer(model, deferred)
    with deferred.put_off(notes):
        checkpoint(model, inputs(), use_reentrant=False).square().sum().backward()
    notes.done()
    for name, gradient in expected()[1].items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=0, atol=1e-12)


# ---- ranks that share the products


class Counting(ThreadGroup):
    """A group that writes down how much is added up in its collectives."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.summed: list[int] = []

    def _all_reduce(self, x: Tensor, op: str, later: bool) -> Handle:
        self.summed.append(x.numel())
        return super()._all_reduce(x, op, later)


def put_off(case: Case, group: Counting, copies: Counting) -> tuple[dict[str, Tensor], list[int], list[int]]:
    """A rank's gradients, and what the copies of a head added up now and later."""
    model, deferred, notes = case.shared(group, copies), Deferred(), Notes()
    defer(model, deferred)
    tokens = torch.arange(12).view(2, 6) % VOCABULARY
    with deferred.put_off(notes):
        model.loss(tokens, tokens.roll(-1, 1))[0].backward()
    now, copies.summed = copies.summed, []
    notes.done()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, now, copies.summed


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_copies_of_a_head_add_up_what_is_put_off_later_and_nothing_now(sequence: bool, recompute: str) -> None:
    case = Case(dict(family="llama", kv_heads=1, layers=1), sequence, recompute=recompute)
    whole = case.whole()
    tokens = torch.arange(12).view(2, 6) % VOCABULARY
    whole.loss(tokens, tokens.roll(-1, 1))[0].backward()
    mesh, layouts = Mesh(rules.axes(case.shape, 4)), rules.layouts(case.shape, "float64")
    found = run(case, 4, lambda group, copies: put_off(case, group, copies), Counting)
    for rank, (gradients, now, later) in enumerate(found):
        assert now == [] and later == [8 * 32, 8 * 32]  # the key's weight and the value's, each when it is made
        for name, parameter in whole.named_parameters():
            (box,) = layouts[name].boxes(mesh, rank)
            torch.testing.assert_close(gradients[name], parameter.grad[box.slices], rtol=0, atol=1e-10)
