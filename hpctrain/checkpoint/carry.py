"""Carry: tensors from files to files, one of them and a few blocks of it in memory, our way and Hugging Face's.

A move makes one tensor of theirs from some of ours, or some of ours from one of theirs. What only changes its file is
written as it was read; what is turned, joined, taken apart or gets another dtype goes out in blocks of rows. What is
read from a checkpoint is compared with its checksums, and what is written to one gets them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.blocks import Digests
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.parts import Part, Tell, quiet, read
from hpctrain.checkpoint.ranges import flat_bytes
from hpctrain.checkpoint.save import sync_file
from hpctrain.plan.hub import Theirs, share

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


class Source(Protocol):
    """A tensor that can be read; of its ``slot`` the name, the shape and the dtype have a meaning."""

    slot: Slot

    def read(self) -> Tensor:
        """All its elements, flat, in its dtype."""


@dataclass(frozen=True)
class Move:
    """One tensor of theirs and its parts, on the two sides: as many places as parts on ours, one on theirs."""

    theirs: Theirs
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
    own = [moves[number] for number in share([move.nbytes for move in moves], ranks, rank)]
    total, done = sum(move.nbytes for move in own), 0
    for move in own:
        for count in _carry(move, sums):
            done += count
            tell(done, total)
    for path in sorted({place.path for move in own for place in move.targets}):
        sync_file(path)


def _carry(move: Move, sums: np.ndarray | None) -> Iterator[int]:
    """Read and write one move; gives the bytes of each write."""
    parts = move.theirs.parts
    held = [_matrix(source) for source in move.sources]
    if len(held) < len(parts):
        held = list(held[0].split([part.shape[-1] for part in parts], 1))
    views = [one.t() if part.turned else one for one, part in zip(held, parts, strict=True)]
    if len(move.targets) == 1:
        yield from _write(views, move.targets[0], sums)
        return
    for view, place in zip(views, move.targets, strict=True):
        yield from _write([view], place, sums)


def _matrix(source: Source) -> Tensor:
    """A tensor of a file; a vector as one row."""
    shape = source.slot.shape
    return source.read().view(shape if len(shape) > 1 else (1, -1))


def _write(views: Sequence[Tensor], place: Place, sums: np.ndarray | None) -> Iterator[int]:
    """Write matrices side by side as one tensor."""
    digests = Digests()
    slot, dtype = place.slot, getattr(torch, place.slot.dtype)
    at, rows = slot.offset, views[0].shape[0]
    as_it_is = len(views) == 1 and views[0].is_contiguous() and views[0].dtype == dtype
    step = rows if as_it_is else max(1, BUFFER_BYTES * rows // slot.nbytes)
    for row in range(0, rows, step):
        parts = [_laid(view[row : row + step]) for view in views]
        block = flat_bytes((torch.cat(parts, 1) if len(parts) > 1 else parts[0]).to(dtype))
        disk.write(place.path, [disk.Piece(at, block)], sync=False)
        if sums is not None:
            digests.add(memoryview(block.numpy()))
        at += block.numel()
        yield block.numel()
    if sums is not None:
        sums[slot.first : slot.first + slot.blocks] = digests.end()


def _laid(block: Tensor) -> Tensor:
    """A block of rows as one run of memory: what is one run itself torch turns about 5 times quicker than a part."""
    if block.is_contiguous():
        return block
    return torch.empty(block.shape, dtype=block.dtype).copy_(block.t().contiguous().t())
