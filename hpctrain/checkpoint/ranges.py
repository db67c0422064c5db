"""From boxes to bytes: which range of the file each piece of a held tensor is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from hpctrain.checkpoint.disk import Piece
from hpctrain.checkpoint.format import ALIGN_FROM_BYTES, Slot
from hpctrain.checkpoint.state import Entry
from hpctrain.plan.layout import ITEMSIZE, Box, Run

# Replicas take turns at small tensors in groups of about this size, so that a turn is one write and not many.
TURN_BYTES = 1 << 22


def file_order(entries: Sequence[Entry]) -> list[Entry]:
    """The small tensors and then the others, by name: their order in the file."""
    return sorted(entries, key=lambda entry: (entry.layout.nbytes >= ALIGN_FROM_BYTES, entry.name))


def write_boxes(entries: Sequence[Entry]) -> Iterator[tuple[Entry, tuple[Box, ...]]]:
    """What this rank writes of each tensor, in file order; over all ranks each element comes once."""
    for entry, turn in turns(entries):
        yield entry, () if entry.rank is None else entry.layout.writes(entry.mesh, entry.rank, turn)


def turns(entries: Sequence[Entry]) -> Iterator[tuple[Entry, int]]:
    """Each tensor in file order, and the replica whose turn it is."""
    packed = 0
    for number, entry in enumerate(file_order(entries)):
        small = entry.layout.nbytes < ALIGN_FROM_BYTES
        turn = packed // TURN_BYTES if small else number
        packed += entry.layout.nbytes if small else 0
        yield entry, turn


def pieces(entry: Entry, boxes: Sequence[Box], memory: Tensor, slot: Slot) -> Iterator[Piece]:
    """Each contiguous run of ``boxes``, in the file and in ``memory``, the held piece as flat bytes."""
    size = ITEMSIZE[entry.layout.dtype]
    for at, start, length in runs(entry, boxes):
        yield piece_of(slot, at * size, memory[start * size : (start + length) * size])


def piece_of(slot: Slot, start: int, memory: Tensor) -> Piece:
    """The tensor's bytes from ``start`` on, in ``memory``."""
    return Piece(slot.offset + start, memory, slot.offset, slot)


def runs(entry: Entry, boxes: Sequence[Box]) -> Iterator[tuple[int, int, int]]:
    """(place in the global tensor, place in the held piece, length) of each contiguous run, in elements."""
    if [box.shape for box in boxes] == [entry.layout.shape]:  # all of it, as most of the many small tensors are
        yield from [(0, 0, boxes[0].size)] if boxes[0].size else []
        return
    place, begin, count = 0, 0, 0
    for at, start, length in _runs(entry, boxes):
        if (at, start) == (place + count, begin + count):
            count += length
            continue
        if count:
            yield place, begin, count
        place, begin, count = at, start, length
    if count:
        yield place, begin, count


def _runs(entry: Entry, boxes: Sequence[Box]) -> Iterator[tuple[int, int, int]]:
    if not boxes:
        return
    box = entry.layout.box(entry.mesh, entry.rank)
    first, _ = entry.layout.interval(entry.mesh, entry.rank)
    for part in boxes:
        for at, start, length in _paired(part.runs(entry.layout.shape), part.within(box).runs(box.shape)):
            yield at, start - first, length


def flat_bytes(tensor: Tensor) -> Tensor:
    """The tensor as flat bytes: its own memory where it is contiguous, else a copy."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)


def _paired(one: Iterator[Run], other: Iterator[Run]) -> Iterator[tuple[int, int, int]]:
    """Two ways to cut the same elements, in the same order, as (place in one, place in other, length)."""
    place, left = 0, 0
    for start, length in one:
        while length:
            if not left:
                place, left = next(other)
            step = min(length, left)
            yield start, place, step
            start, length, place, left = start + step, length - step, place + step, left - step
