"""Inspect: what a checkpoint file holds, and the numbers in it, without a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod, sqrt
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint import keep
from hpctrain.checkpoint.format import Index, Slot, read_index
from hpctrain.checkpoint.near_file import refuse_part
from hpctrain.checkpoint.parts import Part, Tell, quiet, read
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import ITEMSIZE

READ_BYTES = 64 << 20  # whole blocks


@dataclass(frozen=True)
class Stats:
    """The finite numbers of a tensor, and how many are not. None where there are none; ``std`` has no correction."""

    least: float | None
    greatest: float | None
    mean: float | None
    std: float | None
    zeros: int
    not_finite: int


def find(path: Path) -> tuple[Path, Index]:
    """The file and its contents; of a folder of checkpoints, or of a run, its newest whole one."""
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(f"{path} is not there", "", "give a checkpoint file, or the folder that has them")
        refuse_part(path)
        return path, read_index(path)
    for folder in (path, path / keep.FOLDER):
        if found := keep.newest(folder, keep.listing(folder)):
            return found
    raise CheckpointError(f"{path} has no checkpoint", "its files would be named step-00000100.h5")


def select(path: Path, index: Index, pattern: str | None) -> tuple[Slot, ...]:
    """The tensors whose names fit a shell pattern; all without one."""
    slots = tuple(slot for slot in index.slots if pattern is None or fnmatchcase(slot.name, pattern))
    if pattern is not None and not slots:
        raise CheckpointError(f"{path} has no tensor {pattern}", "", "run it without --tensor to see the names")
    return slots


def all_stats(path: Path, slots: Sequence[Slot], table: int | None, tell: Tell = quiet) -> list[Stats]:
    """The stats of several tensors, checked with ``table`` where there is one; tells the bytes that were read."""
    found, done, total = [], 0, sum(slot.nbytes for slot in slots)
    for slot in slots:
        found.append(stats(path, slot, table))
        done += slot.nbytes
        tell(done, total)
    return found


def stats(path: Path, slot: Slot, table: int | None = None) -> Stats:
    """Read a tensor, a part at a time, and say how its numbers are spread; of complex ones, their absolute values.

    With ``table``, where the file's checksums begin, DamagedError names what is damaged.
    """
    least, greatest, total, squares, count, zeros, strange = float("inf"), float("-inf"), 0.0, 0.0, 0, 0, 0
    for part in _parts(path, slot, table):
        finite = part[part.isfinite()]
        strange += part.numel() - finite.numel()
        if not finite.numel():
            continue
        count += finite.numel()
        least, greatest = min(least, float(finite.min())), max(greatest, float(finite.max()))
        total, squares = total + float(finite.sum()), squares + float(finite.square().sum())
        zeros += int((finite == 0).sum())
    if not count:
        return Stats(None, None, None, None, 0, strange)
    mean = total / count
    return Stats(least, greatest, mean, sqrt(max(0.0, squares / count - mean * mean)), zeros, strange)


def _parts(path: Path, slot: Slot, table: int | None) -> Iterator[Tensor]:
    """The tensor's numbers as float64, at most READ_BYTES of the file at once."""
    step, stop = READ_BYTES // ITEMSIZE[slot.dtype], prod(slot.shape)
    for start in range(0, stop, step):
        (numbers,) = read(path, [Part(slot, start, min(start + step, stop))], table)
        yield (numbers.abs() if numbers.is_complex() else numbers).to(torch.float64)
