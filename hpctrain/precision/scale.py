"""Scale: the loss is multiplied by it, so that fp16's gradients neither vanish nor overflow.

A scale as large as can be keeps the small gradients from vanishing. It grows after a while without an overflow and
shrinks at each one, whose step is left out (Micikevicius 2018, Mixed Precision Training, section 3.2). Whether a step
overflowed is read off the global norm, which all ranks have alike, so they need not ask each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.config import PrecisionConfig

GROWTH = 2.0  # a power of two: scaling by it rounds nothing
CEILING = 2.0**24  # beyond this a loss of 1 would overflow by the scale alone, after division by a batch of tokens


@dataclass(frozen=True)
class Scale:
    """A scale and how many steps it has gone without an overflow."""

    value: float
    steps: int = 0

    def next(self, overflowed: bool, config: PrecisionConfig) -> Scale:
        """The scale of the following step."""
        if overflowed:
            return Scale(max(self.value / GROWTH, config.scale_floor))
        if self.steps + 1 < config.scale_interval:
            return Scale(self.value, self.steps + 1)
        return Scale(max(self.value, min(self.value * GROWTH, CEILING)))


class LossScale:
    """The scale of a run, which ``state`` carries through checkpoints; 1 and still for formats that need none."""

    def __init__(self, config: PrecisionConfig) -> None:
        self.config = config
        self.moves = config.compute == "fp16"
        self.state = torch.tensor([config.scale if self.moves else 1.0, 0.0], dtype=torch.float64)

    @property
    def value(self) -> float:
        """What the loss is multiplied by before its backward, and its gradients divided by after."""
        return float(self.state[0])

    def states(self) -> dict[str, Tensor]:
        """What a checkpoint keeps, by name; nothing where the scale stands still."""
        return {"scale": self.state} if self.moves else {}

    def told(self) -> dict[str, float]:
        """What a log says of it; nothing where it stands still."""
        return {"scale": self.value} if self.moves else {}

    def undo(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients by the scale, in place; before ``skips``, which may change it."""
        if self.moves:
            torch._foreach_mul_(list(gradients), 1 / self.value)

    def skips(self, norm: float) -> bool:
        """Take in the norm of a step's gradients; whether the step is to be left out. Call once a step.

        All ranks give the same norm and get the same answer. At the floor an overflow is not the scale's doing, and
        nothing is left out: a norm that is not finite is then the caller's to refuse.
        """
        overflowed, at_floor = not math.isfinite(norm), self.value <= self.config.scale_floor
        if self.moves:
            now = Scale(self.value, int(self.state[1])).next(overflowed, self.config)
            self.state.copy_(torch.tensor([now.value, now.steps]))
        return self.moves and overflowed and not at_floor
