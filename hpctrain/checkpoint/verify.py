"""Verify: read all of a checkpoint, and say which bytes are not those that were written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.parts import Tell, fill, mine, quiet
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import ITEMSIZE


@dataclass(frozen=True)
class Damage:
    """Bytes and elements of a tensor, from the first to the one after the last, among which some are damaged."""

    tensor: str
    first_byte: int
    end_byte: int
    first_element: int
    end_element: int
    offset: int
    """Where they begin in the file."""


def verify(path: Path, index: Index, group: Group, tell: Tell = quiet) -> list[Damage]:
    """Every damaged range of every tensor. Collective: ranks share the reading, and all get the answer.

    Raises CheckpointError for a file of an older release, which has no checksums.
    """
    if index.table is None:
        raise CheckpointError(
            f"{path} has no checksums",
            "the release that wrote it made none; what can be said is that it is whole in length",
            "hpctrain ckpt convert writes it anew, with checksums of the bytes as they are now",
        )
    slots = {slot.name: slot for slot in index.slots}
    found = together(group, lambda: _wrong(path, index, group, tell), f"reading {path}")
    wrong: dict[str, list[int]] = {}
    for name, blocks in (pair for told in group.collect(found) for pair in told):
        wrong.setdefault(name, []).extend(blocks)
    return [damage for name in sorted(wrong) for damage in _ranges(slots[name], sorted(wrong[name]))]


def _wrong(path: Path, index: Index, group: Group, tell: Tell) -> list[tuple[str, list[int]]]:
    """The names and blocks that this rank found damaged."""
    wrong: list[tuple[str, list[int]]] = []
    for parts in mine(index.slots, group, tell):
        memories = [torch.empty(part.numel * ITEMSIZE[part.slot.dtype], dtype=torch.uint8) for part in parts]
        found = zip(parts, fill(path, parts, memories, index.table), strict=True)
        wrong += [(part.slot.name, blocks) for part, blocks in found if blocks]
    return wrong


def _ranges(slot: Slot, blocks: Sequence[int]) -> Iterator[Damage]:
    """Neighbouring blocks as one range."""
    has = set(blocks)
    begins = [block for block in blocks if block - 1 not in has]
    ends = [block + 1 for block in blocks if block + 1 not in has]
    size = ITEMSIZE[slot.dtype]
    for begin, end in zip(begins, ends, strict=True):
        first, last = begin * BLOCK_BYTES, min(end * BLOCK_BYTES, slot.nbytes)
        yield Damage(slot.name, first, last, first // size, last // size, slot.offset + first)
