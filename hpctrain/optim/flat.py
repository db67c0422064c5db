"""Flat: what an optimizer updates, parameters end to end in one tensor and their gradients in another.

A rank may own any interval of such a tensor, so a parameter may be there in part. Most optimizers walk through the
elements and do not ask; those that need whole matrices find in ``pieces`` which part of which parameter they have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from hpctrain.comm.reduce import WIDE
from hpctrain.errors import ShapeError


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter, and where it lies in a flat tensor."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter
    first: int  # which element of the flattened parameter the piece begins with
    start: int  # where the piece lies in the flat tensor
    stop: int

    @property
    def whole(self) -> bool:
        """Whether all of the parameter is here."""
        return self.stop - self.start == prod(self.shape)

    def split(self, every: int) -> Iterator[Piece]:
        """Its elements block by block: a block ends at each multiple of ``every`` in the flattened parameter."""
        start, last = self.first, self.first + self.stop - self.start
        while start < last:
            stop = min(last, (start // every + 1) * every)
            shift = self.start - self.first
            yield replace(self, first=start, start=start + shift, stop=stop + shift)
            start = stop


@dataclass(frozen=True)
class Flat:
    """Parameters in one flat tensor, and their gradients at the same places of another; both stay where they are.

    Gradients of fp32 parameters may be in a 16-bit format.
    """

    parameter: Tensor
    gradient: Tensor
    decay: bool  # whether weight decay applies
    pieces: tuple[Piece, ...] = ()  # in the order in which they lie, without gaps; none where nobody asks

    def __post_init__(self) -> None:
        for tensor in (self.parameter, self.gradient):
            if tensor.dim() != 1 or not tensor.is_contiguous():
                raise ShapeError(
                    f"a tensor of shape {list(tensor.shape)} and strides {list(tensor.stride())} is not flat",
                    "the optimizer walks through memory, whatever the strides say",
                    "give one dim without gaps: a view of a flat buffer",
                )
        fits = self.parameter.dtype in (self.gradient.dtype, WIDE.get(self.gradient.dtype))
        if self.parameter.shape != self.gradient.shape or not fits:
            raise ShapeError(
                f"{self.parameter.numel()} parameters in {self.parameter.dtype} do not go with "
                f"{self.gradient.numel()} gradients in {self.gradient.dtype}"
            )

    @property
    def wide(self) -> Flat:
        """With its gradients in the parameters' format, in memory of their own where that is another one."""
        return replace(self, gradient=self.gradient.to(self.parameter.dtype))

    def part(self, piece: Piece) -> Flat:
        """One of its pieces as a flat tensor of its own, in the same memory."""
        alone = replace(piece, start=0, stop=piece.stop - piece.start)
        place = slice(piece.start, piece.stop)
        return Flat(self.parameter[place], self.gradient[place], self.decay, (alone,))
