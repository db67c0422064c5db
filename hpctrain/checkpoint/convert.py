"""Convert: write a checkpoint anew, some of its tensors, under other names, its weights in another dtype."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint import disk, format, keep
from hpctrain.checkpoint.choice import FLOATS, all_fit, named, takes
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.parts import Part, Tell, made, mine, quiet, read
from hpctrain.checkpoint.save import sync_file
from hpctrain.checkpoint.state import WEIGHTS
from hpctrain.checkpoint.together import led, together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
Fetch = Callable[[Sequence[Part]], list[Tensor]]
"""Gives the elements of parts, flat, in the dtype that they have where they come from."""


@dataclass(frozen=True)
class Change:
    """What the new file has otherwise: the dtype of its weights, tensors that ``only`` names, and names of its own.

    ``only``: shell patterns of new names. ``rename``: old name to new name, ``*`` being any text.
    """

    dtype: str | None = None
    only: tuple[str, ...] = ("*",)
    rename: Mapping[str, str] = field(default_factory=dict)

    def pairs(self, path: Path, index: Index) -> dict[str, tuple[Slot, Slot]]:
        """By its new name each tensor that is taken, as it is read and as it is written.

        Raises UsageError for a pattern that fits nothing, and for one new name of two tensors.
        """
        slots = named(path, index, self.rename, "--rename")
        if self.only != ("*",):  # which a file of no tensors has too
            all_fit("--only", self.only, list(slots), f"{path} under its new name")
        return {name: (slot, self._new(name, slot)) for name, slot in slots.items() if takes(self.only, name)}

    def _new(self, name: str, slot: Slot) -> Slot:
        """Weights in floating point take the new dtype, all else keeps its own."""
        fits = self.dtype and name.startswith(WEIGHTS) and slot.dtype in FLOATS
        return replace(slot, name=name, dtype=DTYPES[self.dtype] if fits else slot.dtype)


@dataclass(frozen=True)
class Converted:
    """What was written: tensors, their bytes, and how many finite numbers the new dtype could not hold."""

    file: str
    step: int
    tensors: int
    bytes: int
    overflowed: int


def convert(path: Path, index: Index, out: Path, group: Group, change: Change, tell: Tell = quiet) -> Converted:
    """Write the checkpoint ``path`` anew as ``out``, with what ``change`` says, checked as it is read.

    Collective: ranks share the work, each with some MiB at a time. ``out`` has its name only when it is whole; raises
    CheckpointError where something has that name already, and DamagedError where what is read is damaged.
    """
    pairs = change.pairs(path, index)

    def fetch(parts: Sequence[Part]) -> list[Tensor]:
        return read(path, [one.of(pairs[one.slot.name][0]) for one in parts], index.table)

    wanted = [new for _, new in pairs.values()]
    return write_anew(out, wanted, index.step, index.attributes, fetch, group, tell)


def write_anew(
    out: Path, wanted: Sequence[Slot], step: int, attributes: dict[str, Any], fetch: Fetch, group: Group, tell: Tell
) -> Converted:
    """Write a checkpoint of the tensors ``wanted``, whose elements ``fetch`` gives part by part in a dtype of its own.

    Collective, and as careful with ``out`` as ``convert``.
    """
    begun = led(group, lambda: _begin(out, wanted, step, attributes), f"laying out {out}")
    part, slots = Path(begun["part"]), [Slot(**slot | {"shape": tuple(slot["shape"])}) for slot in begun["slots"]]
    try:
        sums, overflowed = together(group, lambda: _write(fetch, part, slots, group, tell), f"writing {out}")
        told = torch.from_numpy(np.append(sums.view(np.int64), overflowed)).to(group.device)
        group.all_reduce(told, "sum")
        sums, overflowed = told[:-1].cpu().numpy().view(np.uint64), int(told[-1])
        led(group, lambda: _publish(part, out, slots, sums), f"publishing {out}")
    except BaseException:
        if group.leads:
            part.unlink(missing_ok=True)
        raise
    return Converted(str(out), step, len(slots), sum(slot.nbytes for slot in slots), overflowed)


def _begin(out: Path, wanted: Sequence[Slot], step: int, attributes: dict[str, Any]) -> dict[str, object]:
    if out.exists():
        raise CheckpointError(f"{out} is there already", "a file is never written over", "give another name")
    ordered = sorted(wanted, key=lambda slot: (slot.nbytes >= format.ALIGN_FROM_BYTES, slot.name))
    out.parent.mkdir(parents=True, exist_ok=True)
    for left in keep.abandoned(out.parent, out.name):
        left.unlink(missing_ok=True)
    keep.check_room(out.parent, format.needed_bytes(ordered))
    part = out.parent / keep.part_name(out.name)
    try:
        placed = format.lay_out(part, ordered, step, attributes)
        disk.reserve(part)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return {"part": str(part), "slots": [asdict(slot) for slot in placed]}


def _write(fetch: Fetch, part: Path, slots: Sequence[Slot], group: Group, tell: Tell) -> tuple[np.ndarray, int]:
    """Convert this rank's share; gives its checksums, 0 for all other blocks, and how many numbers overflowed."""
    sums, overflowed = np.zeros(sum(slot.blocks for slot in slots), np.uint64), 0
    for parts in mine(slots, group, tell):
        found = fetch(parts)
        ready = [memory.to(getattr(torch, one.slot.dtype)) for one, memory in zip(parts, found, strict=True)]
        disk.write(part, [_piece(one, memory) for one, memory in zip(parts, ready, strict=True)], sync=False)
        for one, before, after in zip(parts, found, ready, strict=True):
            values = made(after)
            first = one.slot.first + one.block
            sums[first : first + len(values)] = values
            if before is not after and after.is_floating_point():
                overflowed += int((_wide(before).isfinite() & ~_wide(after).isfinite()).sum())
    sync_file(part)
    return sums, overflowed


def _wide(numbers: Tensor) -> Tensor:
    """torch tests one-byte floats for infinities only after widening."""
    return numbers if numbers.element_size() > 1 else numbers.float()


def _piece(part: Part, memory: Tensor) -> disk.Piece:
    return disk.Piece(part.at, memory.view(torch.uint8))


def _publish(part: Path, out: Path, slots: Sequence[Slot], sums: np.ndarray) -> None:
    format.mark_complete(part, slots, sums)
    sync_file(part)
    os.replace(part, out)
    sync_file(out.parent)
