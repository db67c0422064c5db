"""Save: the two ways to fill a laid-out file. Whichever is taken, the file's bytes are the same.

``direct``: each rank writes its byte ranges itself, with no MPI call and no HDF5. ``mpio``: through parallel HDF5; a
rank writes a tensor's long runs alone, and all write together the tensors whose runs alternate between ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from hpctrain.checkpoint import disk, format
from hpctrain.checkpoint.ranges import flat_bytes, pieces, runs, write_boxes
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.config import CheckpointConfig
from hpctrain.errors import CheckpointError, FullError
from hpctrain.plan.layout import ITEMSIZE, Box

# MPI-IO counts bytes in 32 bits, and some libraries fail before they say so.
CALL_BYTES = 1 << 30
FULL = 'free space there, or set checkpoint.writer to "direct", whose errors are told in full'

Written = tuple[format.Slot, list[disk.Piece]]
Writer = Callable[[Path, Sequence[Entry], State, Sequence[format.Slot], Group, CheckpointConfig], None]


def direct(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
) -> None:
    """Write this rank's ranges of bytes at the datasets' places. Collective; an error of one rank is raised on all."""

    def act() -> None:
        disk.write(path, _pieces(entries, state, slots), config.sync)

    together(group, act, f"writing {path}")


def mpio(
    path: Path,
    entries: Sequence[Entry],
    state: State,
    slots: Sequence[format.Slot],
    group: Group,
    config: CheckpointConfig,
    call_bytes: int = CALL_BYTES,
) -> None:
    """Write with parallel HDF5, at most ``call_bytes`` in a call. Collective; an error of one rank is raised on all."""
    planned = [Planned(entry, tuple(_calls(entry, boxes, call_bytes))) for entry, boxes in write_boxes(entries)]
    counts = torch.tensor([len(one.calls) if one.alternates else 0 for one in planned], dtype=torch.int64)
    group.all_reduce(counts, "max")
    file = together(group, lambda: format.Shared(path, group.comm, config.hints), f"opening {path}")
    error = _write_alone(file, planned, state)
    error = _write_together(file, planned, counts.tolist(), state) or error
    written = partial(_pieces, entries, state, slots)
    together(group, lambda: _end(file, path, error, config.sync, written()), f"writing {path}")
    together(group, lambda: _check(path, written()), f"checking {path}")


WRITERS: dict[str, Writer] = {"direct": direct, "mpio": mpio}


def writer(kind: str, group: Group) -> Writer:
    """The writer of that name; CheckpointError where it cannot work here."""
    if kind == "mpio" and not (format.parallel() and hasattr(group, "comm")):
        lacking = f"these ranks talk by {type(group).__name__}" if format.parallel() else "this h5py is a serial build"
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

    @property
    def alternates(self) -> bool:
        """Whether short runs of several ranks take turns in the file. The same answer on every rank."""
        mesh = self.entry.mesh
        return any(cut.dim and mesh.size(*cut.axes) > 1 for cut in self.entry.layout.cuts)


def parts(entries: Sequence[Entry], state: State, slots: Sequence[format.Slot]) -> list[Written]:
    """What this rank writes of each tensor of which it writes something, in the file's order."""
    placed = {slot.name: slot for slot in slots}

    def part(entry: Entry, boxes: Sequence[Box]) -> Written:
        slot = placed[entry.name]
        return slot, list(pieces(entry, boxes, flat_bytes(state[entry.name].tensor), slot.offset))

    return [part(entry, boxes) for entry, boxes in write_boxes(entries) if boxes]


def _pieces(entries: Sequence[Entry], state: State, slots: Sequence[format.Slot]) -> Iterator[disk.Piece]:
    return (piece for _, written in parts(entries, state, slots) for piece in written)


def _calls(entry: Entry, boxes: Sequence[Box], call_bytes: int) -> Iterator[tuple[Box, ...]]:
    """The boxes, cut and packed into calls; each call's elements come in row-major order."""
    limit = max(1, call_bytes // ITEMSIZE[entry.layout.dtype])
    call: list[Box] = []
    parts = (part for box in boxes for start in range(0, box.size, limit) for part in _part(box, start, limit))
    for part in parts:
        if call and sum(one.size for one in call) + part.size > limit:
            yield tuple(call)
            call = []
        call.append(part)
    if call:
        yield tuple(call)


def _part(box: Box, start: int, limit: int) -> tuple[Box, ...]:
    return box.part(start, min(start + limit, box.size))


def _write_alone(file: format.Shared, planned: Sequence[Planned], state: State) -> Exception | None:
    """Write what lies in long runs: collective buffering would only send it through other ranks, 10 times slower."""
    try:
        for one in planned:
            for boxes in () if one.alternates else one.calls:
                file.write(one.entry.name, boxes, _gathered(one.entry, boxes, state), together=False)
    except Exception as error:
        return error


def _write_together(
    file: format.Shared, planned: Sequence[Planned], counts: Sequence[int], state: State
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


def _end(file: format.Shared, path: Path, error: Exception | None, sync: bool, written: Iterator[disk.Piece]) -> None:
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
    if sync:
        sync_file(path)


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
