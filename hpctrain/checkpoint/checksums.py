"""Checksums of what ranks hold: made in a save from the ranks' own memory, and checked at a load.

A block that lies whole in one run of a rank's memory is digested there. Of a block that ranks share, each of them reads
the others' part from the file: in a save every sharer must come to the same digest, so bytes that a rank wrote and that
never came into the file are found at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count, digest, digests
from hpctrain.checkpoint.disk import Piece
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError, DamagedError

DIGEST_BYTES = 8
HOST_BYTES = 64 << 20  # of a GPU's memory, brought to the host at once
WINDOW = 1 << 20  # blocks whose digests ranks bring together at once: 16 MiB, whatever the size of the file
LEAST = torch.iinfo(torch.int64).min
OLDER = "go on from an older checkpoint, or copy it again from where it is whole"

Written = tuple[Slot, list[Piece]]
"""A tensor, and the pieces of it that a rank wrote."""


@dataclass(frozen=True)
class Span:
    """Blocks of a tensor, from number ``first`` of it on, that lie one after another in this rank's memory."""

    first: int
    memory: Tensor


@dataclass(frozen=True)
class Torn:
    """A block of which this rank has only pieces: they are told with their places in the file, as the block is."""

    number: int
    at: int
    length: int
    pieces: tuple[Piece, ...]


def split(slot: Slot, pieces: Iterable[Piece]) -> tuple[list[Span], list[Torn]]:
    """The whole blocks and the torn ones among ascending pieces of a tensor."""
    spans: list[Span] = []
    torn: dict[int, list[Piece]] = {}
    for piece in pieces:
        start, stop = piece.at - slot.offset, piece.end - slot.offset
        first, last = -(-start // BLOCK_BYTES), slot.blocks if stop == slot.nbytes else stop // BLOCK_BYTES
        if first < last:
            spans.append(Span(first, _cut(slot, piece, first * BLOCK_BYTES, last * BLOCK_BYTES).memory))
        for number in _touched(start, stop, first, last):
            cut = _cut(slot, piece, number * BLOCK_BYTES, (number + 1) * BLOCK_BYTES)
            torn.setdefault(number, []).append(cut)
    return spans, [_torn(slot, number, tuple(have)) for number, have in sorted(torn.items())]


@dataclass(frozen=True)
class Made:
    """The digests that this rank has made of a file's blocks, by the number of the block; live."""

    count: int
    """Blocks of the file, most of which are other ranks'."""
    values: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, slots: Iterable[Slot]) -> Made:
        """Of a file's blocks not one yet."""
        return cls(sum(slot.blocks for slot in slots))

    def put(self, number: int, values: Sequence[int]) -> None:
        """Take in the digests of blocks that lie one after another, from number ``number`` on."""
        self.values.update(enumerate(values, number))

    def see(self, piece: Piece) -> None:
        """Digest the blocks that lie whole in a piece, whose ``of`` is its tensor's slot. Threads may call it."""
        for span in split(piece.of, [piece])[0]:
            self.put(piece.of.first + span.first, of_span(span))

    def has(self, number: int, count: int) -> bool:
        """Whether it has the digests of ``count`` blocks from ``number`` on."""
        return all(one in self.values for one in range(number, number + count))

    def windows(self) -> Iterator[Tensor]:
        """WINDOW blocks at a time their digests d as (d, ~d): a maximum over ranks gives a block's greatest and least.

        They are shifted to signed numbers, since ranks can reduce those; where it has none, the least there is.
        """
        numbers = np.array(sorted(self.values), np.int64)
        values = np.array([self.values[number] for number in numbers.tolist()], np.uint64)
        for start in range(0, self.count, WINDOW):
            stop = min(start + WINDOW, self.count)
            first, last = np.searchsorted(numbers, (start, stop))
            places = torch.from_numpy(numbers[first:last] - start)
            signed = torch.from_numpy(values[first:last].view(np.int64)) ^ LEAST
            window = torch.full((2, stop - start), LEAST)
            window[0, places], window[1, places] = signed, ~signed
            yield window


def add_whole(made: Made, parts: Sequence[Written]) -> list[Torn]:
    """Digest the blocks that this rank has whole, save those that are made; give those of which it has only pieces."""
    shared: list[Torn] = []
    for slot, pieces in parts:
        spans, torn = split(slot, pieces)
        for span in spans:
            if not made.has(slot.first + span.first, count(span.memory.numel())):
                made.put(slot.first + span.first, of_span(span))
        shared += [replace(one, number=slot.first + one.number) for one in torn]
    return shared


def add_torn(path: Path, made: Made, torn: Sequence[Torn]) -> None:
    """Digest the blocks of which this rank has pieces, numbered as in the file, once all ranks have written theirs."""
    for one, value in zip(torn, _of_torn(path, torn), strict=True):
        made.put(one.number, [value])


def met(path: Path, parts: Sequence[Written], made: Made, group: Group) -> np.ndarray:
    """The digests of all blocks of a file, from those that each rank has ``made`` of what it wrote, its ``parts``.

    They are for the leading rank; the others, which hold no more than a window of them, get none. Collective. Raises
    CheckpointError on all ranks where sharers of a block differ: then the file does not have what was written.
    """
    told, wrong, start = np.empty(made.count if group.leads else 0, np.uint64), [], 0
    for window in made.windows():
        window = window.to(group.device)
        group.all_reduce(window, "max")
        found, other = window[0].cpu(), ~window[1].cpu()
        wrong += [start + int(number) for number in (found != other).nonzero().flatten()[: 1 - len(wrong)]]
        if group.leads:
            told[start : start + len(found)] = (found ^ LEAST).numpy().view(np.uint64)
        start += len(found)
    together(group, lambda: _refuse(path, parts, wrong), f"checking {path}")
    return told


def joined(own: np.ndarray, group: Group) -> np.ndarray:
    """The digests of all blocks, of which each rank made some and has 0 for the others. Collective."""
    told = torch.from_numpy(own.view(np.int64)).to(group.device)
    group.all_reduce(told, "sum")
    return told.cpu().numpy().view(np.uint64)


def expected(table: int, slot: Slot, first: int, blocks: int) -> tuple[Piece, np.ndarray]:
    """A piece that reads ``blocks`` checksums of a tensor from its block ``first`` on, and the numbers it fills."""
    memory = torch.empty(blocks * DIGEST_BYTES, dtype=torch.uint8)
    return Piece(table + (slot.first + first) * DIGEST_BYTES, memory), memory.numpy().view("<u8")


def of_span(span: Span) -> list[int]:
    """The digests of a span's blocks."""
    parts = (span.memory[start : start + HOST_BYTES] for start in range(0, span.memory.numel(), HOST_BYTES))
    return [one for part in parts for one in digests(memoryview(part.cpu().numpy()))]


def damaged(path: Path, slot: Slot, first: int, stop: int) -> DamagedError:
    """The error for blocks ``first`` to ``stop`` of a tensor."""
    start, end = first * BLOCK_BYTES, min(stop * BLOCK_BYTES, slot.nbytes)
    return DamagedError(
        f"{path}: {slot.name} is damaged in its bytes {start} to {end - 1}",
        f"they are bytes {slot.offset + start} to {slot.offset + end - 1} of the file, and do not have their checksum",
        OLDER,
    )


def _touched(start: int, stop: int, first: int, last: int) -> Iterator[int]:
    """The numbers of the blocks that bytes ``start`` to ``stop`` touch without filling them."""
    head, tail = start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES
    if first >= last:
        yield from range(head, tail + 1)
        return
    yield from range(head, first)
    yield from range(last, tail + 1)


def _cut(slot: Slot, piece: Piece, start: int, stop: int) -> Piece:
    """The part of a piece that lies in bytes ``start`` to ``stop`` of the tensor."""
    begin = piece.at - slot.offset
    start, stop = max(start, begin), min(stop, piece.end - slot.offset)
    return piece.part(start - begin, stop - begin)


def _torn(slot: Slot, number: int, pieces: tuple[Piece, ...]) -> Torn:
    start = number * BLOCK_BYTES
    return Torn(number, slot.offset + start, min(BLOCK_BYTES, slot.nbytes - start), pieces)


def _of_torn(path: Path, blocks: Sequence[Torn]) -> Iterator[int]:
    """Digests of blocks as the file has them, with this rank's own bytes laid over."""
    step = HOST_BYTES // BLOCK_BYTES
    for start in range(0, len(blocks), step):
        group = blocks[start : start + step]
        memory = [torch.empty(one.length, dtype=torch.uint8) for one in group]
        disk.read(path, [Piece(one.at, into) for one, into in zip(group, memory, strict=True)])
        for one, into in zip(group, memory, strict=True):
            for piece in one.pieces:
                into[piece.at - one.at : piece.end - one.at].copy_(piece.memory)
            yield digest(memoryview(into.numpy()))


def _refuse(path: Path, parts: Sequence[Written], wrong: Sequence[int]) -> None:
    """Raise where ranks that share a block see different bytes in it: what one of them wrote is not in the file."""
    for number in wrong:
        names = [slot.name for slot, _ in parts if slot.first <= number < slot.first + slot.blocks]
        if names:
            raise CheckpointError(
                f"{path}: {names[0]} does not have the bytes that were written",
                f"ranks that wrote parts of block {number - _first(parts, names[0])} read each other's differently",
                "see whether the file system shows all nodes the same bytes, or set checkpoint.writer to the other one",
            )


def _first(parts: Sequence[Written], name: str) -> int:
    return next(slot.first for slot, _ in parts if slot.name == name)
