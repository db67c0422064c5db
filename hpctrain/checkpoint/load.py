"""Load: every rank reads just the boxes it holds, whatever mesh wrote them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.checkpoint import disk
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.ranges import flat_bytes, pieces, read_boxes
from hpctrain.checkpoint.state import Entry, State, dtype_name
from hpctrain.checkpoint.together import together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import ITEMSIZE, Box

# Tensors that cannot be read in place (on a GPU, or not contiguous) are read aside, this much at once.
ASIDE_BYTES = 1 << 30


def load(path: Path, index: Index, entries: Sequence[Entry], state: State, group: Group, convert: bool = False) -> None:
    """Fill the tensors of ``state`` in place. Collective; an error of one rank is raised on all.

    Strict: raises CheckpointError that lists every tensor which the file lacks, has too much, or has otherwise. With
    ``convert`` the file may have other dtypes than the state.
    """
    entries = _of_the_file(index, entries) if convert else entries
    check(path, index, entries)
    offsets = {slot.name: slot.offset for slot in index.slots}

    def act() -> None:
        for batch in _batches(entries, state):
            _fill(path, batch, state, offsets)

    together(group, act, f"reading {path}")


def _of_the_file(index: Index, entries: Sequence[Entry]) -> list[Entry]:
    """The same tensors with the dtypes that the file has."""
    dtypes = {slot.name: slot.dtype for slot in index.slots}
    layouts = (replace(entry.layout, dtype=dtypes.get(entry.name, entry.layout.dtype)) for entry in entries)
    return [replace(entry, layout=layout) for entry, layout in zip(entries, layouts, strict=True)]


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
            "start with the configuration it was saved with (hpctrain ckpt inspect shows it), or in another folder",
        )


def _fault(entry: Entry, slot: Slot | None) -> str | None:
    wanted = f"{entry.layout.dtype} {list(entry.layout.shape)}"
    if slot is None:
        return f"{entry.name}: not in the file, this run wants {wanted}"
    if (slot.shape, slot.dtype) != (entry.layout.shape, entry.layout.dtype):
        return f"{entry.name}: {slot.dtype} {list(slot.shape)} in the file, this run wants {wanted}"
    return None


Batch = list[tuple[Entry, tuple[Box, ...]]]


def _batches(entries: Sequence[Entry], state: State) -> Iterator[Batch]:
    batch: Batch = []
    aside = 0
    for entry, boxes in read_boxes(entries):
        if not boxes:
            continue
        tensor = state[entry.name].tensor
        own = 0 if _in_place(tensor, entry) else tensor.numel() * ITEMSIZE[entry.layout.dtype]
        aside += own
        if batch and aside > ASIDE_BYTES:
            yield batch
            batch, aside = [], own
        batch.append((entry, boxes))
    yield batch


def _fill(path: Path, batch: Batch, state: State, offsets: dict[str, int]) -> None:
    targets = {entry.name: state[entry.name].tensor.detach() for entry, _ in batch}
    near = {entry.name: _near(targets[entry.name], entry) for entry, _ in batch}
    disk.read(
        path,
        (piece for entry, boxes in batch for piece in pieces(entry, boxes, flat_bytes(near[entry.name]), offsets)),
    )
    for name, tensor in targets.items():
        if near[name] is not tensor:
            tensor.copy_(near[name])


def _in_place(tensor: Tensor, entry: Entry) -> bool:
    plain = tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())
    return plain and tensor.device.type == "cpu" and dtype_name(tensor) == entry.layout.dtype


def _near(tensor: Tensor, entry: Entry) -> Tensor:
    """The tensor itself where the file's bytes can be read into it, else host memory of its shape for them."""
    dtype = getattr(torch, entry.layout.dtype)
    return tensor if _in_place(tensor, entry) else torch.empty(tensor.shape, dtype=dtype, device="cpu")
