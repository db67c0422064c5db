"""Adafactor (Shazeer and Stern 2018): squares kept as a row and a column of each matrix, as torch.optim.Adafactor.

The means of squares over rows and over columns are of the whole matrix, whoever owns which part of it: ranks add their
parts up, once in an update, and once more for the size of each parameter's step. Rows and columns are kept whole by
all ranks of the group; they are few. A parameter of more than two dims is a stack of matrices, one of fewer keeps a
square for each element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
    """Sums over all elements of the parameters, in one piece of memory that is reduced at once."""

    total: Tensor
    row: dict[str, Tensor]  # of squared gradients
    column: dict[str, Tensor]
    weight: Tensor  # of squared weights, by the parameter's number


class Adafactor(Optimizer):
    """Holds a row and a column for each matrix, and squares for this rank's elements of what is no matrix."""

    def __init__(self, flats: Sequence[Flat], config: OptimConfig, group: Group, seed: int = 0) -> None:
        super().__init__(flats, config, group, seed)
        matrices = [entry for entry in self.entries.values() if len(entry.shape) > 1]
        self.row = {entry.name: self.like.new_zeros(entry.shape[:-1]) for entry in matrices}
        self.column = {entry.name: self.like.new_zeros(column_shape(entry)) for entry in matrices}
        self.square = {name: torch.zeros_like(self.here(name)) for name in self.entries if name not in self.row}
        self._numbers = {name: number for number, name in enumerate(self.entries)}

    def states(self) -> dict[str, list[State]]:
        return {
            "row": [State(name, tensor, whole=True) for name, tensor in self.row.items()],
            "column": [State(name, tensor, whole=True) for name, tensor in self.column.items()],
            "square": [State(name, tensor) for name, tensor in self.square.items()],
        }

    @torch.no_grad()
    def update(self, rate: float, step: int) -> None:
        sizes = self._take_in((step + 1) ** SQUARE_DECAY)
        rows = {name: row / row.mean(-1, keepdim=True).clamp_(min=_small(row)) for name, row in self.row.items()}
        directions = self._direction_sizes(rows)
        relative = min(rate, 1 / math.sqrt(step + 1))
        for piece, flat in self._chunks():
            number = self._numbers[piece.name]
            size = max(sizes[number], SMALLEST) * relative / max(1.0, directions[number] / THRESHOLD)
            flat.parameter.mul_(1 - rate * self.config.decay * flat.decay)
            flat.parameter.sub_(self._direction(piece, flat.gradient, rows).mul_(size))

    def _take_in(self, fresh: float) -> list[float]:
        """Move the means of squares by a part ``fresh``; the root mean square of each parameter's weights."""
        sums = self._empty_sums()
        for piece, flat in self._chunks():
            sums.weight[self._numbers[piece.name]] += _squared(flat.parameter)
            squares = flat.gradient.square()
            if piece.name in self.row:
                _add_up(squares, piece, sums)
            else:
                self._square(piece).lerp_(squares, fresh)
        self.group.all_reduce(sums.total)
        for name in self.row:
            high, width = self.entries[name].shape[-2:]
            _mix(self.row[name], sums.row[name] / max(width, 1), fresh)
            _mix(self.column[name], sums.column[name] / max(high, 1), fresh)
        return self._root_means(sums.weight)

    def _empty_sums(self) -> Sums:
        rows, columns = ([x.numel() for x in kept.values()] for kept in (self.row, self.column))
        sizes = [sum(rows), sum(columns), len(self.entries)]
        total = self.like.new_zeros(sum(sizes), dtype=torch.float64)
        row, column, weight = total.split(sizes)
        by_name = [dict(zip(self.row, x.split(n), strict=True)) for x, n in ((row, rows), (column, columns))]
        return Sums(total, *by_name, weight)

    def _direction_sizes(self, rows: dict[str, Tensor]) -> list[float]:
        """The root mean square of each parameter's direction, over all its elements."""
        squares = self.like.new_zeros(len(self.entries), dtype=torch.float64)
        for piece, flat in self._chunks():
            squares[self._numbers[piece.name]] += _squared(self._direction(piece, flat.gradient, rows))
        self.group.all_reduce(squares)
        return self._root_means(squares)

    def _root_means(self, squares: Tensor) -> list[float]:
        rows = zip(squares.tolist(), self.entries.values(), strict=True)
        return [math.sqrt(square / max(entry.size, 1)) for square, entry in rows]

    def _direction(self, piece: Piece, gradient: Tensor, rows: dict[str, Tensor]) -> Tensor:
        """The gradient by the root of the mean square, made anew each time rather than kept.

        ``rows`` are those that are kept, by their mean: times the column they are the mean square of a matrix.
        """
        mean = self._product(piece, rows) if piece.name in rows else self._square(piece).clone()
        return mean.clamp_(min=_small(mean) ** 2).rsqrt_().mul_(gradient)

    def _product(self, piece: Piece, rows: dict[str, Tensor]) -> Tensor:
        """Row times column, for some elements of a matrix."""
        high, width = piece.shape[-2:]
        size, before = piece.stop - piece.start, piece.first % width
        row, column = rows[piece.name].view(-1, high), self.column[piece.name].view(-1, width)
        matrices = _matrices(piece, -(-(before + size) // width))
        product = torch.cat([row[matrix, start:stop].outer(column[matrix]) for matrix, start, stop in matrices])
        return product.view(-1)[before : before + size]

    def _square(self, piece: Piece) -> Tensor:
        shift = self.places[piece.name][1].start
        return self.square[piece.name][piece.start - shift : piece.stop - shift]

    def _chunks(self) -> Iterator[tuple[Piece, Flat]]:
        """What this rank has, a few rows at a time: they stay in a core's cache."""
        for name, entry in self.entries.items():
            width = entry.shape[-1] if name in self.row else 1
            yield from self.blocks(name, width * max(1, self.chunk // max(width, 1)))


def column_shape(entry: Entry) -> tuple[int, ...]:
    """The shape of a parameter without the dim of its rows."""
    return entry.shape[:-2] + entry.shape[-1:]


def _add_up(squares: Tensor, piece: Piece, sums: Sums) -> None:
    """Add squares of some elements of a matrix to the sums of its rows and columns."""
    width = piece.shape[-1]
    first, before = divmod(piece.first, width)
    after = -(before + squares.numel()) % width
    rows = torch.nn.functional.pad(squares, (before, after)).view(-1, width)  # zeros where others have elements
    sums.row[piece.name][first : first + len(rows)] += rows.sum(1)
    done = 0
    for matrix, start, stop in _matrices(piece, len(rows)):
        sums.column[piece.name].view(-1, width)[matrix] += rows[done : done + stop - start].sum(0)
        done += stop - start


def _matrices(piece: Piece, rows: int) -> list[tuple[int, int, int]]:
    """The matrices of a stack that a piece's ``rows`` lie in: number, and the first and last of its rows there."""
    high, first = piece.shape[-2], piece.first // piece.shape[-1]
    return [
        (matrix, max(first - matrix * high, 0), min(first + rows - matrix * high, high))
        for matrix in range(first // high, (first + rows - 1) // high + 1)
    ]


def _mix(kept: Tensor, now: Tensor, fresh: float) -> None:
    kept.lerp_(now.view(kept.shape).to(kept.dtype), fresh)


def _small(x: Tensor) -> float:
    """The least that the root of a mean square counts as."""
    return torch.finfo(x.dtype).eps


def _squared(x: Tensor) -> Tensor:
    """The sum of squares of a chunk."""
    return torch.linalg.vector_norm(x).double().square()
