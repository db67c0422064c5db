"""The parts that every branch of a block is made of: norms, and linear maps to and from a dim that may be cut.

Both maps keep the cut dim first, so that a shard is one contiguous run of the weight (``hpctrain.plan.weights``).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.plan.weights import ModelShape

NORMS = {"layer": nn.LayerNorm, "rms": nn.RMSNorm}


def norm(shape: ModelShape) -> nn.Module:
    """The norm of this family, over the width."""
    return NORMS[shape.norm](shape.width, eps=shape.norm_epsilon)


class Spread(nn.Module):
    """From the width to the cut dim: ``x @ weight.T + bias``, weight ``[out, in]``."""

    def __init__(self, width: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Gather(nn.Module):
    """From the cut dim to the width: ``x @ weight + bias``, weight ``[in, out]``."""

    def __init__(self, into: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)  # as quick as [out, in]: BLAS reads either way round
