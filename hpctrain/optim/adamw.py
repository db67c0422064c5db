"""AdamW (Loshchilov 2019, Decoupled Weight Decay Regularization) over flat tensors.

What happens to an element does not depend on another, so a rank may own any interval, and the ranks of a group do not
talk.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import OptimConfig
from hpctrain.optim.flat import Flat
from hpctrain.optim.optimizer import Optimizer, State
from hpctrain.optim.rounding import random_bits, round_


class AdamW(Optimizer):
    """Holds the running means, one flat tensor each for every ``Flat``, in the same order.

    With ``optim.states = "bf16"`` they are kept in bf16 by stochastic rounding; the arithmetic stays in the format of
    the parameters.
    """

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        dtype = {"fp32": None, "bf16": torch.bfloat16}[config.states]
        self.exp_avg = [torch.zeros_like(flat.parameter, dtype=dtype) for flat in self.flats]
        self.exp_avg_sq = [torch.zeros_like(flat.parameter, dtype=dtype) for flat in self.flats]

    def states(self) -> dict[str, list[State]]:
        return {"exp_avg": self.spread(self.exp_avg), "exp_avg_sq": self.spread(self.exp_avg_sq)}

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        narrow = any(flat.gradient.dtype != flat.parameter.dtype for flat in self.flats)
        if self.config.states == "bf16":
            self._update_in_blocks(rate, step)
        else:
            (self._update_in_turn if narrow else self._update_at_once)(rate, step)

    def _update_at_once(self, rate: float, step: int) -> None:
        rows = [row for row in zip(self.flats, self.exp_avg, self.exp_avg_sq, strict=True) if row[0].parameter.numel()]
        for decay, group in groupby(sorted(rows, key=lambda row: row[0].decay), key=lambda row: row[0].decay):
            flats, means, squares = zip(*group, strict=True)
            parameters, gradients = [flat.parameter for flat in flats], [flat.gradient for flat in flats]
            steps = [torch.tensor(step + 1.0, device=flat.parameter.device) for flat in flats]
            UPDATE(parameters, gradients, list(means), list(squares), [], steps, **factors(self.config, rate, decay))

    def _update_in_turn(self, rate: float, step: int) -> None:
        """A chunk at a time, so that gradients are never all wide at once."""
        now = torch.tensor(step + 1.0, device=self.like.device)
        for flat, *means in zip(self.flats, self.exp_avg, self.exp_avg_sq, strict=True):
            chunks = zip(*(x.split(self.chunk) for x in (flat.parameter, flat.gradient, *means)), strict=True)
            for x, gradient, mean, square in chunks if flat.parameter.numel() else ():
                wide = gradient.to(x.dtype)
                UPDATE([x], [wide], [mean], [square], [], [now.clone()], **factors(self.config, rate, flat.decay))

    def _update_in_blocks(self, rate: float, step: int) -> None:
        now = torch.tensor(step + 1.0)
        for flat, means, squares in zip(self.flats, self.exp_avg, self.exp_avg_sq, strict=True):
            numbers = factors(self.config, rate, flat.decay)
            for piece in (chunk for whole in flat.pieces for chunk in whole.split(self.chunk)):
                x, gradient, mean, square = (
                    tensor[piece.start : piece.stop] for tensor in (flat.parameter, flat.gradient, means, squares)
                )
                exact = mean.to(x.dtype), square.to(x.dtype)
                plain([x], [gradient.to(x.dtype)], [exact[0]], [exact[1]], [], [now], **numbers)
                bits = random_bits(self.seed, step, piece, x.device)
                round_(mean, exact[0].float(), bits)
                round_(square, exact[1].float(), bits.bitwise_right_shift_(16))


def factors(config: OptimConfig, rate: float, decay: bool) -> dict[str, float | bool]:
    """The numbers of an update, as torch's kernel calls them."""
    return {
        "lr": rate,
        "beta1": config.beta1,
        "beta2": config.beta2,
        "weight_decay": config.decay if decay else 0.0,
        "eps": config.epsilon,
        "amsgrad": False,
        "maximize": False,
    }


def move(gradient: Tensor, mean: Tensor, square: Tensor, beta1: float, beta2: float) -> None:
    """Take a gradient into the running means, in place.

    Each operation here and in ``plain`` rounds its result once, so that an element has the same bits whatever lies
    beside it; fused ones round otherwise where a vector of the processor ends.
    """
    mean.mul_(beta1).add_(gradient * (1 - beta1))
    square.mul_(beta2).add_(gradient.square().mul_(1 - beta2))


def plain(
    parameters: list[Tensor],
    gradients: list[Tensor],
    means: list[Tensor],
    squares: list[Tensor],
    _tops: list[Tensor],
    steps: list[Tensor],
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
) -> None:
    """The update as its formula, called as torch's fused kernel is; several passes over memory."""
    assert not amsgrad and not maximize
    for x, gradient, mean, square, step in zip(parameters, gradients, means, squares, steps, strict=True):
        x.mul_(1 - lr * weight_decay)
        move(gradient, mean, square, beta1, beta2)
        root = square.sqrt().div_((1 - beta2 ** step.item()) ** 0.5).add_(eps)
        x.sub_(root.reciprocal_().mul_(mean).mul_(lr / (1 - beta1 ** step.item())))


UPDATE = getattr(torch, "_fused_adamw_", plain)  # one pass over memory; private, but what torch.optim.AdamW calls
