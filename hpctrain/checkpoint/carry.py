"""Carry: tensors from files to files, one of them and a few blocks of it in memory, our way and Hugging Face's.

A move makes one tensor of theirs from some of ours, some of ours from one of theirs, or one of our stacks of matrices
from as many of theirs. What only changes its file is written as it was read; what is turned, joined, taken apart or
gets another dtype goes out in blocks of rows. What is read from a checkpoint is compared with its checksums, and what
is written to one gets them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES, Digests
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.parts import Part, Tell, quiet, read
from hpctrain.checkpoint.ranges import flat_bytes
from hpctrain.checkpoint.save import sync_file
from hpctrain.plan import hub
from hpctrain.plan.layout import ITEMSIZE

BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Place:
    """A tensor's bytes in a file; of a checkpoint also where the checksums of all its tensors begin."""

    path: Path
    slot: Slot
    table: int | None = None

    def read(self) -> Tensor:
        """All its elements, flat, in its dtype."""
        (memory,) = read(self.path, [Part(self.slot, 0, prod(self.slot.shape))], self.table)
        return memory


@dataclass(frozen=True)
class Matrix:
    """One matrix of a stack in a checkpoint."""

    stack: Place
    number: int

    @property
    def slot(self) -> Slot:
        """Its shape and dtype."""
        return replace(self.stack.slot, shape=self.stack.slot.shape[1:])

    def read(self) -> Tensor:
        """Its elements, flat; what is read is whole blocks that have a checksum."""
        slot, size = self.stack.slot, prod(self.slot.shape)
        each, total, start = BLOCK_BYTES // ITEMSIZE[slot.dtype], prod(slot.shape), self.number * size
        first, last = start // each * each, min(-(-(start + size) // each) * each, total)
        (memory,) = read(self.stack.path, [Part(slot, first, last)], self.stack.table)
        return memory[start - first : start - first + size]


class Source(Protocol):
    """A tensor that can be read; of its ``slot`` the name, the shape and the dtype have a meaning."""

    slot: Slot

    def read(self) -> Tensor:
        """All its elements, flat, in its dtype."""


@dataclass(frozen=True)
class Move:
    """Parts of tensors of theirs, which are weights of ours: where they come from, and where they go to.

    One place for all parts, or one for each.
    """

    parts: tuple[hub.Part, ...]
    sources: tuple[Source, ...]
    targets: tuple[Place, ...]

    @property
    def nbytes(self) -> int:
        """Bytes to write."""
        return sum(place.slot.nbytes for place in self.targets)


def carry(moves: Sequence[Move], ranks: int, rank: int, tell: Tell = quiet, sums: np.ndarray | None = None) -> None:
    """Do a rank's share of the moves, into files that are laid out; the disk has the bytes on return.

    ``tell`` is told the bytes of the share after each write. ``sums`` is filled with the checksums of what was written,
    each at its number in the file, where that is a checkpoint. Raises DamagedError where what is read is damaged.
    """
    own = [moves[number] for number in hub.share([move.nbytes for move in moves], ranks, rank)]
    total, done = sum(move.nbytes for move in own), 0
    for move in own:
        for count in _carry(move, sums):
            done += count
            tell(done, total)
    for path in sorted({place.path for move in own for place in move.targets}):
        sync_file(path)


def _carry(move: Move, sums: np.ndarray | None) -> Iterator[int]:
    """Read and write one move; gives the bytes of each write."""
    pairs = zip(_held(move), move.parts, strict=True)
    views = (one.t() if part.turned else one for one, part in pairs)
    if len(move.targets) > 1:
        for view, place in zip(views, move.targets, strict=True):
            yield from _write([[view]], place, sums)
    elif move.parts[0].number is None:
        yield from _write([list(views)], move.targets[0], sums)
    else:
        yield from _write(([view] for view in views), move.targets[0], sums)


def _held(move: Move) -> Iterator[Tensor]:
    """Each part's matrix as it is on the side that it comes from; read when it is asked for."""
    if len(move.sources) == len(move.parts):
        yield from map(_matrix, move.sources)
    else:
        yield from _matrix(move.sources[0]).split([part.shape[-1] for part in move.parts], 1)


def _matrix(source: Source) -> Tensor:
    """A tensor of a file; a vector as one row."""
    shape = source.slot.shape
    return source.read().view(shape if len(shape) > 1 else (1, -1))


def _write(bands: Iterable[Sequence[Tensor]], place: Place, sums: np.ndarray | None) -> Iterator[int]:
    """Write one tensor: bands one below the other, each of matrices side by side, and one in memory at a time."""
    digests, slot = Digests(), place.slot
    at = slot.offset
    for views in bands:
        for block in _blocks(views, getattr(torch, slot.dtype)):
            disk.write(place.path, [disk.Piece(at, block)], sync=False)
            if sums is not None:
                digests.add(memoryview(block.numpy()))
            at += block.numel()
            yield block.numel()
        del views, block
    if sums is not None:
        sums[slot.first : slot.first + slot.blocks] = digests.end()


def _blocks(views: Sequence[Tensor], dtype: torch.dtype) -> Iterator[Tensor]:
    """The bytes of matrices side by side, some rows at a time, or all of them where they lie so."""
    rows, nbytes = views[0].shape[0], sum(view.numel() for view in views) * dtype.itemsize
    as_it_is = len(views) == 1 and views[0].is_contiguous() and views[0].dtype == dtype
    step = rows if as_it_is else max(1, BUFFER_BYTES * rows // nbytes)
    for row in range(0, rows, step):
        parts = [_laid(view[row : row + step]) for view in views]
        yield flat_bytes((torch.cat(parts, 1) if len(parts) > 1 else parts[0]).to(dtype))


def _laid(block: Tensor) -> Tensor:
    """A block of rows as one run of memory: what is one run itself torch turns about 5 times quicker than a part."""
    if block.is_contiguous():
        return block
    return torch.empty(block.shape, dtype=block.dtype).copy_(block.t().contiguous().t())
