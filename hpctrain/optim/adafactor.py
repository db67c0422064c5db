"""Adafactor (Shazeer and Stern 2018): squares kept as a row and a column of each matrix, as torch.optim.Adafactor.

The means of squares over rows and over columns are of the whole matrix, whoever owns which part of it: ranks add their
parts up, once in an update, and once more for the size of each parameter's step. Rows and columns are kept whole by
all ranks of the group; they are few. A parameter of more than two dims is a stack of matrices, one of fewer keeps a
square for each element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.config import OptimConfig
from hpctrain.optim.flat import Flat, Piece
from hpctrain.optim.optimizer import Entry, Optimizer, State

SQUARE_DECAY = -0.8  # the mean of squares takes in a part of t^-0.8 of step t
SMALLEST = 1e-3  # parameters smaller than this move as if they were as large
THRESHOLD = 1.0  # steps whose root mean square is larger are scaled down to it


@dataclass(frozen=True)
class Sums:
    """Sums over the elements of one parameter: of squared gradients by row and by column, and of squared weights."""

    row: Tensor
    column: Tensor
    weight: Tensor


class Adafactor(Optimizer):
    """Holds a row and a column for each matrix, and squares for this rank's elements of what is no matrix."""

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        like = self.flats[0].parameter
        matrices = [entry for entry in self.entries.values() if len(entry.shape) > 1]
        self.row = {entry.name: like.new_zeros(entry.shape[:-1]) for entry in matrices}
        self.column = {entry.name: like.new_zeros(column_shape(entry)) for entry in matrices}
        self.square = {name: torch.zeros_like(self.here(name)) for name in self.entries if name not in self.row}
        self.pieces = [piece for _, piece in self.places.values() if piece.start < piece.stop]

    def states(self) -> dict[str, list[State]]:
        return {
            "row": [State(name, tensor, whole=True) for name, tensor in self.row.items()],
            "column": [State(name, tensor, whole=True) for name, tensor in self.column.items()],
            "square": [State(name, tensor) for name, tensor in self.square.items()],
        }

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        fresh = (step + 1) ** SQUARE_DECAY
        sizes = self._take_in(fresh)
        moved = self._step_sizes()
        for piece in self.pieces:
            entry, x = self.entries[piece.name], self.here(piece.name)
            size = max(sizes[entry.name], SMALLEST) * min(rate, 1 / math.sqrt(step + 1))
            x.mul_(1 - rate * self.config.decay * entry.decay)
            x.sub_(self._direction(piece).mul_(size / max(1.0, moved[entry.name] / THRESHOLD)))

    def _take_in(self, fresh: float) -> dict[str, float]:
        """Move the means of squares by a part ``fresh``; the root mean square of each parameter's weights."""
        total, sums = self._empty_sums()
        for piece in self.pieces:
            self._add_up(sums[piece.name], piece)
        self.group.all_reduce(total)
        for name in self.row:
            high, width = self.entries[name].shape[-2:]
            _mix(self.row[name], sums[name].row / max(width, 1), fresh)
            _mix(self.column[name], sums[name].column / max(high, 1), fresh)
        for name, kept in self.square.items():
            kept.lerp_(self._gradient(name).square(), fresh)
        return {name: _root_mean(float(sums[name].weight), entry) for name, entry in self.entries.items()}

    def _empty_sums(self) -> tuple[Tensor, dict[str, Sums]]:
        """Sums for all parameters, in one piece of memory that is reduced at once."""
        counts = [(math.prod(e.shape[:-1]), math.prod(column_shape(e)), 1) for e in self.entries.values()]
        total = self.flats[0].parameter.new_zeros(sum(map(sum, counts)), dtype=torch.float64)
        parts = iter(total.split([count for three in counts for count in three]))
        return total, {name: Sums(next(parts), next(parts), next(parts)) for name in self.entries}

    def _add_up(self, sums: Sums, piece: Piece) -> None:
        """Add this rank's elements of a parameter to its sums."""
        sums.weight.add_(_squared(self.here(piece.name)))
        if piece.name in self.row:
            squares = _in_rows(self._gradient(piece.name).square(), piece)
            first, width = piece.first // piece.shape[-1], piece.shape[-1]
            sums.row[first : first + len(squares)] += squares.sum(1)
            columns = sums.column.view(-1, width)
            for matrix, start, stop in _matrices(piece, len(squares)):
                columns[matrix] += squares[start:stop].sum(0)

    def _step_sizes(self) -> dict[str, float]:
        """The root mean square of each parameter's direction, over all its elements."""
        moved = torch.zeros(len(self.entries), dtype=torch.float64, device=self.flats[0].parameter.device)
        numbers = {name: number for number, name in enumerate(self.entries)}
        for piece in self.pieces:
            moved[numbers[piece.name]] = _squared(self._direction(piece))
        self.group.all_reduce(moved)
        return {e.name: _root_mean(s, e) for e, s in zip(self.entries.values(), moved.tolist(), strict=True)}

    def _direction(self, piece: Piece) -> Tensor:
        """The gradient by the root of the mean square, for this rank's elements of a parameter."""
        gradient = self._gradient(piece.name)
        small = torch.finfo(gradient.dtype).eps
        mean = self.square[piece.name].clone() if piece.name in self.square else self._product(piece, small)
        return mean.clamp_(min=small * small).rsqrt_().mul_(gradient)

    def _product(self, piece: Piece, small: float) -> Tensor:
        """The mean square as row times column by the mean of the rows, for this rank's elements of a matrix."""
        row, width, size = self.row[piece.name], piece.shape[-1], piece.stop - piece.start
        first, before = divmod(piece.first, width)
        rows = (row / row.mean(-1, keepdim=True).clamp_(min=small)).view(-1)
        rows = rows[first : -(-(piece.first + size) // width)]
        mean = rows.unsqueeze(1).repeat(1, width)
        for matrix, start, stop in _matrices(piece, len(rows)):
            mean[start:stop] *= self.column[piece.name].view(-1, width)[matrix]
        return mean.view(-1)[before : before + size]

    def _gradient(self, name: str) -> Tensor:
        return self.here(name, [flat.gradient for flat in self.flats])


def column_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of a parameter without the dim of its rows."""
    return entry.shape[:-2] + entry.shape[-1:]


def _matrices(piece: Piece, rows: int) -> list[tuple[int, int, int]]:
    """The matrices of a stack that a piece touches: number, and the first and last of the piece's ``rows`` in it."""
    high, first = piece.shape[-2], piece.first // piece.shape[-1]
    return [
        (matrix, max(matrix * high - first, 0), min((matrix + 1) * high - first, rows))
        for matrix in range(first // high, (first + rows - 1) // high + 1)
    ]


def _in_rows(x: Tensor, piece: Piece) -> Tensor:
    """A piece's elements in whole rows of its parameter, zeros where others have them."""
    width = piece.shape[-1]
    before, after = piece.first % width, -(piece.first + x.numel()) % width
    whole = torch.nn.functional.pad(x, (before, after)) if before or after else x
    return whole.view(-1, width)


def _mix(kept: Tensor, now: Tensor, fresh: float) -> None:
    kept.lerp_(now.view(kept.shape).to(kept.dtype), fresh)


def _squared(x: Tensor) -> Tensor:
    """The sum of squares, in fp64 over rows of 64 Ki elements."""
    return torch.stack(torch._foreach_norm(x.split(1 << 16))).double().square().sum()


def _root_mean(squares: float, entry: Entry) -> float:
    return math.sqrt(squares / max(entry.size, 1))
