"""Block: attention, then a feed-forward part, each behind its norm and added to what came in.

Dims: B samples, T tokens, D width, M width of the feed-forward part.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.model.attention import Attention
from hpctrain.model.experts import Experts
from hpctrain.model.frame import Frame
from hpctrain.model.noise import Dropout
from hpctrain.model.parts import Gather, Spread, fan, norm
from hpctrain.plan.weights import ModelShape


class Block(nn.Module):
    """One layer of the transformer; ``name`` sets its dropout apart from other layers'."""

    def __init__(self, shape: ModelShape, name: str) -> None:
        super().__init__()
        self.attention = Attention(shape)
        self.mlp = MLPS[shape.mlp](shape)
        self.attention_dropout = Dropout(shape.dropout, f"{name}.attention")
        self.mlp_dropout = Dropout(shape.dropout, f"{name}.mlp")

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        x_BTD = x_BTD + self.attention_dropout(self.attention(x_BTD, frame), frame)
        return x_BTD + self.mlp_dropout(self.mlp(x_BTD, frame), frame)


class GeluMlp(nn.Module):
    """A norm, then GPT-2's feed-forward part."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm, self.fan = norm(shape), fan
        self.up = Spread(shape.width, shape.mlp_width, "up" in shape.bias)
        self.down = Gather(shape.mlp_width, shape.width, "down" in shape.bias)

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        (up_BTM,) = self.fan(self.norm(x_BTD), (self.up,), frame.tokens)
        return self.down(F.gelu(up_BTM, approximate="tanh"))  # the form that GPT-2 was trained with


class SwigluMlp(nn.Module):
    """A norm, then Llama's feed-forward part (Shazeer 2020, GLU Variants Improve Transformer)."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm, self.fan = norm(shape), fan
        self.gate = Spread(shape.width, shape.mlp_width, "gate" in shape.bias)
        self.up = Spread(shape.width, shape.mlp_width, "up" in shape.bias)
        self.down = Gather(shape.mlp_width, shape.width, "down" in shape.bias)

    def forward(self, x_BTD: Tensor, frame: Frame) -> Tensor:
        gate_BTM, up_BTM = self.fan(self.norm(x_BTD), (self.gate, self.up), frame.tokens)
        return self.down(F.silu(gate_BTM) * up_BTM)


MLPS = {"gelu": GeluMlp, "swiglu": SwigluMlp, "experts": Experts}
