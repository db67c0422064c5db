"""Travel: how weights come to the ranks that use them, and gradients to the ranks that own them.

Exact by default: an all-gather of weights, a reduce-scatter of gradients, over all ranks that share a copy. Where links
between nodes are slow there are three ways to send less (ZeRO++, Wang 2023), each a choice of its own:

    near                 neighbours keep a second copy of a unit among them, from its first use in a step to the
                         step's end: only the first gather of a step leaves the node (hpZ)
    weights in 8 bits    are decoded where they arrive, by all ranks alike, the owner too (qwZ)
    gradients in 8 bits  go to their owners, who add them up in fp32: rounded once on each way, and not at each step of
                         a ring. With ``near`` they are first added up among neighbours, so that a node sends one sum
                         and not one for each of its ranks (qgZ)

What has no weight decay, biases and the weights of norms, is too unlike its neighbours to share a scale with them: a
bias beside a norm's weight would come out as zero. It is little, and travels in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from hpctrain.comm.group import Group, Handle, Then
from hpctrain.parallel.units import Part, Ranks
from hpctrain.precision.coded import coded_bytes, decode, encode
from hpctrain.precision.masters import wide

Hop = Callable[[], Handle]
"""Starts one leg of a journey; all ranks start each leg in the same order."""


@dataclass(frozen=True)
class Travel:
    """Over which groups, and in what. ``weights`` and ``gradients`` are keys of ``FORMS``, None for as they are."""

    ranks: Ranks
    weights: str | None = None
    gradients: str | None = None

    @property
    def codes(self) -> bool:
        """Whether gradients are copied, as codes, when they leave."""
        return self.gradients is not None and self.ranks.inner.size > 1

    @property
    def plain(self) -> bool:
        """Whether every gather is one of all ranks that share a copy, as the weights are."""
        return self.weights is None and self.ranks.near is None

    def gather(self, part: Part) -> Handle:
        """Start to bring a unit's weights, from neighbours where these have all of it."""
        if part.near is not None and part.near.kept:
            near = part.near
            return self.ranks.near.all_gather(part.full, near.own, sizes=near.sizes, later=True)
        part.masters.round()
        if self.weights is None or self.ranks.inner.size == 1:
            return self.ranks.inner.all_gather(part.full, part.own, sizes=part.sizes, later=True)
        return _gather_coded(part, self.ranks.inner, self.weights)

    def reduce(self, part: Part, own: Tensor) -> Sequence[Hop]:
        """The legs by which the sum of all ranks' ``part.buffer`` comes into ``own``."""
        inner, near, far = self.ranks.inner, self.ranks.near, self.ranks.far
        if not self.codes:
            return (partial(inner.reduce_scatter, own, part.buffer, sizes=part.sizes, later=True),)
        pieces = _pieces(part, part.buffer)
        mine = [pieces[inner.rank].at(own)]
        if near is None or far is None:
            return (partial(_reduce_coded, inner, mine, [[piece] for piece in pieces], self.gradients),)
        strides = [pieces[first :: near.size] for first in range(near.size)]
        sums = [piece.at(torch.empty_like(piece.tensor, dtype=wide(own.dtype))) for piece in strides[near.rank]]
        return (
            partial(_reduce_coded, near, sums, strides, self.gradients),
            partial(_reduce_coded, far, mine, [[piece] for piece in sums], self.gradients),
        )


@dataclass(frozen=True)
class Piece:
    """One rank's interval of a unit, of which the last ``exact`` numbers are not coded."""

    tensor: Tensor
    exact: int

    @property
    def bytes(self) -> int:
        """Of its message."""
        return coded_bytes(self.tensor.numel(), self.exact)

    def at(self, tensor: Tensor) -> Piece:
        """The same interval in another tensor."""
        return replace(self, tensor=tensor)


def _pieces(part: Part, whole: Tensor) -> list[Piece]:
    """Every rank's interval of a tensor of the whole unit."""
    edges = zip(whole.split(part.sizes), accumulate(part.sizes), strict=True)
    return [Piece(piece, min(piece.numel(), max(stop - part.unit.decayed, 0))) for piece, stop in edges]


def _gather_coded(part: Part, group: Group, form: str) -> Handle:
    pieces = _pieces(part, part.full)
    lengths = [piece.bytes for piece in pieces]
    mine = encode(part.own, form, pieces[group.rank].exact)
    wire = mine.new_empty(sum(lengths))

    def arrived() -> None:
        for piece, message in zip(pieces, wire.split(lengths), strict=True):
            decode(piece.tensor, message, form, piece.exact)

    return Then(group.all_gather(wire, mine, sizes=lengths, later=True), arrived)


def _reduce_coded(group: Group, out: Sequence[Piece], pieces: Sequence[Sequence[Piece]], form: str) -> Handle:
    """Send each rank its pieces, and add up what comes of ours into ``out``, in rank order."""
    sizes, lengths = [sum(piece.bytes for piece in theirs) for theirs in pieces], [piece.bytes for piece in out]
    sent = torch.cat([encode(piece.tensor, form, piece.exact) for theirs in pieces for piece in theirs])
    wire = sent.new_empty(group.size * sum(lengths))
    handle = group.all_to_all(wire, sent, out_sizes=[sum(lengths)] * group.size, sizes=sizes, later=True)

    def arrived() -> None:
        messages = [message.split(lengths) for message in wire.chunk(group.size)] if len(wire) else []
        for number, piece in enumerate(out):
            total = torch.zeros_like(piece.tensor, dtype=wide(piece.tensor.dtype))
            for message in messages:
                decode(total, message[number], form, piece.exact, add=True)
            piece.tensor.copy_(total)

    return Then(handle, arrived)
