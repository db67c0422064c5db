"""Items: where the elements of a tensor lie in a file, in what ``torch.save`` made of it or in safetensors.

``torch.save`` makes a zip with the members ``data.pkl`` (which storage, strides, dtype), ``byteorder`` and
``data/KEY``, the bytes of the storage. Its directory tells where these are; nothing is unpacked, and no pickle is run.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from hpctrain.checkpoint import opcodes, safetensors
from hpctrain.checkpoint.opcodes import AGAIN, Call
from hpctrain.errors import CheckpointError
from hpctrain.plan.layout import ITEMSIZE

STORAGES = {
    "torch.DoubleStorage": "float64",
    "torch.FloatStorage": "float32",
    "torch.HalfStorage": "float16",
    "torch.BFloat16Storage": "bfloat16",
    "torch.LongStorage": "int64",
    "torch.IntStorage": "int32",
    "torch.ByteStorage": "uint8",
    "torch.BoolStorage": "bool",
    "torch.ComplexFloatStorage": "complex64",
    "torch.storage.UntypedStorage": None,  # the tensor itself tells
}
REBUILD = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3")
DTYPES = {f"torch.{name}" for name, one in vars(torch).items() if isinstance(one, torch.dtype)}
KNOWN = {*STORAGES, *REBUILD, *DTYPES, "collections.OrderedDict"}
PICKLE_BYTES = 1 << 20  # what tells of one tensor is some hundred bytes
ZIP = b"PK\x03\x04"
HEADER = struct.Struct("<26xHH")  # of a member: the lengths of its name and of what follows that


@dataclass(frozen=True)
class Kept:
    """A tensor in a file: its first element is at byte ``at``, the others by strides, in elements."""

    at: int
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class View(io.RawIOBase):
    """Some bytes of a file as a file. It has a state, its position, as files have."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence] + offset
        if self._at < 0:
            raise OSError("a place before the beginning")  # as of any file: zipfile looks for it
        return self._at

    def readinto(self, into: Any) -> int:
        self._file.seek(self._offset + self._at)
        data = self._file.read(max(0, min(len(into), self._length - self._at)))
        into[: len(data)] = data
        self._at += len(data)
        return len(data)


@lru_cache(maxsize=1 << 14)
def find(path: Path, offset: int, length: int, name: str) -> Kept:
    """Where the tensor ``name`` lies in the item of a file; its numbers are not read.

    Raises CheckpointError for what neither ``torch.save`` nor safetensors would write.
    """
    where = f"{path}, {name} at byte {offset}"
    with open(path, "rb") as file:
        file.seek(offset)
        if file.read(len(ZIP)) != ZIP:
            return _plain(path, name)
        try:
            return _zipped(View(file, offset, length), offset, where)
        except (zipfile.BadZipFile, struct.error, KeyError, ValueError, TypeError, AttributeError) as error:
            why = f"it is no tensor of torch.save: {error!r}"
            raise CheckpointError(f"{where} cannot be read", why, AGAIN) from None


def _plain(path: Path, name: str) -> Kept:
    """In a file of safetensors, whose own header tells the place."""
    slots = safetensors.read(path)
    if name not in slots:
        raise CheckpointError(f"{path} has no {name}", "the file's header does not name it", AGAIN)
    slot = slots[name]
    return Kept(slot.offset, slot.dtype, slot.shape, torch.empty(slot.shape, device="meta").stride())


def _zipped(view: View, offset: int, where: str) -> Kept:
    archive = zipfile.ZipFile(view)
    members = {member.filename.partition("/")[2]: member for member in archive.infolist()}
    for member in members.values():
        if member.compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"{member.filename} is compressed")
    if members["data.pkl"].file_size > PICKLE_BYTES:
        raise ValueError("data.pkl is too long for one tensor")
    order = archive.read(members["byteorder"]) if "byteorder" in members else b"little"
    if order != b"little":
        raise ValueError(f"its numbers are {order.decode()}-endian")
    key, first, kept = _told(opcodes.read(archive.read(members["data.pkl"]), where, KNOWN))
    member = members[f"data/{key}"]
    stop = first + 1 + sum((n - 1) * stride for n, stride in zip(kept.shape, kept.strides, strict=True))
    beyond = min((first, *kept.strides, *kept.shape)) < 0 or stop * ITEMSIZE[kept.dtype] > member.file_size
    if beyond and 0 not in kept.shape:
        raise ValueError(f"it goes beyond the {member.file_size} bytes of its storage")
    view.seek(member.header_offset)
    at = member.header_offset + HEADER.size + sum(HEADER.unpack(view.read(HEADER.size)))
    return Kept(offset + at + first * ITEMSIZE[kept.dtype], kept.dtype, kept.shape, kept.strides)


def _told(tensor: Any) -> tuple[str, int, Kept]:
    """The storage's key, the first element in it, and the rest, of what the pickle of a tensor tells."""
    if not isinstance(tensor, Call) or tensor.name not in REBUILD:
        raise ValueError("it holds something else than a plain tensor")
    storage, first, shape, strides = tensor.args[:4]
    _, kind, key, _, _ = storage.args
    dtype = STORAGES[kind.name] or tensor.args[6].name.removeprefix("torch.")
    return key, first, Kept(0, dtype, tuple(shape), tuple(strides))
