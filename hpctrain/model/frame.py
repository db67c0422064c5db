"""Frame: what every layer is told of a micro-batch beside its activations.

Between the layers a rank may have a part of the tokens only (``hpctrain.parallel.tensor``): then activations there are
``[n, D]``, ``n`` tokens of all samples laid end to end, where one that has them all has ``[B, T, D]``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hpctrain.model.noise import Noise


@dataclass(frozen=True)
class Tokens:
    """The tokens of a micro-batch, ``rows`` samples of ``length`` each, and which of them this rank has between layers.

    ``start`` and ``stop`` count through all samples, one after another.
    """

    rows: int
    length: int
    start: int
    stop: int

    @classmethod
    def whole(cls, rows: int, length: int) -> Tokens:
        """All of them."""
        return cls(rows, length, 0, rows * length)

    @property
    def total(self) -> int:
        """Tokens of the whole micro-batch."""
        return self.rows * self.length


class Balance:
    """The balance losses of the layers that a micro-batch has gone through; live: layers add theirs to it."""

    def __init__(self) -> None:
        self._losses: list[Tensor] | None = []

    def add(self, loss: Tensor) -> None:
        """Count a layer's loss in. Not after ``total``: a forward that is made again would count it twice."""
        if self._losses is not None:
            self._losses.append(loss)

    def total(self) -> Tensor | None:
        """The sum so far, with the graph behind it; None where no layer has added to it."""
        losses, self._losses = self._losses, None
        return torch.stack(losses).sum() if losses else None


@dataclass(frozen=True)
class Frame:
    """A micro-batch as layers know it."""

    tokens: Tokens
    allowed: Tensor | None = None
    """``[B, 1, T, T]``, added to the scores of attention; None for every token seeing those before it, the quickest."""
    noise: Noise | None = None
    """Where dropout comes from; without it nothing is dropped."""
    balance: Balance | None = None
    """Where experts leave what is to be added to the loss; without it nothing is."""
