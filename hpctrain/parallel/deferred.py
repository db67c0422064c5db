"""Deferred: the gradients of a backward's weights, made later than those of its inputs.

Some schedules of a pipeline take a backward in two (Qi 2023, Zero Bubble Pipeline Parallelism): I gives the stage
before what it waits for, and W the rest, when there is time. Inside ``Deferred.put_off`` products compute the gradient
of their input alone and leave a note of what their weights' gradient is made from; what gradients come all the same, of
norms and of the embedding, are laid aside. ``Notes.done`` is W.

    notes = Notes()
    with deferred.put_off(notes):
        y.backward(gradient)        # I
    ...
    notes.done()                    # W: gradients come to the parameters' hooks, as in any backward

Only plain products of linear maps and of experts are put off; a backward through others, such as those in fp8, or
through a router, is whole in I.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.experts import Stack, grouped
from hpctrain.schedule.action import Schedule

Weights = Callable[[], tuple[Tensor | None, ...]]


class Notes:
    """What a W has to do; live: it holds what the gradients are made from."""

    def __init__(self) -> None:
        self._todo: list[Callable[[], None]] = []

    def add(self, todo: Callable[[], None]) -> None:
        """Do this in W."""
        self._todo.append(todo)

    def done(self) -> None:
        """Do all of it, in the order of the backward."""
        while self._todo:
            self._todo.pop(0)()


class Deferred:
    """Whether products put the gradients of their weights off, and where they leave their notes; live.

    One for all products of a model on a rank: a backward may run in another thread than the one that began it.
    """

    def __init__(self) -> None:
        self.notes: Notes | None = None

    @contextmanager
    def put_off(self, notes: Notes) -> Iterator[None]:
        """Inside, backwards leave notes there."""
        self.notes = notes
        try:
            yield
        finally:
            self.notes = None

    def take(self, tensors: tuple[Tensor | None, ...], gradients: Weights) -> tuple[Tensor | None, ...]:
        """The gradients of a product's ``tensors``: now, or none now and all of them in W."""
        if self.notes is None:
            return gradients()
        self.notes.add(lambda: _deliver(tensors, gradients))
        return (None,) * len(tensors)


def _deliver(tensors: tuple[Tensor | None, ...], gradients: Weights) -> None:
    """Make gradients, and let them go the way that they would have gone in the backward."""
    with torch.no_grad():  # what they are made from has a graph
        made = gradients()
    pairs = [(x, grad) for x, grad in zip(tensors, made, strict=True) if grad is not None]
    if pairs:
        wanted, found = zip(*pairs, strict=True)
        torch.autograd.backward(list(wanted), list(found))


def split(schedule: Schedule, model: nn.Module) -> Deferred:
    """What the products of ``model`` put off with, where the schedule takes backwards in two."""
    deferred = Deferred()
    if any(action.op == "W" for _, action in schedule):
        defer(model, deferred)
    return deferred


def defer(model: nn.Module, deferred: Deferred) -> None:
    """Let the products of a model's linear maps be put off; those in other formats stay as they are."""
    for module in model.modules():
        if getattr(module, "product", None) is F.linear:
            module.product = Linear(deferred)
        if isinstance(module, Stack):
            module.grouped = partial(grouped, take=deferred.take)


class Linear:
    """``F.linear`` whose weights' gradients can be put off."""

    def __init__(self, deferred: Deferred) -> None:
        self.deferred = deferred

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = _Linear.apply(self.deferred, x.flatten(0, -2), weight, bias)
        return y.unflatten(0, x.shape[:-1])


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, deferred: Deferred, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Recomputation gives back a stand-in of what is saved: gradients go to the tensors themselves.
        ctx.deferred, ctx.tensors = deferred, (weight, bias)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad

        def weights() -> tuple[Tensor | None, ...]:
            return gradient.t() @ x if wants_weight else None, gradient.sum(0) if wants_bias else None

        return None, gradient @ weight if wants_x else None, *ctx.deferred.take(ctx.tensors, weights)
