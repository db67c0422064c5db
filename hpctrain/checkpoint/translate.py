"""Translate: a folder of Megatron-Core's or Llama's own names, as the tensors that Hugging Face would have of it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from hpctrain.checkpoint.carry import Source
from hpctrain.checkpoint.dcp import Stored
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.parts import STEP_ELEMENTS
from hpctrain.plan.foreign import Origin, origins
from hpctrain.plan.layout import Run
from hpctrain.plan.weights import ModelShape


@dataclass(frozen=True)
class Picked:
    """Some runs of a tensor of a folder, one after another, as a tensor of its own."""

    stored: Stored
    slot: Slot
    runs: tuple[Run, ...]
    pairs: int

    def read(self) -> Tensor:
        """Its elements, flat; rotary pairs are taken apart."""
        memory, at = torch.empty(prod(self.slot.shape), dtype=getattr(torch, self.slot.dtype)), 0
        for start, length in self.runs:
            for done in range(0, length, STEP_ELEMENTS):
                count = min(STEP_ELEMENTS, length - done)
                self.stored.fill(start + done, memory[at : at + count])
                at += count
        if not self.pairs:
            return memory
        width = prod(self.slot.shape[1:])
        return memory.view(-1, self.pairs // 2, 2, width).transpose(1, 2).reshape(-1)


def translated(found: Mapping[str, Source], wanted: Collection[str], shape: ModelShape) -> dict[str, Source]:
    """``found`` with ``wanted``, names of Hugging Face, in place of the foreign tensors that they come from."""
    made = {name: _picked(name, origin, found) for name, origin in origins(wanted, found, shape).items()}
    used = {one.stored.slot.name for one in made.values()}
    return {name: one for name, one in found.items() if one.slot.name not in used} | made


def _picked(name: str, origin: Origin, found: Mapping[str, Source]) -> Picked:
    stored = found[origin.name]
    shape = stored.slot.shape if origin.layer is None else stored.slot.shape[1:]
    width, base = prod(shape[1:]), (origin.layer or 0) * prod(shape)
    rows = origin.rows or ((0, shape[0]),)
    # Too few rows make a tensor of another shape than is wanted, which is told where all shapes are compared.
    rows = tuple((first, max(0, min(count, shape[0] - first))) for first, count in rows)
    runs = tuple((base + first * width, count * width) for first, count in rows)
    slot = replace(stored.slot, name=name, shape=(sum(count for _, count in rows), *shape[1:]))
    return Picked(stored, slot, runs, origin.pairs)
