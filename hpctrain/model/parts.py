"""The parts that a transformer is made of: norms, lookups, and linear maps to and from a dim that may be cut.

Both maps keep the cut dim first, so that a shard is one contiguous run of the weight (``hpctrain.plan.weights``).
Their ``product`` may be another one than that of their format (``hpctrain.precision.fp8``). Maps of one input are
taken together by ``fan``, so that what is to be done with the input can be done once (``hpctrain.parallel.linear``).

In 16-bit formats the gradients of a norm's and of an embedding's weights, sums over very many tokens, are summed in
fp32: torch's CPU kernels sum them in the format itself, where a bf16 sum of ones ends at 256.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.frame import Tokens
from hpctrain.plan.weights import NORMS, ModelShape

SHORT = (torch.bfloat16, torch.float16)


def norm(shape: ModelShape) -> Norm:
    """The norm of this family, over the width."""
    return Norm(shape.norm, shape.width, shape.norm_epsilon)


def head_norm(shape: ModelShape) -> HeadNorm | None:
    """The norm of each head, where this family has one."""
    return HeadNorm(shape.norm, shape.head_dim, shape.norm_epsilon) if shape.head_norm else None


def fan(x_BTD: Tensor, maps: Sequence[nn.Module], tokens: Tokens) -> tuple[Tensor, ...]:
    """What each of the maps makes of one input: ``[B, T, out]``, for all tokens of the micro-batch."""
    return tuple(one(x_BTD) for one in maps)


class Norm(nn.Module):
    """LayerNorm or RMSNorm over the last dim."""

    def __init__(self, kind: str, width: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if "bias" in NORMS[kind] else None
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        return normalise(x, self.weight, self.bias, self.epsilon)


class HeadNorm(Norm):
    """A norm over the dimensions of each head, with the same weights for all heads."""


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of ``x`` over its last dim, or RMSNorm where there is no bias."""
    apply = _Norm.apply if x.dtype in SHORT and x.device.type == "cpu" else _norm
    return apply(x, weight, bias, epsilon)


def lookup(tokens: Tensor, weight_VD: Tensor) -> Tensor:
    """Each token's vector."""
    return (_Lookup.apply if weight_VD.dtype in SHORT else F.embedding)(tokens, weight_VD)


class Spread(nn.Module):
    """From the width to the cut dim: ``x @ weight.T + bias``, weight ``[out, in]``."""

    def __init__(self, width: int, out: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, width))
        self.bias = nn.Parameter(torch.empty(out)) if bias else None
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, self.bias)


class Gather(nn.Module):
    """From the cut dim to the width: ``x @ weight + bias``, weight ``[in, out]``."""

    def __init__(self, into: int, width: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(into, width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.product = F.linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.t(), self.bias)  # as quick as [out, in]: BLAS reads either way round


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


class _Norm(torch.autograd.Function):
    """A norm in fp32 of what is kept in 16 bits; its backward makes it again, so it keeps no fp32 copy."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        ctx.save_for_backward(*(x, weight) if bias is None else (x, weight, bias))
        ctx.epsilon = epsilon
        return _norm(x.float(), weight.float(), None if bias is None else bias.float(), epsilon).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        saved = ctx.saved_tensors
        x, weight, *bias = wide = [one.detach().float().requires_grad_() for one in saved]
        with torch.enable_grad():
            y = _norm(x, weight, *bias or [None], ctx.epsilon)
        gradients = torch.autograd.grad(y, wide, gradient.float())
        found = [one.to(kept.dtype) for one, kept in zip(gradients, saved, strict=True)]
        return *found, *[None] * (4 - len(found))


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.rows, ctx.dtype = weight_VD.shape[0], weight_VD.dtype
        return F.embedding(tokens, weight_VD)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (tokens,) = ctx.saved_tensors
        summed = torch.ops.aten.embedding_dense_backward(gradient.float(), tokens, ctx.rows, -1, False)
        return None, summed.to(ctx.dtype)
