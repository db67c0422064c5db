"""A block that sleeps where others compute, so that a pipeline can be timed where ranks outnumber cores.

What it takes is what it gives. All else is that of a run: autograd, the backward's two halves, and messages.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.model.frame import Frame
from hpctrain.model.transformer import Transformer
from hpctrain.parallel.deferred import Deferred


@dataclass
class Bed:
    """How long a block sleeps in F, I and W; live: it counts what was slept on this rank."""

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    slept_seconds: float = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep, and count how long it really was."""
        began = time.perf_counter()
        time.sleep(seconds)
        self.slept_seconds += time.perf_counter() - began


def fall_asleep(model: Transformer, bed: Bed, deferred: Deferred) -> None:
    """Put a sleeper in the place of each block."""
    for layer in list(model.blocks):
        model.blocks[layer] = Sleeper(bed, deferred)


class Sleeper(nn.Module):
    """One block; it has a weight, so that its backward has one to sleep for."""

    def __init__(self, bed: Bed, deferred: Deferred) -> None:
        super().__init__()
        self.weight, self.bed, self.deferred = nn.Parameter(torch.zeros(1)), bed, deferred

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        return _Sleep.apply(x_BTD, self.weight, self)


class _Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, sleeper: Sleeper) -> Tensor:
        ctx.weight, ctx.sleeper = weight, sleeper
        sleeper.bed.sleep(sleeper.bed.forward_seconds)
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        bed, deferred = ctx.sleeper.bed, ctx.sleeper.deferred

        def weights() -> tuple[Tensor]:
            bed.sleep(bed.weight_seconds)
            return (torch.zeros(1),)

        bed.sleep(bed.input_seconds)
        return gradient.clone(), *deferred.take((ctx.weight,), weights), None
