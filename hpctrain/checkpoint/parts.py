"""Parts: a checkpoint's tensors, cut into pieces that many ranks share, to go through a file of any size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import checksums, disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count, digests
from hpctrain.checkpoint.format import Slot
from hpctrain.comm.group import Group
from hpctrain.plan.layout import ITEMSIZE

# At most 64 MiB of the widest type; a multiple of a block's bytes, so that parts of every type begin with a block.
STEP_ELEMENTS = 1 << 23

Tell = Callable[[int, int], None]
"""Told as work goes on: the bytes of this rank's share that are done, and all of them."""


def quiet(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Part:
    """Elements ``start`` to ``stop`` of a tensor; it begins with a block, and ends with one or with the tensor."""

    slot: Slot
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements in the part."""
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return self.numel * ITEMSIZE[self.slot.dtype]

    @property
    def at(self) -> int:
        """Its first byte's offset in the file."""
        return self.slot.offset + self.start * ITEMSIZE[self.slot.dtype]

    @property
    def block(self) -> int:
        """The number of its first block in the tensor."""
        return self.start * ITEMSIZE[self.slot.dtype] // BLOCK_BYTES

    def of(self, slot: Slot) -> Part:
        """The same elements of another tensor."""
        return Part(slot, self.start, self.stop)


def mine(slots: Sequence[Slot], group: Group, tell: Tell = quiet) -> Iterator[list[Part]]:
    """This rank's share of all parts, some at a time; over the ranks of ``group`` every element comes once."""
    total = sum(part.nbytes for batch in _share(slots, group) for part in batch)
    done = 0
    for batch in _share(slots, group):
        yield batch
        done += sum(part.nbytes for part in batch)
        tell(done, total)


def read(path: Path, parts: Sequence[Part], table: int | None = None) -> list[Tensor]:
    """The parts' elements, flat, in their own dtypes; with ``table`` checked: DamagedError names what is damaged."""
    memories = [torch.empty(part.numel, dtype=getattr(torch, part.slot.dtype)) for part in parts]
    for part, wrong in zip(parts, fill(path, parts, memories, table), strict=True):
        for block in wrong[:1]:
            raise checksums.damaged(path, part.slot, block, block + 1)
    return memories


def fill(path: Path, parts: Sequence[Part], memories: Sequence[Tensor], table: int | None) -> list[list[int]]:
    """Read the parts into ``memories``, and give the numbers of each part's blocks that do not have their checksum."""
    raw = [memory.view(torch.uint8) for memory in memories]
    pieces = [disk.Piece(part.at, memory) for part, memory in zip(parts, raw, strict=True)]
    if table is None:
        disk.read(path, pieces)
        return [[] for _ in parts]
    told = [
        checksums.expected(table, part.slot, part.block, count(memory.numel()))
        for part, memory in zip(parts, raw, strict=True)
    ]
    disk.read(path, [*pieces, *(piece for piece, _ in told)])
    return [
        [part.block + int(place) for place in np.flatnonzero(np.array(digests(_view(memory)), np.uint64) != wanted)]
        for part, memory, (_, wanted) in zip(parts, raw, told, strict=True)
    ]


def made(memory: Tensor) -> list[int]:
    """The checksums of a part's blocks."""
    return digests(_view(memory.view(torch.uint8)))


def _view(memory: Tensor) -> memoryview:
    return memoryview(memory.numpy())


def _share(slots: Sequence[Slot], group: Group) -> Iterator[list[Part]]:
    for number, batch in enumerate(_batches(slots)):
        if number % group.size == group.rank:
            yield batch


def _batches(slots: Sequence[Slot]) -> Iterator[list[Part]]:
    """All parts in the order of the file, with small ones together."""
    batch: list[Part] = []
    numel = 0
    for slot in sorted(slots, key=lambda slot: slot.offset):
        stop = prod(slot.shape)
        for start in range(0, stop, STEP_ELEMENTS):
            part = Part(slot, start, min(start + STEP_ELEMENTS, stop))
            numel += part.numel
            if batch and numel > STEP_ELEMENTS:
                yield batch
                batch, numel = [], part.numel
            batch.append(part)
    if batch:
        yield batch
