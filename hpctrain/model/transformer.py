"""Transformer: a decoder-only language model in three parts that a pipeline may place apart.

Its parameters are those of ``hpctrain.plan.weights``, under the same names and with the same shapes. Positions count
through a whole sample and do not restart at documents packed in it: for rotary positions only distances matter, and
a learned table gets all its rows trained.

Dims: B samples, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.errors import ShapeError
from hpctrain.model.attention import within_documents
from hpctrain.model.blocks import Block
from hpctrain.model.frame import Balance, Frame, Tokens
from hpctrain.model.loss import cross_entropy
from hpctrain.model.noise import Dropout, Noise
from hpctrain.model.parts import Spread, lookup, norm
from hpctrain.plan.spans import Span, whole
from hpctrain.plan.weights import ModelShape


class Transformer(nn.Module):
    """A model with memory for its weights and nothing in them; ``initialise`` or a checkpoint fills them.

    With ``spans`` it is what some stages of a pipeline have of it, and ``through`` takes activations through one.
    """

    def __init__(self, shape: ModelShape, spans: Sequence[Span] | None = None) -> None:
        super().__init__()
        self.shape = shape
        spans = whole(shape) if spans is None else spans
        self.between = Tokens.whole  # which tokens this rank has between layers
        embeds, ends = any(span.embed for span in spans), any(span.head for span in spans)
        self.embed = Embed(shape, embeds) if embeds or (ends and shape.tied) else None
        layers = [layer for span in spans for layer in span.layers]
        self.blocks = nn.ModuleDict({str(layer): Block(shape, f"blocks.{layer}") for layer in layers})
        self.head = Head(shape) if ends else None

    def forward(self, tokens_BT: Tensor, documents_BT: Tensor | None = None, noise: Noise | None = None) -> Tensor:
        """The logits ``[B, T, V]`` of each next token.

        ``documents`` numbers each token's document, where attention is to stay within one. Without ``noise``
        nothing is dropped.
        """
        hidden = self._hidden(tokens_BT, self.frame(tokens_BT, documents_BT, noise))
        return self.head.output(hidden, self._head_weight, tokens_BT.numel()).view(*tokens_BT.shape, -1)

    def loss(
        self,
        tokens_BT: Tensor,
        targets_BT: Tensor,
        documents_BT: Tensor | None = None,
        noise: Noise | None = None,
        balanced: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The summed loss of the targets that are not ``IGNORE``, in fp64, and how many they are.

        Where experts are to be ``balanced``, each target counts the balance loss of its micro-batch in.
        """
        frame = self.frame(tokens_BT, documents_BT, noise, balanced)
        loss, count = self.price(self._hidden(tokens_BT, frame), targets_BT)
        more = self.imbalance(frame)
        return loss if more is None else loss + more * count, count

    def frame(
        self, tokens_BT: Tensor, documents_BT: Tensor | None, noise: Noise | None, balanced: bool = False
    ) -> Frame:
        """What the layers are told of these tokens; ``balanced`` where experts' balance loss is asked for later."""
        dtype = next(self.parameters()).dtype
        allowed = None if documents_BT is None else within_documents(documents_BT, dtype)
        balance = Balance() if balanced and self.shape.balance_loss else None
        return Frame(self.between(*tokens_BT.shape), allowed, noise, balance)

    def imbalance(self, frame: Frame) -> Tensor | None:
        """What the experts of the layers that were gone through add to the mean loss; None where they add nothing.

        It is a mean over all layers of the model, to which these give their part. Ask once, when the forward is done.
        """
        total = frame.balance.total() if frame.balance else None
        return None if total is None else total * (self.shape.balance_loss / self.shape.layers)

    def through(self, span: Span, x: Tensor, frame: Frame) -> Tensor:
        """What one stage makes of what the stage before made; ``x`` are the tokens where it has the embedding."""
        if span.embed:
            x = self.embed(x, frame)
        for layer in span.layers:
            x = self.blocks[str(layer)](x, frame)
        return self.head(x) if span.head else x

    def price(self, hidden: Tensor, targets_BT: Tensor, **terms: float) -> tuple[Tensor, Tensor]:
        """What ``loss`` gives, of what the last stage has made; ``terms`` as in ``cross_entropy``."""
        return self.head.loss(hidden.flatten(0, -2), self._head_weight, targets_BT.flatten(), **terms)

    def _hidden(self, tokens_BT: Tensor, frame: Frame) -> Tensor:
        (span,) = whole(self.shape)
        return self.through(span, tokens_BT, frame)

    @property
    def _head_weight(self) -> Tensor:
        return self.embed.tokens if self.head.logits is None else self.head.logits.weight


class Embed(nn.Module):
    """A vector for each token, and for each position where positions are learned.

    Where only a tied head uses it, it has no positions.
    """

    def __init__(self, shape: ModelShape, looks_up: bool = True) -> None:
        super().__init__()
        self.tokens, self.lookup = nn.Parameter(torch.empty(shape.vocabulary, shape.width)), lookup
        self.vocabulary = shape.vocabulary
        learned = looks_up and shape.positions == "learned"
        self.positions = nn.Parameter(torch.empty(shape.sequence, shape.width)) if learned else None
        self.dropout, self.places = Dropout(shape.dropout, "embed"), places

    def forward(self, tokens_BT: Tensor, frame: Frame) -> Tensor:
        """``[B, T, D]``. Raises ShapeError for more tokens than there are learned positions."""
        x_BTD = self.lookup(tokens_BT, self.tokens)
        if self.positions is not None:
            x_BTD = x_BTD + self.places(self._positions(frame.tokens.length), frame.tokens)
        return self.dropout(x_BTD, frame)

    def _positions(self, length: int) -> Tensor:
        if length > self.positions.shape[0]:
            raise ShapeError(
                f"a sample has {length} tokens, but the model has learned {self.positions.shape[0]} positions",
                "a position beyond model.sequence has no vector",
                "cut the sample, or train with a longer model.sequence",
            )
        return self.positions[:length]


def places(positions_TD: Tensor, tokens: Tokens) -> Tensor:
    """The vector of each token's position: of every sample the same ones, in order."""
    return positions_TD


class Head(nn.Module):
    """The last norm, and the weight of the logits where it is not the embedding's."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.norm = norm(shape)
        self.logits = None if shape.tied else Spread(shape.width, shape.vocabulary, bias=False)
        self.output, self.loss, self.vocabulary = logits, cross_entropy, shape.vocabulary

    def forward(self, x_BTD: Tensor) -> Tensor:
        """What the logits are made of: ``[B, T, D]``."""
        return self.norm(x_BTD)


def logits(hidden_BTD: Tensor, weight_VD: Tensor, total: int) -> Tensor:
    """The logits of all ``total`` tokens."""
    return F.linear(hidden_BTD, weight_VD)
