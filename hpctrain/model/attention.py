"""Attention: queries look at keys of the same sample that do not lie ahead.

Dims: B samples, T tokens, D width, H heads (of queries, or of keys and values), E dimensions of a head.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.frame import Frame
from hpctrain.model.parts import Gather, Spread, fan, head_norm, norm
from hpctrain.plan.weights import ModelShape


class Attention(nn.Module):
    """A norm, then causal attention of all heads that this module's weights make, however many those are."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.rope = (shape.rope_base, shape.rope_scaling) if shape.positions == "rotary" else None
        self.norm, self.fan = norm(shape), fan
        self.core = Core()
        self.query = Spread(shape.width, shape.heads * shape.head_dim, "query" in shape.bias)
        self.key = Spread(shape.width, shape.kv_heads * shape.head_dim, "key" in shape.bias)
        self.value = Spread(shape.width, shape.kv_heads * shape.head_dim, "value" in shape.bias)
        self.query_norm, self.key_norm = head_norm(shape), head_norm(shape)
        self.out = Gather(shape.heads * shape.head_dim, shape.width, "out" in shape.bias)

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        parts = self.fan(self.norm(x_BTD), (self.query, self.key, self.value), frame.tokens)
        q_BTHE, k_BTHE, v_BTHE = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
        if self.query_norm is not None:
            q_BTHE, k_BTHE = self.query_norm(q_BTHE), self.key_norm(k_BTHE)
        if self.rope is not None:
            q_BTHE, k_BTHE = rotate(q_BTHE, *self.rope), rotate(k_BTHE, *self.rope)
        return self.out(self.core(q_BTHE, k_BTHE, v_BTHE, frame.allowed))


class Core(nn.Module):
    """The part of attention without weights: softmax of queries times keys, times values."""

    def forward(self, q_BTHE: Tensor, k_BTHE: Tensor, v_BTHE: Tensor, allowed_B1TT: Tensor | None) -> Tensor:
        """``[B, T, H * E]``, the heads one after another."""
        y_BHTE = F.scaled_dot_product_attention(
            q_BTHE.transpose(1, 2),
            k_BTHE.transpose(1, 2),
            v_BTHE.transpose(1, 2),
            attn_mask=allowed_B1TT,
            is_causal=allowed_B1TT is None,
            enable_gqa=q_BTHE.shape[2] != k_BTHE.shape[2],
        )
        return y_BHTE.transpose(1, 2).flatten(2)


def within_documents(documents_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a token (dim 2) may see another (dim 3), those of its own document up to itself; else minus infinity.

    Numbers, as the kernels would make them of a mask of booleans, in each layer anew, and keep them all.
    """
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    allowed_BTT = torch.zeros(same_BTT.shape, dtype=dtype, device=documents_BT.device)
    return allowed_BTT.masked_fill_(same_BTT.tril_().logical_not_(), -torch.inf)[:, None]


Scaling = tuple[float, ...]
"""``model.rope_scaling``: factor, low and high frequency factor, former length."""


def rotate(x_BTHE: Tensor, base: float, scaling: Scaling | None = None) -> Tensor:
    """Turn each pair of dimensions by an angle that grows with the token's position (Su 2021, RoFormer).

    Dimension i is paired with i + E/2, as in Llama checkpoints of Hugging Face.
    """
    wide = torch.promote_types(x_BTHE.dtype, torch.float32)
    cos_TE, sin_TE = turns(x_BTHE.shape[1], x_BTHE.shape[3] // 2, base, scaling, wide, x_BTHE.device)
    return _Rotate.apply(x_BTHE.to(wide), cos_TE[:, None], sin_TE[:, None]).to(x_BTHE.dtype)


@lru_cache(maxsize=16)
def turns(
    length: int, pairs: int, base: float, scaling: Scaling | None, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angle for each pair, worked out in fp64. Kept: do not write into them."""
    positions = torch.arange(length, dtype=torch.float64, device=device)
    frequencies = base ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    angles = positions[:, None] * (frequencies if scaling is None else stretched(frequencies, scaling))
    return angles.cos().to(dtype), angles.sin().to(dtype)


def stretched(frequencies: Tensor, scaling: Scaling) -> Tensor:
    """Frequencies of few turns in the former length divided by the factor, those of many kept, a slope between them.

    "Few" and "many" turns are the low and the high frequency factor (Dubey 2024, The Llama 3 Herd of Models, and the
    code published with Llama 3.1).
    """
    factor, low, high, length = scaling
    kept = ((length * frequencies / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / factor)


class _Rotate(torch.autograd.Function):
    """The rotation; its gradient is the rotation back. Keeps no activation, where autograd would keep four."""

    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.turns = (cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    def backward(ctx, gradient):
        return _turn(gradient, *ctx.turns, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    (a, b), (out_a, out_b) = x.chunk(2, -1), out.chunk(2, -1)
    torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-way)
    torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=way)
    return out
