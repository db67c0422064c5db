"""Snapshot: a copy in host memory of what this rank writes, so that a run trains on while it goes to the disk.

The memory is taken at the first save and kept, so that later ones find its pages there; on a GPU's host it is pinned.
It has the bytes of what the rank writes: replicas share the writing, so over all ranks it is the size of the file.
Tensors whose short runs alternate between ranks are exchanged as they are copied, so that a rank writes whole blocks.
"""

from __future__ import annotations

import socket
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import psutil
import torch
from torch import Tensor

from hpctrain.checkpoint import exchange, shares
from hpctrain.checkpoint.checksums import Written
from hpctrain.checkpoint.disk import Piece
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.ranges import flat_bytes, piece_of, runs, write_boxes
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.cluster.probe import memory_limit
from hpctrain.comm.group import Group
from hpctrain.plan.layout import ITEMSIZE, Box


@dataclass(frozen=True)
class Part:
    """What this rank writes of a tensor: ``nbytes`` of its held piece from ``begin`` on, kept from ``start`` on."""

    entry: Entry
    boxes: tuple[Box, ...]
    begin: int
    nbytes: int
    start: int

    def pieces(self, memory: Tensor, slot: Slot) -> Iterator[Piece]:
        """Each contiguous run in the file, where the tensor has the place ``slot``."""
        size = ITEMSIZE[self.entry.layout.dtype]
        base = self.start - self.begin
        for at, start, length in runs(self.entry, self.boxes):
            run = memory[base + start * size : base + (start + length) * size]
            yield piece_of(slot, at * size, run)


class Snapshot:
    """Room for a copy of what this rank writes of ``entries``; live: the copy changes, its place does not.

    First come the parts that it writes as it holds them, then its shares of tensors whose runs alternate.
    """

    def __init__(self, entries: Sequence[Entry], group: Group) -> None:
        self.entries, self.group = tuple(entries), group
        self.parts = tuple(_parts(entries, shares.crossing(entries, group.size)))
        self.stretches = tuple(shares.own(entries, group.size, group.rank))
        self._held = sum(part.nbytes for part in self.parts)
        self.nbytes = self._held + sum(stretch.nbytes for stretch in self.stretches)
        self._memory: Tensor | None = None

    def take(self, state: State, doing: str) -> None:
        """Copy what this rank writes of ``state``. On return the copy is whole, and the tensors may change.

        Collective; an error of one rank is raised on all, and ``doing`` says what it came in.
        """
        together(self.group, lambda: self._take_parts(state), doing)
        place = self._held
        for ranges in exchange.gathered(self.entries, state, self.group, doing):
            for stretch, memory in ranges:
                self._memory[place : place + stretch.nbytes].copy_(memory)
                place += stretch.nbytes

    def written(self, slots: Sequence[Slot]) -> list[Written]:
        """The copy as pieces of a file with these places, in the file's order."""
        placed = {slot.name: slot for slot in slots}
        parts = [(placed[part.entry.name], part) for part in self.parts]
        found = [(slot, list(part.pieces(self._memory, slot))) for slot, part in parts]
        return sorted([*found, *self._shares(placed)], key=lambda one: one[0].offset)

    def _take_parts(self, state: State) -> None:
        devices = {state[part.entry.name].tensor.device for part in self.parts} - {torch.device("cpu")}
        if self._memory is None:
            pinned = any(device.type == "cuda" for device in devices)
            self._memory = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=pinned)
        for part in self.parts:
            held = flat_bytes(state[part.entry.name].tensor)[part.begin : part.begin + part.nbytes]
            self._memory[part.start : part.start + part.nbytes].copy_(held, non_blocking=True)
        for device in devices:
            torch.get_device_module(device).synchronize(device)

    def _shares(self, placed: Mapping[str, Slot]) -> Iterator[Written]:
        """Of each tensor the stretches lie one after another, there and here."""
        place = self._held
        for name, some in groupby(self.stretches, lambda stretch: stretch.entry.name):
            first, *others = some
            nbytes = sum(stretch.nbytes for stretch in (first, *others))
            yield placed[name], [piece_of(placed[name], first.start, self._memory[place : place + nbytes])]
            place += nbytes


def turns(pieces: Iterable[Piece], nbytes: int) -> Iterator[list[Piece]]:
    """Pieces in their order, about ``nbytes`` at a time."""
    turn: list[Piece] = []
    size = 0
    for piece in pieces:
        for start in range(0, piece.memory.numel(), nbytes):
            memory = piece.memory[start : start + nbytes]
            turn.append(replace(piece, at=piece.at + start, memory=memory))
            size += memory.numel()
            if size >= nbytes:
                yield turn
                turn, size = [], 0
    if turn:
        yield turn


@dataclass(frozen=True)
class Room:
    """A rank's needs, and what memory its node has, in bytes."""

    host: str
    needed: int
    """What the rank's copy takes."""
    held: int
    """What the rank's process holds already."""
    free: int
    """What the node could give."""
    limit: int
    """What all processes of the job on the node may hold."""

    @classmethod
    def seen(cls, needed: int) -> Room:
        """What this rank sees."""
        held, free = psutil.Process().memory_info().rss, psutil.virtual_memory().available
        return cls(socket.gethostname(), needed, held, free, memory_limit()[0])


def fits(rooms: Sequence[Room]) -> bool:
    """Whether the copies of all ranks find room on their nodes."""
    return all(_fits([room for room in rooms if room.host == host]) for host in {room.host for room in rooms})


def _fits(rooms: Sequence[Room]) -> bool:
    needed, held = (sum(values) for values in zip(*((room.needed, room.held) for room in rooms), strict=True))
    return needed <= min(room.free for room in rooms) and held + needed <= min(room.limit for room in rooms)


def _parts(entries: Sequence[Entry], but: Collection[str]) -> Iterator[Part]:
    """What this rank writes lies in one piece in what it holds, tensor by tensor: see ``Layout.writes``."""
    start = 0
    for entry, boxes in write_boxes(entries):
        size = ITEMSIZE[entry.layout.dtype]
        nbytes = sum(box.size for box in boxes) * size
        if nbytes and entry.name not in but:
            _, first, _ = next(runs(entry, boxes))
            yield Part(entry, boxes, first * size, nbytes, start)
            start += nbytes
