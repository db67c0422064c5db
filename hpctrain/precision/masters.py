"""Masters: fp32 weights that are updated, beside the 16-bit ones, rounded from them, that multiply.

A step of the optimizer is often smaller than half the distance between two bf16 numbers, and would be lost; likewise
a small gradient that is added to a large sum of them. So weights are updated and gradients summed in fp32
(Micikevicius 2018, Mixed Precision Training). Formats of 32 bits and more are their own masters, and cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.reduce import WIDE


def wide(dtype: torch.dtype) -> torch.dtype:
    """The format that numbers of this one are updated and summed in."""
    return WIDE.get(dtype, dtype)


class Masters:
    """The masters of what a rank owns: one 1-D tensor for each owned interval of a flat buffer of weights.

    ``weights`` are those intervals, in the compute format; ``values`` are what they are to be before rounding, e.g.
    the initial weights in fp32, and their own widened numbers where not given. After the masters changed, by an
    update or by a checkpoint, ``round`` brings the weights after them.
    """

    def __init__(self, weights: Sequence[Tensor], values: Sequence[Tensor] | None = None) -> None:
        self.weights = tuple(weights)
        self.tensors = tuple(
            weight if wide(weight.dtype) == weight.dtype else torch.empty_like(weight, dtype=wide(weight.dtype))
            for weight in self.weights
        )
        for master, value in zip(self.tensors, values or self.weights, strict=True):
            if master is not value:
                master.copy_(value)
        self.round()

    @property
    def nbytes(self) -> int:
        """Bytes that the masters take beside the weights."""
        return sum(m.nbytes for m, w in zip(self.tensors, self.weights, strict=True) if m is not w)

    @torch.no_grad()
    def round(self) -> None:
        """Make each weight the nearest number of its format to its master."""
        for master, weight in zip(self.tensors, self.weights, strict=True):
            if master is not weight:
                weight.copy_(master)


def accumulate(total: Tensor, gradient: Tensor, first: bool) -> None:
    """Add a gradient as the backward made it to the sum in the wide format; the first one is written over."""
    if first:
        total.copy_(gradient)
    else:
        total.add_(gradient)
