"""The file: one HDF5 dataset a tensor, contiguous, under its logical name. The only place where HDF5 is spoken.

Root attributes: ``format``, ``version``, ``step``, ``complete`` (1 once every byte is there), ``attributes`` (JSON) and
``seal``, a checksum of all these and of the names. A tensor's dataset has the global shape, and the attributes
``dtype``, torch's name of it, and ``first_checksum``, where its checksums begin in the dataset ``/checksums``. The same
tensors and attributes give the same bytes, whoever writes: no times are recorded, and the oldest HDF5 structures are
used, which all releases know.
Every open is without HDF5's own file locks: on NFS and Lustre they are often not served, and a finished file never
changes (see docs/reference/checkpoint-format.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate, chain
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.checkpoint.blocks import ALGORITHM, BLOCK_BYTES, count, digest_of_all
from hpctrain.checkpoint.hdf5 import VARIABLE, h5a, h5d, h5f, h5g, h5o, h5p, h5py, h5s, h5t
from hpctrain.errors import CheckpointError, DamagedError, IncompleteError
from hpctrain.plan.layout import ITEMSIZE

FORMAT = "hpctrain checkpoint"
VERSION = 2
READABLE = (1, 2)  # version 1 has no checksums
CHECKSUMS = "checksums"
PAGE = 4096
ALIGN_FROM_BYTES = 1 << 16  # smaller tensors lie side by side
MEGABYTE = 1 << 20
OBJECT_BYTES = 1024  # HDF5's bookkeeping for one dataset, from above
OTHER_LOCKING = "flag values don't match"  # HDF5 has no number for it
DIGEST = h5t.STD_U64LE
TABLE_ROWS = 1 << 20  # checksums that are read at once: of a file of terabytes there are more than memory is for
TEXT = h5py.string_dtype()
SCALAR = h5s.create(h5s.SCALAR)


@dataclass(frozen=True)
class Slot:
    """A tensor in the file: its bytes are ``nbytes`` from ``offset`` on, row-major, little-endian.

    The checksums of its blocks begin at number ``first`` of the table.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    first: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    @property
    def blocks(self) -> int:
        """Blocks of the tensor, each with a checksum."""
        return count(self.nbytes)


@dataclass(frozen=True)
class Index:
    """All that a whole checkpoint file says about itself; ``table`` is where its checksums begin, None without any."""

    step: int
    attributes: dict[str, Any]
    slots: tuple[Slot, ...]
    table: int | None = None

    def to_json(self) -> dict[str, Any]:
        """The index as dicts and lists."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Index:
        """The index that ``to_json`` gave."""
        slots = tuple(Slot(**slot | {"shape": tuple(slot["shape"])}) for slot in value["slots"])
        return cls(value["step"], value["attributes"], slots, value["table"])


def _small_float(like: h5t.TypeFloatID, size: int, exponent: int, mantissa: int, bias: int) -> h5t.TypeFloatID:
    """A float type of 1 sign bit, and so many of exponent and mantissa, as IEEE 754 would make it."""
    made = like.copy()
    made.set_fields(exponent + mantissa, mantissa, exponent, 0, mantissa)
    made.set_size(size)
    made.set_ebias(bias)
    return made


# HDF5 reads E4M3 as if it had infinities and misreads 14 of its codes, so those are bytes, and the attribute says what
# they are. All others are types from which plain h5py makes the right numbers (bfloat16 as float32, E5M2 as float16).
TYPES: dict[str, h5t.TypeID] = {
    "float64": h5t.IEEE_F64LE,
    "float32": h5t.IEEE_F32LE,
    "float16": h5t.IEEE_F16LE,
    "bfloat16": _small_float(h5t.IEEE_F32LE, 2, 8, 7, 127),
    "float8_e5m2": _small_float(h5t.IEEE_F16LE, 1, 5, 2, 15),
    "float8_e4m3fn": h5t.STD_U8LE,
    "int64": h5t.STD_I64LE,
    "int32": h5t.STD_I32LE,
    "uint8": h5t.STD_U8LE,
    "bool": h5t.py_create(np.dtype(bool), logical=True),
    "complex64": h5t.py_create(np.dtype("<c8"), logical=True),
}


def needed_bytes(tensors: Sequence[Slot]) -> int:
    """Bytes of a file of these tensors, from above."""
    data = sum(slot.nbytes + (PAGE if slot.nbytes >= ALIGN_FROM_BYTES else 0) for slot in tensors)
    checksums = sum(slot.blocks for slot in tensors) * DIGEST.get_size()
    return data + checksums + 2 * OBJECT_BYTES * len(tensors) + MEGABYTE


def lay_out(path: Path, tensors: Sequence[Slot], step: int, attributes: dict[str, Any], mode: str = "x") -> list[Slot]:
    """Make a new file with room for ``tensors``, in this order, and give them with their places; one process calls it.

    With the mode ``w`` the file may be there, and is emptied. No data is written: the bytes are holes until a writer
    fills them, and the file says that it is not complete.
    """
    text = json.dumps(attributes, sort_keys=True)
    room = max(PAGE, 1 << (OBJECT_BYTES * len(tensors)).bit_length())  # bookkeeping first, data after it in one piece
    options = {"alignment_threshold": ALIGN_FROM_BYTES, "alignment_interval": PAGE, "meta_block_size": room}
    with h5py.File(path, mode, libver="earliest", locking=False, **options) as file:
        for name, value in _root(step, text).items():
            _put_attribute(file.id, name, value)
        firsts = accumulate((slot.blocks for slot in tensors), initial=0)
        placed = [_create(file.id, replace(slot, first=first)) for slot, first in zip(tensors, firsts, strict=False)]
        _create_table(file.id, sum(slot.blocks for slot in tensors))
        return placed


def mark_complete(path: Path, slots: Sequence[Slot], checksums: np.ndarray) -> None:
    """Write the checksums of a file that ``lay_out`` gave these ``slots``, and say in it that all its bytes are there.

    One process calls it, when no other has the file open to write.
    """
    with h5py.File(path, "r+", libver="earliest", locking=False) as file:
        table = h5d.open(file.id, CHECKSUMS.encode())
        if checksums.size:
            table.write(h5s.ALL, h5s.ALL, checksums.astype("<u8", copy=False), DIGEST)
        in_order = sorted(slots, key=lambda slot: slot.name.split("/"))  # as HDF5 will name them
        h5a.open(file.id, b"seal").write(np.array(_seal(file, in_order), np.uint64))
        h5a.open(file.id, b"complete").write(np.array(1, np.uint8))


def read_index(path: Path) -> Index:
    """What is in a whole checkpoint file.

    Raises IncompleteError for one whose writing or copying did not end, DamagedError for one that says otherwise about
    itself than when it was written, CheckpointError for anything else that is not a checkpoint, and the plain OSError
    where the file cannot be read at all.
    """
    with _opened(path) as file:
        try:
            return _index(path, file)
        except _HDF5_ERRORS as error:
            raise _damaged(path, error) from None


def read_attributes(path: Path) -> dict[str, Any]:
    """What the one who saved said about the run: the ``attributes`` that were given to the save."""
    with _opened(path) as file:
        return json.loads(file.attrs["attributes"])


_OLDER = "go on from an older checkpoint, or copy it again from where it is whole"
_HDF5_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError)  # what h5py makes of damage


def _damaged(path: Path, error: Exception) -> Exception:
    """What h5py's error means; one with a number is the system's, such as a failed read, and tells of no damage."""
    if isinstance(error, OSError) and error.errno:
        return error
    return DamagedError(f"{path} is damaged", f"HDF5: {type(error).__name__}: {error}", _OLDER)


def _index(path: Path, file: h5py.File) -> Index:
    root = {name: file.attrs[name] for name in ("step", "complete", "attributes")}
    if not root["complete"]:
        raise IncompleteError(f"{path} is incomplete", "its writing did not come to the end", _OLDER)
    slots = tuple(_slots(file.id))
    table = _table(file, slots) if file.attrs["version"] > 1 else None
    size = os.stat(path).st_size
    ends = [(slot.name, slot.offset + slot.nbytes) for slot in slots]
    for name, end in [*ends, (CHECKSUMS, (table or 0) + sum(slot.blocks for slot in slots) * DIGEST.get_size())]:
        if end > size and (name != CHECKSUMS or table):
            raise IncompleteError(f"{path} is incomplete", f"{name} goes beyond its {size} bytes", _OLDER)
    if table is not None and int(file.attrs["seal"]) != _seal(file, slots):
        raise DamagedError(f"{path} is damaged", "what it says about itself does not fit its seal", _OLDER)
    return Index(int(root["step"]), json.loads(root["attributes"]), slots, table)


def _table(file: h5py.File, slots: Sequence[Slot]) -> int:
    """Where the checksums begin in the file; 0 where there are none to have."""
    table = file[CHECKSUMS]
    told = table.attrs["algorithm"], int(table.attrs["block_bytes"]), table.shape
    wanted = ALGORITHM, BLOCK_BYTES, (sum(slot.blocks for slot in slots),)
    if told != wanted:
        raise ValueError(f"its checksums are {told}, where {wanted} was expected")
    return table.id.get_offset() or 0


def _seal(file: h5py.File, slots: Sequence[Slot]) -> int:
    """The checksum of all that the file says, save the tensors' own bytes, which the table speaks for."""
    lines = [str(file.attrs["step"]), file.attrs["attributes"]]
    lines += [f"{slot.name} {slot.dtype} {list(slot.shape)} {slot.first}" for slot in slots]
    table = file[CHECKSUMS]
    rows = (table[row : row + TABLE_ROWS].tobytes() for row in range(0, len(table), TABLE_ROWS))
    return digest_of_all(chain(["\n".join(lines).encode()], rows))


def _create_table(file: h5f.FileID, blocks: int) -> None:
    table = h5d.create(file, CHECKSUMS.encode(), DIGEST, h5s.create_simple((blocks,)), *_manner())
    _put_attribute(table, "algorithm", ALGORITHM)
    _put_attribute(table, "block_bytes", np.int64(BLOCK_BYTES))


def _root(step: int, attributes: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": np.int64(VERSION),
        "step": np.int64(step),
        "complete": np.uint8(0),
        "attributes": attributes,
        "seal": np.uint64(0),
    }


def _put_attribute(owner: h5g.GroupID | h5d.DatasetID | h5f.FileID, name: str, value: Any) -> None:
    """A scalar attribute; a text is of variable length, since fixed ones end at 64 KiB."""
    array = np.array(value, TEXT) if isinstance(value, str) else np.asarray(value)
    in_file, in_memory = _kinds(array.dtype)
    h5a.create(owner, name.encode(), in_file, SCALAR).write(array, in_memory)


@cache
def _kinds(dtype: np.dtype) -> tuple[h5t.TypeID, h5t.TypeID]:
    return h5t.py_create(dtype, logical=True), h5t.py_create(dtype)


@cache
def _manner() -> tuple[h5p.PropDCID, h5p.PropLCID]:
    """How every dataset and its link are made."""
    dataset = h5p.create(h5p.DATASET_CREATE)
    dataset.set_layout(h5d.CONTIGUOUS)
    dataset.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    dataset.set_fill_time(h5d.FILL_TIME_NEVER)
    dataset.set_obj_track_times(False)
    link = h5p.create(h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    return dataset, link


def _create(file: h5f.FileID, slot: Slot) -> Slot:
    """Make a dataset, and give it with its offset in the file; 0 for one with no bytes."""
    space = h5s.create_simple(slot.shape) if slot.shape else SCALAR
    try:
        dataset = h5d.create(file, slot.name.encode(), TYPES[slot.dtype], space, *_manner())
    except (ValueError, RuntimeError) as error:
        mend = "no name may be the beginning of another"
        raise CheckpointError(f"{slot.name} cannot be a dataset", f"HDF5: {error}", mend) from None
    _put_attribute(dataset, "dtype", slot.dtype)
    _put_attribute(dataset, "first_checksum", np.int64(slot.first))
    return replace(slot, offset=dataset.get_offset() or 0)


def _opened(path: Path) -> h5py.File:
    """The file, open to read, and certainly one of ours."""
    os.close(os.open(path, os.O_RDONLY))  # a plain OSError where it is not there or not ours to read
    if not h5f.is_hdf5(os.fsencode(path)):
        raise IncompleteError(f"{path} is not an HDF5 file", "it was cut off, or is something else", _OLDER)
    try:
        file = _unlocked(path)
    except OSError as error:
        if error.errno:  # the system's, such as a lock that is not to be had: it tells nothing of the file
            hint = f", and {VARIABLE} has it locked: set it to FALSE before the start" if "lock" in str(error) else ""
            raise OSError(error.errno, os.strerror(error.errno) + hint, str(path)) from error
        raise IncompleteError(f"{path} is incomplete", f"HDF5 cannot open it: {error}", _OLDER) from None
    try:
        told = file.attrs.get("format"), file.attrs.get("version")
    except _HDF5_ERRORS as error:
        raise _damaged(path, error) from None
    if told[0] != FORMAT or told[1] not in READABLE:
        file.close()
        raise CheckpointError(
            f"{path} is not a checkpoint that this release reads",
            f"its format is {told[0]!r}, version {told[1]}, where {FORMAT!r}, version {VERSION} or less, was expected",
            "read it with the release that wrote it" if told[0] == FORMAT else "",
        )
    return file


def _unlocked(path: Path) -> h5py.File:
    """The file, without a lock; where this process has it open already, as it was opened there, as HDF5 demands."""
    for locking in (False, True):
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if OTHER_LOCKING not in str(error):
                raise
    return h5py.File(path, "r", locking="best-effort")


def _slots(file: h5f.FileID) -> Iterator[Slot]:
    """Every dataset below the root, in the order of names within each group."""

    def walk(group: h5g.GroupID, prefix: str) -> Iterator[Slot]:
        for key in group:
            entry = h5o.open(group, key)
            name = prefix + key.decode()
            if isinstance(entry, h5g.GroupID):
                yield from walk(entry, name + "/")
            elif isinstance(entry, h5d.DatasetID) and name != CHECKSUMS:
                yield _slot(entry, name)

    yield from walk(h5g.open(file, b"/"), "")


def _slot(dataset: h5d.DatasetID, name: str) -> Slot:
    try:
        dtype = h5a.open(dataset, b"dtype")
    except KeyError:
        where = f"{_file_of(dataset)}: {name}"
        raise CheckpointError(f"{where} does not say its dtype", "a tensor's dtype is never guessed") from None
    told = np.empty((), TEXT)
    dtype.read(told)
    offset = dataset.get_offset()  # None for what is not in one piece, and for no bytes at all
    slot = Slot(name, dataset.shape, told[()].decode(), offset or 0, _first(dataset))
    if slot.dtype not in TYPES or (slot.nbytes and offset is None) or slot.nbytes != dataset.get_storage_size():
        where = f"{_file_of(dataset)}: {name}"
        raise CheckpointError(f"{where} is not contiguous {slot.dtype}", "its bytes cannot be found from its place")
    return slot


def _file_of(dataset: h5d.DatasetID) -> str:
    return os.fsdecode(h5f.get_name(dataset))


def _first(dataset: h5d.DatasetID) -> int:
    """Where the tensor's checksums begin; 0 in a file that has none."""
    if not h5a.exists(dataset, b"first_checksum"):
        return 0
    told = np.empty((), np.int64)
    h5a.open(dataset, b"first_checksum").read(told)
    return int(told)
