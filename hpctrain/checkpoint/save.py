"""Save: the two ways to fill a laid-out file. Whichever is taken, the file's bytes are the same.

``direct``: each rank writes its byte ranges itself, with no MPI call and no HDF5. ``mpio``: through parallel HDF5; a
rank writes a tensor's long runs alone, and all write together the tensors whose runs alternate between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint import collective, disk, exchange, format
from hpctrain.checkpoint.checksums import Made, Written, add_torn, add_whole
from hpctrain.checkpoint.ranges import flat_bytes, piece_of, pieces, runs, write_boxes
from hpctrain.checkpoint.shares import alternates, crossing
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, FullError
from hpctrain.plan.layout import ITEMSIZE, Box

# MPI-IO counts bytes in 32 bits, and some libraries fail before they say so.
CALL_BYTES = 1 << 30
ALONE_BYTES = 1 << 26  # in a call that one rank makes for itself: after each the disk is told to begin
FULL = 'free space there, or set checkpoint.writer to "direct", whose errors are told in full'

Wrote = tuple[list[Written], Made]
"""What this rank wrote of each tensor, and the digests of the blocks that it has something of."""
Writer = Callable[[Path, Sequence[Entry], State, Sequence[format.Slot], Group, CheckpointConfig], Wrote]


def direct(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
) -> Wrote:
    """Write this rank's ranges of bytes at the datasets' places. Collective; an error of one rank is raised on all."""
    made = Made.of(slots)
    told = f"writing {path}"
    placed = {slot.name: slot for slot in slots}
    for ranges in exchange.gathered(entries, state, group, told):
        found = [piece_of(placed[stretch.entry.name], stretch.start, memory) for stretch, memory in ranges]
        together(group, lambda found=found: disk.write(path, found, False, made.see), told)

    def act() -> list[Written]:
        own = parts(entries, state, slots, crossing(entries, group.size))
        disk.write(path, _pieces(own), False, made.see)
        return own

    own = together(group, act, told)
    together(group, lambda: _settle(path, own, made, config.sync), f"checking {path}")
    return own, made


def mpio(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
    call_bytes: int = CALL_BYTES,
) -> Wrote:
    """Write with parallel HDF5, at most ``call_bytes`` in a call. Collective; an error of one rank is raised on all."""
    alone = min(call_bytes, ALONE_BYTES)
    planned = [
        Planned(entry, tuple(_calls(entry, boxes, call_bytes if alternates(entry) else alone)))
        for entry, boxes in write_boxes(entries)
    ]
    counts = torch.tensor([len(one.calls) if alternates(one.entry) else 0 for one in planned], dtype=torch.int64)
    group.all_reduce(counts, "max")
    file = together(group, lambda: collective.Shared(path, group.comm, config.hints), f"opening {path}")
    error = _write_alone(file, path, planned, state, slots)
    error = _write_together(file, planned, counts.tolist(), state) or error
    own, made = parts(entries, state, slots), Made.of(slots)
    together(group, lambda: _end(file, path, error, _pieces(own)), f"writing {path}")

    def act() -> None:
        _settle(path, own, made, config.sync)
        _check(path, _pieces(own))

    together(group, act, f"checking {path}")
    return own, made


WRITERS: dict[str, Writer] = {"direct": direct, "mpio": mpio}


def writer(kind: str, group: Group) -> Writer:
    """The writer of that name; CheckpointError where it cannot work here."""
    if kind == "mpio" and not (collective.parallel() and hasattr(group, "comm")):
        talk = f"these ranks talk by {type(group).__name__}"
        lacking = talk if collective.parallel() else "this h5py is a serial build"
        raise CheckpointError(
            'checkpoint.writer = "mpio" cannot be used here',
            f"{lacking}; mpio needs h5py built with HDF5_MPI=ON, and ranks that talk by MPI",
            'leave checkpoint.writer "auto", or set it to "direct": the file is the same',
        )
    return WRITERS["direct" if kind == "auto" else kind]


@dataclass(frozen=True)
class Planned:
    """The calls that this rank makes to write its part of a tensor; each has boxes in row-major order."""

    entry: Entry
    calls: tuple[tuple[Box, ...], ...]


def parts(
    entries: Sequence[Entry], state: State, slots: Sequence[format.Slot], but: Collection[str] = ()
) -> list[Written]:
    """What this rank writes of each tensor of which it writes something, in the file's order; nothing of ``but``."""
    placed = {slot.name: slot for slot in slots}

    def part(entry: Entry, boxes: Sequence[Box]) -> Written:
        slot = placed[entry.name]
        return slot, list(pieces(entry, boxes, flat_bytes(state[entry.name].tensor), slot))

    return [part(entry, boxes) for entry, boxes in write_boxes(entries) if boxes and entry.name not in but]


def _pieces(parts: Sequence[Written]) -> Iterator[disk.Piece]:
    return (piece for _, pieces in parts for piece in pieces)


def _calls(entry: Entry, boxes: Sequence[Box], call_bytes: int) -> Iterator[tuple[Box, ...]]:
    """The boxes, cut and packed into calls; each call's elements come in row-major order."""
    limit = max(1, call_bytes // ITEMSIZE[entry.layout.dtype])
    call: list[Box] = []
    steps = [(box, _whole_rows(box, limit)) for box in boxes]
    parts = (part for box, step in steps for start in range(0, box.size, step) for part in _part(box, start, step))
    for part in parts:
        if call and sum(one.size for one in call) + part.size > limit:
            yield tuple(call)
            call = []
        call.append(part)
    if call:
        yield tuple(call)


def _whole_rows(box: Box, limit: int) -> int:
    """At most ``limit`` elements of a box at once: whole rows, since HDF5 is quick at a selection of one box."""
    row = prod(box.shape[1:])
    return limit // row * row if 0 < row <= limit else limit


def _part(box: Box, start: int, limit: int) -> tuple[Box, ...]:
    return box.part(start, min(start + limit, box.size))


def _write_alone(
    file: collective.Shared, path: Path, planned: Sequence[Planned], state: State, slots: Sequence[format.Slot]
) -> Exception | None:
    """Write what lies in long runs: collective buffering would only send it through other ranks, 10 times slower."""
    places = {slot.name: slot.offset for slot in slots}
    try:
        with path.open("r+b") as opened:
            begin = disk.Begun(opened.fileno())
            for one in planned:
                for boxes in () if alternates(one.entry) else one.calls:
                    data = _gathered(one.entry, boxes, state)
                    file.write(one.entry.name, boxes, data, together=False)
                    first, _, _ = next(runs(one.entry, boxes))
                    begin(places[one.entry.name] + first * ITEMSIZE[one.entry.layout.dtype], data.nbytes)
    except Exception as error:
        return error


def _write_together(
    file: collective.Shared, planned: Sequence[Planned], counts: Sequence[int], state: State
) -> Exception | None:
    """Make as many calls for each tensor as any rank does, also after an error: others wait in the same call."""
    error: Exception | None = None
    for one, count in zip(planned, counts, strict=True):
        for number in range(count):
            boxes = one.calls[number] if number < len(one.calls) else ()
            try:
                file.write(one.entry.name, boxes, _gathered(one.entry, boxes, state), together=True)
            except Exception as caught:
                error = error or caught
    return error


def _gathered(entry: Entry, boxes: Sequence[Box], state: State) -> np.ndarray:
    """The bytes of ``boxes``, one after another; the held memory itself where they lie so."""
    if not boxes:
        return np.empty(0, np.uint8)
    size = ITEMSIZE[entry.layout.dtype]
    memory = flat_bytes(state[entry.name].tensor)
    spans = [(start, start + length) for _, start, length in runs(entry, boxes)]
    if all(one[1] == other[0] for one, other in zip(spans, spans[1:], strict=False)):
        return memory[spans[0][0] * size : spans[-1][1] * size].cpu().numpy()
    return torch.cat([memory[start * size : stop * size] for start, stop in spans]).cpu().numpy()


def _end(file: collective.Shared, path: Path, error: Exception | None, written: Iterator[disk.Piece]) -> None:
    """Close the file, and raise what went wrong.

    HDF5 keeps the system's number of an error to itself, so what it could not write is written once more without it: a
    full disk then says that it is one.
    """
    try:
        file.close()
    except Exception as caught:
        error = error or caught
    if error:
        disk.write(path, written, sync=True)
        raise CheckpointError(f"writing {path} failed", f"HDF5: {error}", FULL) from error


def _settle(path: Path, own: Sequence[Written], made: Made, sync: bool) -> None:
    """Make the digests that are lacking, once all ranks have written, while the disk takes what it has not yet."""
    with ThreadPoolExecutor(1, "checkpoint") as pool:
        synced = pool.submit(sync_file, path) if sync else None
        add_torn(path, made, add_whole(made, own))
    if synced:
        synced.result()


def _check(path: Path, written: Iterator[disk.Piece]) -> None:
    """Look for what never came: Open MPI's OMPIO (4.1) tells nobody of a failed collective write, as on a full disk."""
    lacking = disk.lacking(path, written)
    if lacking:
        raise FullError(
            f"{path}: {lacking} bytes were written, and are not in the file",
            "the MPI library said nothing of a failed write; a full disk is the usual cause",
            FULL,
        )


def sync_file(path: Path) -> None:
    """Return when the disk has the file's bytes, or a folder's names."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
