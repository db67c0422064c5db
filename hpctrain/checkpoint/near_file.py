"""The file of a part: what one rank had of a checkpoint, on the disk of a node.

All tensors of the checkpoint, end to end in the order of a checkpoint's file, are one long range of bytes. A part has
some runs of it, one after another from ``data_at`` on, and before that a head: the runs' places, a checksum of every
256 KiB of what follows, and of which save of which run it is a part. The parts of all ranks are the checkpoint.

A head is: 32 bytes of ``MAGIC``; four numbers (bytes of the text, runs, checksums, and the seal, a checksum of what
comes next); the text, which is JSON; each run's place and length; the checksums; zeros up to a whole page. All numbers
are of 64 bits, little-endian.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.blocks import BLOCK_BYTES, count, digest, digests
from hpctrain.checkpoint.format import PAGE, Slot
from hpctrain.checkpoint.ranges import file_order
from hpctrain.checkpoint.state import Entry
from hpctrain.errors import CheckpointError, DamagedError, IncompleteError

MAGIC = b"hpctrain part of a checkpoint 1\n"
NUMBERS = struct.Struct("<4Q")
CHECK_BYTES = 64 << 20  # read at once to be checked
OTHER = "it is passed over: the partner's copy or an older checkpoint is taken"

Run = tuple[int, int]
"""Where a run of bytes begins, and its length."""


@dataclass(frozen=True)
class Head:
    """What a part says of itself. ``save`` is the same in all parts of one save, and in no other's."""

    run: str
    save: str
    step: int
    after: int
    """The newest step in the run's folder when this was saved; 0 with none."""
    rank: int
    ranks: int
    slots: tuple[Slot, ...]
    runs: tuple[Run, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return sum(length for _, length in self.runs)

    @property
    def data_at(self) -> int:
        """Where the data begin in the file."""
        length = len(MAGIC) + NUMBERS.size + len(self._text()) + 16 * len(self.runs) + 8 * count(self.nbytes)
        return -(-length // PAGE) * PAGE

    def to_bytes(self, sums: Sequence[int]) -> bytes:
        """The head as it is in the file; ``sums`` are the checksums of the data."""
        text = self._text()
        body = text + np.array(self.runs, "<i8").tobytes() + np.array(sums, "<u8").tobytes()
        numbers = NUMBERS.pack(len(text), len(self.runs), len(sums), digest(body))
        return (MAGIC + numbers + body).ljust(self.data_at, b"\0")

    def _text(self) -> bytes:
        tensors = [[slot.name, slot.dtype, list(slot.shape)] for slot in self.slots]
        told = {key: getattr(self, key) for key in ("run", "save", "step", "after", "rank", "ranks")}
        return json.dumps(told | {"tensors": tensors}).encode()


def placed(entries: Sequence[Entry]) -> tuple[Slot, ...]:
    """The tensors with their places in the long range of bytes, which no file's head and no alignment is part of."""
    return _end_to_end([Slot(entry.name, entry.layout.shape, entry.layout.dtype) for entry in file_order(entries)])


def refuse_part(path: Path) -> None:
    """Raise CheckpointError, which says what it is, for a file that is a part and no whole checkpoint."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return
    head, _ = read_head(path)
    raise CheckpointError(
        f"{path} is a part of a checkpoint: what rank {head.rank} of {head.ranks} had at step {head.step}",
        "such parts lie on the nodes' own disks (checkpoint.near), and only all of them together are whole",
        "the run itself goes on from them; its whole checkpoints are in the folder of the run",
    )


def read_head(path: Path) -> tuple[Head, np.ndarray]:
    """What the part says of itself, and the checksums of its data.

    Raises DamagedError where the head is not what was written, IncompleteError where the file has another length.
    """
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + NUMBERS.size)
        if len(start) < len(MAGIC) + NUMBERS.size or not start.startswith(MAGIC):
            raise DamagedError(f"{path} is no part of a checkpoint", "it does not begin as one does", OTHER)
        length, runs, sums, seal = NUMBERS.unpack(start[len(MAGIC) :])
        size, total = length + 16 * runs + 8 * sums, os.fstat(file.fileno()).st_size
        body = file.read(size) if size <= total else b""  # a damaged number is no reason to ask for so much memory
    if len(body) < size or digest(body) != seal:
        raise DamagedError(f"{path} is damaged", "its head does not fit its seal", OTHER)
    head = _head(json.loads(body[:length]), np.frombuffer(body, "<i8", 2 * runs, length))
    if total != head.data_at + head.nbytes:
        raise IncompleteError(f"{path} is incomplete", f"it has {total} bytes of {head.data_at + head.nbytes}", OTHER)
    return head, np.frombuffer(body, "<u8", sums, length + 16 * runs)


def check(path: Path) -> None:
    """Read all of a part. Raises DamagedError where a block does not have its checksum."""
    head, sums = read_head(path)
    for start in range(0, head.nbytes, CHECK_BYTES):
        memory = torch.empty(min(CHECK_BYTES, head.nbytes - start), dtype=torch.uint8)
        disk.read(path, [disk.Piece(head.data_at + start, memory)])
        first = start // BLOCK_BYTES
        made = np.array(digests(memoryview(memory.numpy())), np.uint64)
        for block in (first + np.flatnonzero(made != sums[first : first + made.size]))[:1].tolist():
            raise _damaged(path, head, block)


def meet(one: Sequence[Run], other: Sequence[Run]) -> Iterator[tuple[int, int, int, int, int]]:
    """What two ascending lists of runs have in common.

    Each as (number in one, bytes into that run, number in the other, bytes into that, length).
    """
    i = j = 0
    while i < len(one) and j < len(other):
        (at, length), (beside, width) = one[i], other[j]
        start, stop = max(at, beside), min(at + length, beside + width)
        if start < stop:
            yield i, start - at, j, start - beside, stop - start
        if at + length <= beside + width:
            i += 1
        else:
            j += 1


class Chain:
    """Pieces of some lengths, laid end to end. It keeps where each begins, for a stream that is cut anywhere."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._starts = list(accumulate(lengths, initial=0))

    @property
    def total(self) -> int:
        """Bytes of all pieces."""
        return self._starts[-1]

    def cut(self, start: int, length: int) -> Iterator[tuple[int, int, int, int]]:
        """What lies in ``length`` bytes from ``start`` on: (piece, bytes into it, bytes after start, length)."""
        number, stop = bisect_right(self._starts, start) - 1, start + length
        while number + 1 < len(self._starts) and self._starts[number] < stop:
            first, last = max(start, self._starts[number]), min(stop, self._starts[number + 1])
            if first < last:
                yield number, first - self._starts[number], first - start, last - first
            number += 1


def gather(chain: Chain, memories: Sequence[Tensor], start: int, into: Tensor) -> None:
    """Fill ``into`` with the bytes that memories laid end to end have from ``start`` on."""
    for number, skipped, place, length in chain.cut(start, into.numel()):
        into[place : place + length].copy_(memories[number][skipped : skipped + length])


def scatter(chain: Chain, memories: Sequence[Tensor], start: int, data: Tensor) -> None:
    """Bring ``data`` to memories laid end to end, from their byte ``start`` on."""
    for number, skipped, place, length in chain.cut(start, data.numel()):
        memories[number][skipped : skipped + length].copy_(data[place : place + length])


def _end_to_end(slots: Sequence[Slot]) -> tuple[Slot, ...]:
    places = accumulate((slot.nbytes for slot in slots), initial=0)
    return tuple(replace(slot, offset=offset) for slot, offset in zip(slots, places, strict=False))


def _head(told: dict, runs: np.ndarray) -> Head:
    slots = _end_to_end([Slot(name, tuple(shape), dtype) for name, dtype, shape in told.pop("tensors")])
    pairs = tuple((int(at), int(length)) for at, length in runs.reshape(-1, 2))
    return Head(**told, slots=slots, runs=pairs)


def _damaged(path: Path, head: Head, block: int) -> DamagedError:
    start, stop = head.data_at + block * BLOCK_BYTES, head.data_at + min((block + 1) * BLOCK_BYTES, head.nbytes)
    return DamagedError(f"{path} is damaged", f"its bytes {start} to {stop - 1} do not have their checksum", OTHER)
