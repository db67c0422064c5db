"""Embedding and output of a vocabulary that the ranks of a group share: each has the vectors of its own tokens.

An embedding looks up what is its own, and the ranks' sum is every token's vector. The output's logits stay where they
are made: for the softmax each rank gives three or four figures a token, its largest logit, its sum of exponentials, the
target's logit and, for label smoothing, the sum of its logits (``hpctrain.model.loss``). Pieces of the vocabulary
differ by at most one token; nothing is padded.

Dims: B samples, T tokens of a sample, N tokens of all samples, D width, V this rank's part of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hpctrain.comm import autograd
from hpctrain.comm.group import Group
from hpctrain.model import loss, parts
from hpctrain.model.frame import Tokens
from hpctrain.parallel.linear import Region


class VocabularyEmbedding(nn.Module):
    """A vector for each token; ``vocabulary`` counts those of all ranks."""

    def __init__(self, vocabulary: int, width: int, group: Group, sequence: bool = False) -> None:
        super().__init__()
        self.region, self.vocabulary = Region(group, sequence), vocabulary
        self.weight = nn.Parameter(torch.empty(self.region.length(vocabulary), width))

    def forward(self, tokens: Tensor) -> Tensor:
        """``[..., D]``; with ``sequence`` this rank's part of the tokens, ``[n, D]``. Collective."""
        return lookup(tokens, self.weight, self.region, self.vocabulary)


class VocabularyOutput(nn.Module):
    """Logits and loss of a vocabulary; ``vocabulary`` counts the tokens of all ranks."""

    def __init__(self, width: int, vocabulary: int, group: Group, sequence: bool = False) -> None:
        super().__init__()
        self.region, self.vocabulary = Region(group, sequence), vocabulary
        self.weight = nn.Parameter(torch.empty(self.region.length(vocabulary), width))

    def forward(self, hidden: Tensor, total: int) -> Tensor:
        """All logits of all ``total`` tokens on every rank, ``[N, vocabulary]``. Collective."""
        return logits(hidden, self.weight, total, self.region, self.vocabulary)

    def loss(self, hidden: Tensor, targets_N: Tensor, **terms: float) -> tuple[Tensor, Tensor]:
        """What ``hpctrain.model.loss.cross_entropy`` gives, on every rank. Collective.

        ``hidden`` is ``[N, D]``, with ``sequence`` this rank's tokens of it; the targets are those of all tokens.
        """
        return cross_entropy(hidden, self.weight, targets_N, region=self.region, vocabulary=self.vocabulary, **terms)


def lookup(tokens: Tensor, weight_VD: Tensor, region: Region, vocabulary: int) -> Tensor:
    """Each token's vector; with ``region.sequence`` for this rank's tokens, ``[n, D]``. Collective."""
    index = tokens - region.bounds(vocabulary)[0]
    elsewhere = (index < 0) | (index >= len(weight_VD))
    x = parts.lookup(index.masked_fill_(elsewhere, 0), weight_VD)
    return region.leave(x.masked_fill_(elsewhere[..., None], 0))


def places(positions_TD: Tensor, tokens: Tokens, group: Group) -> Tensor:
    """The vector of the position of each token that this rank has, ``[n, D]``. Collective, backwards."""
    index = torch.arange(tokens.start, tokens.stop, device=positions_TD.device) % tokens.length
    return parts.lookup(index, autograd.copy(positions_TD, group))


def logits(hidden: Tensor, weight_VD: Tensor, total: int, region: Region, vocabulary: int) -> Tensor:
    """All logits of all ``total`` tokens, on every rank, to go on with alike. Collective."""
    own = F.linear(region.enter(hidden, total), weight_VD)
    return autograd.join(own, region.group, dim=1, sizes=region.sizes(vocabulary))


def cross_entropy(
    hidden: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    region: Region,
    vocabulary: int,
    inner: Any = loss.cross_entropy,
    **terms: float,
) -> tuple[Tensor, Tensor]:
    """The loss that ``inner`` gives of the whole vocabulary, and the number of targets. Collective."""
    share = loss.Share(region.bounds(vocabulary)[0], vocabulary, partial(_together, region.group))
    return inner(region.enter(hidden, len(targets_N)), weight_VD, targets_N, share=share, **terms)


def _together(group: Group, figures_NK: Tensor) -> Tensor:
    every = figures_NK.new_empty(group.size, *figures_NK.shape)
    group.all_gather(every, figures_NK)
    return every
