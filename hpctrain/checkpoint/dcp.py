"""DCP: the tensors of a folder as torch.distributed.checkpoint writes it, listed and read without torch's reader.

``.metadata`` is a pickle that tells each tensor's shape, dtype and chunks, and in which file, from which byte on, each
chunk is. There it is what ``torch.save`` makes: a zip of a small pickle (strides, dtype) and the bytes, not compressed;
or the file is one of safetensors. The pickles are looked into by their opcodes (``opcodes``), so nothing in a folder
is ever run. The facts are those of torch 2.0 to 2.13 (``torch/distributed/checkpoint``).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import disk, opcodes
from hpctrain.checkpoint.format import Slot
from hpctrain.checkpoint.items import Kept, find
from hpctrain.checkpoint.opcodes import AGAIN, Call
from hpctrain.checkpoint.parts import STEP_ELEMENTS
from hpctrain.errors import CheckpointError, IncompleteError
from hpctrain.plan.layout import ITEMSIZE, Box

METADATA = ".metadata"
HERE = "torch.distributed.checkpoint"
OLDER = "torch.distributed._shard.sharded_tensor.metadata"
MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
TOLD = ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties", "ChunkStorageMetadata",
        "_MEM_FORMAT_ENCODING", "MetadataIndex", "StorageMeta")  # fmt: skip
KNOWN = (
    {f"{HERE}.metadata.{name}" for name in TOLD}
    | {f"{HERE}.filesystem.{name}" for name in ("_StorageInfo", "_StoragePrefix")}
    | {f"{OLDER}.{name}" for name in ("TensorProperties", "MEM_FORMAT_ENCODING")}
    | {f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")}
    | {"torch.Size", "torch.serialization._get_layout", "collections.OrderedDict"}
    | {f"{MEGATRON}.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")}
    | {f"torch.{name}" for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
)


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and the item with it: ``length`` bytes of a file, from ``offset`` on."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A tensor of a folder; of its ``slot`` the name, the shape and the dtype have a meaning."""

    folder: Path
    slot: Slot
    chunks: tuple[Chunk, ...]

    def read(self) -> Tensor:
        """All its elements, flat; chunks that lie otherwise come in by steps of at most 64 MiB."""
        memory = torch.empty(prod(self.slot.shape), dtype=getattr(torch, self.slot.dtype))
        for start in range(0, memory.numel(), STEP_ELEMENTS):
            self.fill(start, memory[start : start + STEP_ELEMENTS])
        return memory

    def fill(self, start: int, memory: Tensor) -> None:
        """Read the elements from ``start`` on, in row-major order, as many as there are in flat ``memory``.

        Raises CheckpointError for an item that is not what ``.metadata`` says, and for elements that no file has.
        """
        whole = Box((0,) * len(self.slot.shape), self.slot.shape)
        found, at = [], 0
        for box in whole.part(start, start + memory.numel()):
            found += self._meeting(box, memory[at : at + box.size].view(box.shape))
            at += box.size
        if sum(one.target.numel() for one in found) != memory.numel():
            raise _holes(self.slot.name, self.folder)
        for path in sorted({one.path for one in found}):
            disk.read(path, [one.piece for one in found if one.path == path])
        for one in found:
            one.place()

    def _meeting(self, box: Box, view: Tensor) -> list[Reading]:
        """What fills ``view``, the memory of ``box``."""
        found = []
        for chunk in self.chunks:
            if met := chunk.box.meet(box):
                path = self.folder / chunk.file
                kept = find(path, chunk.offset, chunk.length, self.slot.name)
                _check(path, self.slot, chunk, kept)
                target = view[met.within(box).slices] if view.dim() else view
                found.append(Reading.of(path, kept, met.within(chunk.box), target))
        return found

    def to_json(self) -> dict[str, Any]:
        """The tensor as dicts and lists, for ranks that have the same folder."""
        chunks = [[list(c.box.start), list(c.box.shape), c.file, c.offset, c.length] for c in self.chunks]
        return {"slot": asdict(self.slot), "chunks": chunks}

    @classmethod
    def from_json(cls, folder: Path, value: dict[str, Any]) -> Stored:
        """The tensor that ``to_json`` gave."""
        slot = Slot(**value["slot"] | {"shape": tuple(value["slot"]["shape"])})
        chunks = (Chunk(Box(tuple(start), tuple(shape)), *rest) for start, shape, *rest in value["chunks"])
        return cls(folder, slot, tuple(chunks))


@dataclass(frozen=True)
class Reading:
    """Elements of one item, on their way to ``target``, as torch lays them there with these strides."""

    path: Path
    piece: disk.Piece
    target: Tensor
    strides: tuple[int, ...]

    @classmethod
    def of(cls, path: Path, kept: Kept, box: Box, target: Tensor) -> Reading:
        """The elements of ``box`` of an item: straight to their place where they are one run on both sides."""
        first = sum(start * stride for start, stride in zip(box.start, kept.strides, strict=True))
        count = 1 + sum((length - 1) * stride for length, stride in zip(box.shape, kept.strides, strict=True))
        size = ITEMSIZE[kept.dtype]
        alike = all(a == b or n == 1 for a, b, n in zip(target.stride(), kept.strides, box.shape, strict=True))
        straight = alike and target.is_contiguous()
        raw = target.reshape(-1).view(torch.uint8) if straight else torch.empty(count * size, dtype=torch.uint8)
        return cls(path, disk.Piece(kept.at + first * size, raw), target, () if straight else kept.strides)

    def place(self) -> None:
        """Bring what was read to its place, if it is not there."""
        if self.strides:
            read = self.piece.memory.view(self.target.dtype)
            self.target.copy_(read.as_strided(self.target.shape, self.strides))


def is_folder(folder: Path) -> bool:
    """Whether a folder is one of DCP."""
    return (folder / METADATA).is_file()


def read_folder(folder: Path) -> tuple[dict[str, Stored], list[str]]:
    """The tensors of a folder by their names, and the names of what is there beside tensors, which is not read.

    Raises CheckpointError where ``.metadata`` is not what torch writes, IncompleteError where a file was cut off.
    """
    path = folder / METADATA
    told = opcodes.read(path.read_bytes(), str(path), KNOWN)
    try:
        places = {(index["fqn"], _size(index["offset"])): info for index, info in told["storage_data"].items()}
        entries = told["state_dict_metadata"].items()
        others = [name for name, one in entries if one.name.endswith("BytesStorageMetadata")]
        tensors = {name: _stored(folder, name, one, places) for name, one in entries if name not in set(others)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no metadata of a checkpoint", f"{error!r}", AGAIN) from None
    _check_files(folder, tensors.values())
    return tensors, others


def _stored(folder: Path, name: str, told: Call, places: Mapping[tuple[str, Any], Call]) -> Stored:
    state = told["properties"].state
    dtype = (state[0] if isinstance(state, tuple) else state["dtype"]).name.removeprefix("torch.")
    chunks = tuple(_chunk(name, one, places) for one in told["chunks"])
    slot = Slot(name, _size(told["size"]), dtype)
    whole = Box((0,) * len(slot.shape), slot.shape)
    inside = all(chunk.box.size == 0 or chunk.box.meet(whole) == chunk.box for chunk in chunks)
    if not inside or sum(chunk.box.size for chunk in chunks) != whole.size:
        raise _holes(name, folder)
    return Stored(folder, slot, chunks)


def _chunk(name: str, told: Call, places: Mapping[tuple[str, Any], Call]) -> Chunk:
    start, shape = _size(told["offsets"]), _size(told["sizes"])
    info = places[name, start]
    if info["transform_descriptors"]:
        raise CheckpointError(
            f"{name} was written through {', '.join(info['transform_descriptors'])}",
            "its bytes are not those of the tensor",
            "save it without extensions of the writer",
        )
    return Chunk(Box(start, shape), Path(info["relative_path"]).name, int(info["offset"]), int(info["length"]))


def _size(told: Call | None) -> tuple[int, ...] | None:
    """What a torch.Size tells."""
    return None if told is None else tuple(int(length) for (sizes,) in [told.args] for length in sizes)


def _check_files(folder: Path, tensors: Any) -> None:
    """Find a file that is lacking or too short before anything is written."""
    ends: dict[str, int] = {}
    for chunk in (chunk for stored in tensors for chunk in stored.chunks):
        ends[chunk.file] = max(ends.get(chunk.file, 0), chunk.offset + chunk.length)
    for file, end in ends.items():
        if not (folder / file).is_file():
            raise IncompleteError(f"{folder / file} is not there", f"{METADATA} names it", AGAIN)
        size = os.stat(folder / file).st_size
        if end > size:
            raise IncompleteError(f"{folder / file} is incomplete", f"{METADATA} wants {end} bytes, not {size}", AGAIN)


def _check(path: Path, slot: Slot, chunk: Chunk, kept: Kept) -> None:
    if (kept.shape, kept.dtype) != (chunk.box.shape, slot.dtype):
        raise CheckpointError(
            f"{path}: {slot.name} is {kept.dtype} {list(kept.shape)} at byte {chunk.offset}",
            f"{METADATA} says {slot.dtype} {list(chunk.box.shape)}",
            AGAIN,
        )


def _holes(name: str, folder: Path) -> CheckpointError:
    return CheckpointError(
        f"{name} is not whole in {folder}",
        "its chunks do not have each of its elements once",
        "save it anew, by all ranks that hold parts of it",
    )
