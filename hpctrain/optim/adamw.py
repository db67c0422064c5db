"""AdamW (Loshchilov 2019, Decoupled Weight Decay Regularization) over flat tensors.

Each flat tensor holds many parameters one after another; the update does not know them apart, so a rank may own any
interval, and the ranks of a group do not talk.
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


class AdamW(Optimizer):
    """Holds the running means, one flat tensor each for every ``Flat``, in the same order."""

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        self.exp_avg = [torch.zeros_like(flat.parameter) for flat in self.flats]
        self.exp_avg_sq = [torch.zeros_like(flat.parameter) for flat in self.flats]

    def states(self) -> dict[str, list[State]]:
        return {"exp_avg": self.spread(self.exp_avg), "exp_avg_sq": self.spread(self.exp_avg_sq)}

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        rows = [row for row in zip(self.flats, self.exp_avg, self.exp_avg_sq, strict=True) if row[0].parameter.numel()]
        for decay, group in groupby(sorted(rows, key=lambda row: row[0].decay), key=lambda row: row[0].decay):
            flats, means, squares = zip(*group, strict=True)
            UPDATE(
                [flat.parameter for flat in flats],
                [flat.gradient for flat in flats],
                list(means),
                list(squares),
                [],
                [torch.tensor(step + 1.0, device=flat.parameter.device) for flat in flats],
                lr=rate,
                beta1=self.config.beta1,
                beta2=self.config.beta2,
                weight_decay=self.config.decay if decay else 0.0,
                eps=self.config.epsilon,
                amsgrad=False,
                maximize=False,
            )


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
    """The update as its formula, called as torch's fused kernel is, for a torch that lacks it; several passes."""
    assert not amsgrad and not maximize
    for x, gradient, mean, square, step in zip(parameters, gradients, means, squares, steps, strict=True):
        x.mul_(1 - lr * weight_decay)
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = lr / (1 - beta1 ** step.item())
        x.addcdiv_(mean, square.sqrt().div_((1 - beta2 ** step.item()) ** 0.5).add_(eps), value=-size)


UPDATE = getattr(torch, "_fused_adamw_", plain)  # one pass over memory; private, but what torch.optim.AdamW calls
