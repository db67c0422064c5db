"""Transformer: a decoder-only language model in three parts that a pipeline may place apart.

Its parameters are those of ``hpctrain.plan.weights``, under the same names and with the same shapes. Positions count
through a whole sample and do not restart at documents packed in it: for rotary positions only distances matter, and
a learned table gets all its rows trained.

Dims: B samples, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.errors import ShapeError
from hpctrain.model.attention import within_documents
from hpctrain.model.blocks import Block
from hpctrain.model.loss import cross_entropy
from hpctrain.model.noise import Dropout, Noise
from hpctrain.model.parts import Spread, lookup, norm
from hpctrain.plan.weights import ModelShape


class Transformer(nn.Module):
    """A model with memory for its weights and nothing in them; ``initialise`` or a checkpoint fills them."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = Embed(shape)
        self.blocks = nn.ModuleDict({str(layer): Block(shape, f"blocks.{layer}") for layer in range(shape.layers)})
        self.head = Head(shape)

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """The logits ``[B, T, V]`` of each next token.

        ``documents`` numbers each token's document, where attention is to stay within one. Without ``noise``
        nothing is dropped.
        """
        return F.linear(self._hidden(tokens_BT, documents_BT, noise), self._head_weight)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        noise: Noise | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of the targets that are not ``IGNORE``, in fp64, and how many they are."""
        hidden_BTD = self._hidden(tokens_BT, documents_BT, noise)
        return cross_entropy(hidden_BTD.flatten(0, 1), self._head_weight, targets_BT.flatten())

    def _hidden(self, tokens_BT: Tensor, documents_BT: Tensor | None, noise: Noise | None) -> Tensor:
        x_BTD = self.embed(tokens_BT, noise)
        allowed_B1TT = None if documents_BT is None else within_documents(documents_BT, x_BTD.dtype)
        for block in self.blocks.values():
            x_BTD = block(x_BTD, allowed_B1TT, noise)
        return self.head(x_BTD)

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.tokens if self.head.logits is None else self.head.logits.weight


class Embed(nn.Module):
    """A vector for each token, and for each position where positions are learned."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.tokens = nn.Parameter(torch.empty(shape.vocabulary, shape.width))
        learned = shape.positions == "learned"
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.width)) if learned else None
        self.dropout = Dropout(shape.dropout, "embed")

    def forward(self, tokens_BT: Tensor, noise: Noise | None) -> Tensor:
        """``[B, T, D]``. Raises ShapeError for more tokens than there are learned positions."""
        x_BTD = lookup(tokens_BT, self.tokens)
        if self.positions is not None:
            x_BTD = x_BTD + self._positions(tokens_BT.shape[1])
        return self.dropout(x_BTD, noise)

    def _positions(self, length: int) -> Tensor:
        if length > self.positions.shape[0]:
            raise ShapeError(
                f"a sample has {length} tokens, but the model has learned {self.positions.shape[0]} positions",
                "a position beyond model.sequence has no vector",
                "cut the sample, or train with a longer model.sequence",
            )
        return self.positions[:length]


class Head(nn.Module):
    """The last norm, and the weight of the logits where it is not the embedding's."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.logits = None if shape.tied else Spread(shape.width, shape.vocabulary, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the logits are made of: ``[B, T, D]``."""
        return self.norm(x_BTD)
