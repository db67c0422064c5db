"""Block: attention, then a feed-forward part, each behind its norm and added to what came in."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.attention import Attention
from hpctrain.model.noise import Dropout, Noise
from hpctrain.model.parts import Gather, Spread, norm
from hpctrain.plan.weights import ModelShape


class Block(nn.Module):
    """One layer of the transformer; ``name`` sets its dropout apart from other layers'."""

    def __init__(self, shape: ModelShape, name: str) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.mlp = MLPS[shape.mlp](shape)
        self.attention_dropout = Dropout(shape.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(shape.dropout, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, allowed_B1TT: Tensor | None, noise: Noise | None) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self.attention(x_BTD, allowed_B1TT), noise)
        return x_BTD + self.mlp_dropout(self.mlp(x_BTD), noise)


class GeluMlp(nn.Module):
    """A norm, then GPT-2's feed-forward part."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.up = Spread(shape.width, shape.mlp_width, shape.bias)
        self.down = Gather(shape.mlp_width, shape.width, shape.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(self.norm(x_BTD)), approximate="tanh"))  # the form that GPT-2 was trained with


class SwigluMlp(nn.Module):
    """A norm, then Llama's feed-forward part (Shazeer 2020, GLU Variants Improve Transformer)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.gate = Spread(shape.width, shape.mlp_width, shape.bias)
        self.up = Spread(shape.width, shape.mlp_width, shape.bias)
        self.down = Gather(shape.mlp_width, shape.width, shape.bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = self.norm(x_BTD)
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


MLPS = {"gelu": GeluMlp, "swiglu": SwigluMlp}
