"""Load: every rank reads just the boxes it holds, whatever mesh wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import checksums, disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count
from hpctrain.checkpoint.choice import Choice
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.ranges import flat_bytes, pieces
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError

# Tensors that cannot be read in place (on a GPU, not contiguous, of another dtype) are read aside, this much at once.
ASIDE_BYTES = 1 << 30


def load(path: Path, index: Index, entries: Sequence[Entry], state: State, group: Group, verify: bool = True) -> None:
    """Fill the tensors of ``state`` in place. Collective; an error of one rank is raised on all.

    Strict: raises CheckpointError that lists every tensor which the file lacks, has too much, or has otherwise. With
    ``verify`` every block that is read is checked, and DamagedError names the first that is not what was written;
    tensors of ``state`` may be filled in part by then.
    """
    check(path, index, entries)
    slots = {slot.name: slot for slot in index.slots}
    wanted = [(entry, slots[entry.name]) for entry in entries]
    together(group, lambda: _read(path, index, wanted, state, verify), f"reading {path}")


def begin(
    path: Path, index: Index, entries: Sequence[Entry], state: State, group: Group, choice: Choice, verify: bool = True
) -> int:
    """Fill the tensors that ``choice`` takes from another run's file, and give how many; the others stay as they are.

    As ``load``, and as strict about what ``choice`` names, but dtypes of floats are converted, and tensors may have
    other names in the file.
    """
    wanted = choice.pair(path, index, entries)
    together(group, lambda: _read(path, index, wanted, state, verify), f"reading {path}")
    return len(wanted)


def check(path: Path, index: Index, entries: Sequence[Entry]) -> None:
    """Raise CheckpointError unless the file has just the tensors of ``entries``."""
    slots = {slot.name: slot for slot in index.slots}
    faults = [fault for entry in entries if (fault := _fault(entry, slots.get(entry.name)))]
    known = {entry.name for entry in entries}
    faults += [f"{name}: in the file alone" for name in sorted(slots) if name not in known]
    if faults:
        raise CheckpointError(
            f"{path} does not fit this run: {len(faults)} tensors differ",
            "\n  ".join(faults),
            "start with the configuration it was saved with (hpctrain ckpt inspect shows it), or begin a new run from"
            f" its weights: another run.name, and checkpoint.start_from = {str(path)!r}",
        )


def _fault(entry: Entry, slot: Slot | None) -> str | None:
    wanted = f"{entry.layout.dtype} {list(entry.layout.shape)}"
    if slot is None:
        return f"{entry.name}: not in the file, this run wants {wanted}"
    if (slot.shape, slot.dtype) != (entry.layout.shape, entry.layout.dtype):
        return f"{entry.name}: {slot.dtype} {list(slot.shape)} in the file, this run wants {wanted}"
    return None


@dataclass(frozen=True)
class Reading:
    """A tensor that this rank fills: from ``slot`` of the file into ``near``, memory of the host, and on to ``target``.

    With checksums, whole blocks are read as ``spans`` of ``near``, and torn ones aside; else ``pieces`` are read.
    """

    slot: Slot
    target: Tensor
    near: Tensor
    pieces: list[disk.Piece]
    spans: list[checksums.Span]
    torn: list[checksums.Torn]

    @property
    def aside(self) -> int:
        """Bytes of memory that it takes."""
        return sum(one.length for one in self.torn) + (0 if self.near is self.target else self.near.nbytes)


def readings(index: Index, entries: Sequence[Entry], state: State, verify: bool = True) -> Iterator[Reading]:
    """What this rank reads of a file that fits; nothing is read yet."""
    slots = {slot.name: slot for slot in index.slots}
    return _readings([(entry, slots[entry.name]) for entry in entries], state, index.table if verify else None)


def _readings(wanted: Sequence[tuple[Entry, Slot]], state: State, table: int | None) -> Iterator[Reading]:
    return (_reading(entry, slot, state, table) for entry, slot in wanted if entry.rank is not None)


def _read(path: Path, index: Index, wanted: Sequence[tuple[Entry, Slot]], state: State, verify: bool) -> None:
    table = index.table if verify else None
    for batch in _batches(_readings(wanted, state, table)):
        _fill(path, batch, table)


def _reading(entry: Entry, slot: Slot, state: State, table: int | None) -> Reading:
    target = state[entry.name].tensor.detach()
    kind = getattr(torch, slot.dtype)
    near = target if _in_place(target) and target.dtype == kind else torch.empty(target.shape, dtype=kind)
    stored = replace(entry, layout=replace(entry.layout, dtype=slot.dtype))
    boxes = entry.layout.boxes(entry.mesh, entry.rank)
    found = list(pieces(stored, boxes, flat_bytes(near), slot.offset))
    spans, torn = checksums.split(slot, found) if table is not None else ([], [])
    return Reading(slot, target, near, found, spans, torn)


def _batches(readings: Iterator[Reading]) -> Iterator[list[Reading]]:
    batch: list[Reading] = []
    aside = 0
    for reading in readings:
        aside += reading.aside
        if batch and aside > ASIDE_BYTES:
            yield batch
            batch, aside = [], reading.aside
        batch.append(reading)
    yield batch


def _fill(path: Path, batch: Sequence[Reading], table: int | None) -> None:
    if table is None:
        disk.read(path, (piece for reading in batch for piece in reading.pieces))
    else:
        _fill_checked(path, batch, table)
    for reading in batch:
        if reading.near is not reading.target:
            reading.target.copy_(reading.near)


def _fill_checked(path: Path, batch: Sequence[Reading], table: int) -> None:
    """Read data and checksums in one go; what does not fit its checksum never leaves the memory that it was read to."""
    checks = [check for reading in batch for check in _checks(reading, table)]
    disk.read(path, (piece for check in checks for piece in check.reads))
    for check in checks:
        made = checksums.of_span(check.span)
        checksums.compare(path, check.slot, check.span.first, made, check.wanted)
        for piece in check.pieces:
            start = piece.at - check.reads[0].at
            piece.memory.copy_(check.span.memory[start : start + piece.memory.numel()])


@dataclass(frozen=True)
class Check:
    """Blocks to read, the checksums they must have, and the pieces of ``near`` to fill from them after that."""

    slot: Slot
    span: checksums.Span
    wanted: np.ndarray
    reads: tuple[disk.Piece, disk.Piece]
    pieces: tuple[disk.Piece, ...] = ()


def _checks(reading: Reading, table: int) -> Iterator[Check]:
    slot = reading.slot
    spans = [(span, ()) for span in reading.spans]
    for one in reading.torn:
        spans.append((checksums.Span(one.number, torch.empty(one.length, dtype=torch.uint8)), one.pieces))
    for span, have in spans:
        told, wanted = checksums.expected(table, slot, span.first, count(span.memory.numel()))
        at = disk.Piece(slot.offset + span.first * BLOCK_BYTES, span.memory)
        yield Check(slot, span, wanted, (at, told), have)


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
