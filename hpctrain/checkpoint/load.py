"""Load: every rank reads just the boxes it holds, whatever mesh wrote them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import checksums, disk, exchange
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count
from hpctrain.checkpoint.choice import Choice
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.ranges import flat_bytes, piece_of, pieces
from hpctrain.checkpoint.shares import crossing, sections
from hpctrain.checkpoint.state import Entry, State
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError

# Tensors that cannot be read in place (on a GPU, not contiguous, of another dtype) are read aside, this much at once.
ASIDE_BYTES = 1 << 30
# Blocks of which a rank holds only parts are read aside to be checked, this much at once.
TORN_BYTES = 64 << 20

Wanted = tuple[Entry, Slot]
"""A tensor to fill, and where its bytes are."""


def load(path: Path, index: Index, entries: Sequence[Entry], state: State, group: Group, verify: bool = True) -> None:
    """Fill the tensors of ``state`` in place. Collective; an error of one rank is raised on all.

    Strict: raises CheckpointError that lists every tensor which the file lacks, has too much, or has otherwise. With
    ``verify`` every block that is read is checked, and DamagedError names the first that is not what was written;
    tensors of ``state`` may be filled in part by then.
    """
    check(path, index, entries)
    slots = {slot.name: slot for slot in index.slots}
    _fetch(Source.of(path, index, group, verify), [(entry, slots[entry.name]) for entry in entries], state, group)


def begin(
    path: Path, index: Index, entries: Sequence[Entry], state: State, group: Group, choice: Choice, verify: bool = True
) -> int:
    """Fill the tensors that ``choice`` takes from another run's file, and give how many; the others stay as they are.

    As ``load``, and as strict about what ``choice`` names, but dtypes of floats are converted, and tensors may have
    other names in the file.
    """
    wanted = choice.pair(path, index, entries)
    _fetch(Source.of(path, index, group, verify), wanted, state, group)
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
class Source:
    """A file to load from, where its checksums begin, None to check nothing, and where a rank begins on its way."""

    path: Path
    table: int | None
    begin: float

    @classmethod
    def of(cls, path: Path, index: Index, group: Group, verify: bool) -> Source:
        """The file, for this rank."""
        return cls(path, index.table if verify else None, group.rank / group.size)

    def read(self, pieces: Iterable[disk.Piece], seen: disk.Seen = disk.unseen) -> None:
        """As ``disk.read``."""
        disk.read(self.path, pieces, seen, self.begin)


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
        """Bytes of memory that it takes while it is read, beside its torn blocks."""
        return 0 if self.near is self.target else self.near.nbytes


def readings(index: Index, entries: Sequence[Entry], state: State, verify: bool = True) -> Iterator[Reading]:
    """What this rank reads of a file that fits; nothing is read yet."""
    slots = {slot.name: slot for slot in index.slots}
    return _readings([(entry, slots[entry.name]) for entry in entries], state, index.table if verify else None)


def _fetch(source: Source, wanted: Sequence[Wanted], state: State, group: Group) -> None:
    """Fill tensors from their slots: each rank for itself, or together those whose short runs alternate. Collective."""
    stored = [(_as_stored(entry, slot), slot) for entry, slot in wanted]
    names = crossing([entry for entry, _ in stored], group.size)
    alone = [(entry, slot) for entry, slot in stored if entry.name not in names]
    together(group, lambda: _read(source, alone, state), f"reading {source.path}")
    if names:
        _scatter(source, stored, state, group)


def _as_stored(entry: Entry, slot: Slot) -> Entry:
    """The tensor with the dtype that it has in the file."""
    same = entry.layout.dtype == slot.dtype
    return entry if same else replace(entry, layout=replace(entry.layout, dtype=slot.dtype))


def _readings(stored: Sequence[Wanted], state: State, table: int | None) -> Iterator[Reading]:
    return (_reading(entry, slot, state, table) for entry, slot in stored if entry.rank is not None)


def _read(source: Source, stored: Sequence[Wanted], state: State) -> None:
    for batch in _batches(_readings(stored, state, source.table)):
        _fill(source, batch)


def _reading(entry: Entry, slot: Slot, state: State, table: int | None) -> Reading:
    target = state[entry.name].tensor.detach()
    near = _near(target, slot)
    found = list(pieces(entry, entry.layout.boxes(entry.mesh, entry.rank), flat_bytes(near), slot))
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


def _fill(source: Source, batch: Sequence[Reading]) -> None:
    if source.table is None:
        source.read(piece for reading in batch for piece in reading.pieces)
    else:
        _fill_checked(source, batch)
    for reading in batch:
        _bring(reading.near, reading.target)


def _fill_checked(source: Source, batch: Sequence[Reading]) -> None:
    """What does not fit its checksum never leaves the memory that it was read to."""
    for checks in _few(check for reading in batch for check in _checks(reading, source.table)):
        _read_checked(source, checks)
        for check in checks:
            for piece in check.pieces:
                start = piece.at - check.at
                piece.memory.copy_(check.span.memory[start : start + piece.memory.numel()])


def _few(checks: Iterator[Check]) -> Iterator[list[Check]]:
    """Checks that have TORN_BYTES in memory of their own, and then the next; each is made when its turn comes."""
    few: list[Check] = []
    aside = 0
    for check in checks:
        few.append(check)
        aside += check.aside
        if aside >= TORN_BYTES:
            yield few
            few.clear()  # the taker's list too: its memory goes before more is made
            aside = 0
    yield few


def _read_checked(source: Source, checks: Sequence[Check]) -> None:
    """Read checksums, then data, digested as it comes in; DamagedError for the first block that is not as it was."""
    source.read(check.told for check in checks)
    wrong: list[tuple[int, Check, int]] = []
    source.read((check.read for check in checks), lambda piece: wrong.extend(_compared(piece)))
    for _, check, number in sorted(wrong, key=lambda one: one[0])[:1]:
        raise checksums.damaged(source.path, check.slot, number, number + 1)


def _compared(piece: disk.Piece) -> Iterator[tuple[int, Check, int]]:
    """Where in the file a part of a check's span is not as its checksums say, and the number of that block."""
    check = piece.of
    skipped = (piece.at - check.at) // BLOCK_BYTES
    made = checksums.of_span(checksums.Span(skipped, piece.memory))
    for place, (found, wanted) in enumerate(zip(made, check.wanted[skipped:], strict=False)):
        if found != wanted:
            yield piece.at + place * BLOCK_BYTES, check, check.span.first + skipped + place


@dataclass(frozen=True)
class Check:
    """Blocks to read, the checksums they must have, and the pieces of ``near`` to fill from them after that."""

    slot: Slot
    span: checksums.Span
    wanted: np.ndarray
    told: disk.Piece
    pieces: tuple[disk.Piece, ...] = ()

    @property
    def aside(self) -> int:
        """Bytes of memory that it takes."""
        return self.span.memory.nbytes if self.pieces else 0

    @property
    def at(self) -> int:
        """Where the blocks begin in the file."""
        return self.slot.offset + self.span.first * BLOCK_BYTES

    @property
    def read(self) -> disk.Piece:
        """The blocks, to be read in parts of whole blocks."""
        return disk.Piece(self.at, self.span.memory, self.slot.offset, self)


def _checks(reading: Reading, table: int) -> Iterator[Check]:
    slot = reading.slot
    torn = ((_aside(one), one.pieces) for one in reading.torn)
    for span, have in chain(((span, ()) for span in reading.spans), torn):
        yield _check_of(slot, span, table, have)


def _check_of(slot: Slot, span: checksums.Span, table: int, have: tuple[disk.Piece, ...] = ()) -> Check:
    told, wanted = checksums.expected(table, slot, span.first, count(span.memory.numel()))
    return Check(slot, span, wanted, told, have)


def _scatter(source: Source, stored: Sequence[Wanted], state: State, group: Group) -> None:
    """Fill tensors whose short runs alternate: each rank reads whole blocks, and sends the others their parts.

    Collective.
    """
    slots = {entry.name: slot for entry, slot in stored}
    for section in sections([entry for entry, _ in stored], group.size):
        held = [entry.name for entry in section.entries if entry.rank is not None]
        targets = {name: state[name].tensor.detach() for name in held}
        near = {name: _near(targets[name], slots[name]) for name in held}
        flat = {name: flat_bytes(near[name]).numpy() for name in held}
        for stretches in section.rounds:
            one = exchange.Round(stretches, lambda entry, rank: entry.layout.boxes(entry.mesh, rank), group)
            together(group, lambda one=one: _read_ranges(source, slots, one), f"reading {source.path}")
            one.scatter(flat)
        for name in held:
            _bring(near[name], targets[name])


def _near(target: Tensor, slot: Slot) -> Tensor:
    """Memory of the host to read a tensor to, as the file has it: its own where it can be."""
    kind = getattr(torch, slot.dtype)
    return target if target.dtype == kind and _in_place(target) else torch.empty(target.shape, dtype=kind)


def _bring(near: Tensor, target: Tensor) -> None:
    if near is not target:
        target.copy_(near)


def _read_ranges(source: Source, slots: Mapping[str, Slot], one: exchange.Round) -> None:
    rows = [(slots[stretch.entry.name], stretch.start, memory) for stretch, memory in one.ranges]
    if source.table is None:
        return source.read([piece_of(*row) for row in rows])
    spans = [(slot, checksums.Span(start // BLOCK_BYTES, memory)) for slot, start, memory in rows]
    _read_checked(source, [_check_of(slot, span, source.table) for slot, span in spans])


def _aside(torn: checksums.Torn) -> checksums.Span:
    return checksums.Span(torn.number, torch.empty(torn.length, dtype=torch.uint8))


def _in_place(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
