"""Tokens: documents as whole numbers in a file pair, the one that Megatron-LM reads and writes.

``PREFIX.bin`` holds the tokens end to end. ``PREFIX.idx`` holds, little-endian and without padding: the magic, version
1 (u64), the dtype's code (u8), the number of sequences (u64), the number of document borders (u64), each sequence's
tokens (i32), its first byte in the .bin (i64), and the border of each document as a count of sequences (i64), 0 first
and the number of sequences last. ``PREFIX.json`` is ours: what made the pair (``Description``); a pair without it is
read as well.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from hpctrain.cluster import aside
from hpctrain.errors import DataError

MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
CODES = {np.dtype(name): code for code, name in DTYPES.items()}

_HEADER = struct.Struct("<9sQBQQ")
_AT_ONCE = 1 << 20
_NAME = "give the PREFIX of a .bin/.idx pair"
_REMAKE = "make the pair again with hpctrain data prepare"


def dtype_for(vocabulary: int) -> np.dtype:
    """The smallest dtype that Megatron-LM would take for this vocabulary."""
    return np.dtype("uint16" if vocabulary < 65500 else "int32")


@dataclass(frozen=True)
class Shape:
    """How an index file is laid out: where each of its tables begins, in bytes."""

    dtype: np.dtype
    sequences: int
    borders: int

    @property
    def sizes_at(self) -> int:
        return _HEADER.size

    @property
    def pointers_at(self) -> int:
        return self.sizes_at + 4 * self.sequences

    @property
    def borders_at(self) -> int:
        return self.pointers_at + 8 * self.sequences

    @property
    def bytes(self) -> int:
        return self.borders_at + 8 * self.borders

    def header(self) -> bytes:
        return _HEADER.pack(MAGIC, 1, CODES[self.dtype], self.sequences, self.borders)


class Tokens:
    """A pair, mapped into memory and found whole; live, since it holds the mapping. Raises DataError."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = _prefix(prefix)
        index = self.prefix + ".idx"
        self.shape = shape = _read_shape(index)
        self.dtype = shape.dtype
        self._sizes = _mapped(index, "<i4", shape.sequences, shape.sizes_at)
        self._pointers = _mapped(index, "<i8", shape.sequences, shape.pointers_at)
        self._borders = _mapped(index, "<i8", shape.borders, shape.borders_at)
        self.total = _checked_total(self)
        self._data = _mapped(self.prefix + ".bin", self.dtype.newbyteorder("<"), self.total, 0)

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return len(self._borders) - 1

    def borders(self, first: int, last: int) -> NDArray[np.int64]:
        """Where documents ``first`` to ``last`` begin, as positions in all tokens: last - first + 1 of them.

        ``last`` may be the number of documents; its place is the end of the tokens.
        """
        sequence = np.asarray(self._borders[first : last + 1])
        places = np.full(len(sequence), self.total, np.int64)
        inside = sequence < self.shape.sequences
        places[inside] = self._pointers[sequence[inside]] // self.dtype.itemsize
        return places

    def read(self, start: int, stop: int) -> NDArray:
        """Tokens ``start`` to ``stop`` of all, as they lie in the file (a view; it may not be written to)."""
        return self._data[start:stop]

    def document(self, number: int) -> NDArray:
        """The tokens of one document, its end-of-document token included."""
        start, stop = self.borders(number, number + 1)
        return self.read(start, stop)


@dataclass(frozen=True)
class Description:
    """What made a pair, as it is kept in ``PREFIX.json``."""

    vocabulary: int
    eod: int
    tokenizer: str
    """``bytes``, or the SHA-256 of the tokenizer's JSON, which lies in ``PREFIX.tokenizer.json``."""
    files: int
    bytes: int
    documents: int
    tokens: int
    empty: int
    skipped: int
    request: str = ""
    """A hash of the files and settings that the pair was asked for with."""

    def text(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def describe(prefix: str | Path) -> Description | None:
    """What ``PREFIX.json`` says; None where there is none, as with corpora of Megatron-LM."""
    path = Path(_prefix(prefix) + ".json")
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        return Description(**{field.name: table[field.name] for field in fields(Description)})
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise DataError(f"{path} does not describe a token file", why, "remove it, or " + _REMAKE) from None


def write(prefix: str | Path, documents: Iterable[ArrayLike], dtype: DTypeLike) -> None:
    """Write one document after the other, each as one sequence; the names appear only when both files are whole."""
    prefix, dtype, sizes = _prefix(prefix), np.dtype(dtype), []
    own = f"{prefix}.{aside.tag()}"
    with open(own + ".bin.tmp", "wb") as data:
        for document in documents:
            tokens = np.asarray(document, dtype.newbyteorder("<"))
            sizes.append(len(tokens))
            data.write(tokens.tobytes())
        sync(data)
    lay_index(own + ".idx.tmp", dtype, len(sizes))
    fill_index(own + ".idx.tmp", np.array(sizes, np.int64), 0, 0)
    publish(own, prefix, ".bin")


def lay_index(path: str, dtype: np.dtype, documents: int) -> None:
    """Make an index file of its full length, with its header and without its tables."""
    shape = Shape(dtype, documents, documents + 1)
    with open(path, "wb") as index:
        index.write(shape.header())
        index.truncate(shape.bytes)


def fill_index(path: str, sizes: NDArray[np.int64], first: int, tokens_before: int) -> None:
    """Write the part of the tables that belongs to documents ``first`` and following, ``sizes`` tokens each."""
    shape = _read_shape(path)
    starts = tokens_before + np.cumsum(sizes) - sizes
    with open(path, "r+b") as index:
        _put(index, shape.sizes_at + 4 * first, sizes.astype("<i4"))
        _put(index, shape.pointers_at + 8 * first, (starts * shape.dtype.itemsize).astype("<i8"))
        # One more than the documents: the next part writes the same number there, and after the last it ends the table.
        _put(index, shape.borders_at + 8 * first, np.arange(first, first + len(sizes) + 1, dtype="<i8"))
        sync(index)


def publish(own: str, prefix: str, *suffixes: str) -> None:
    """Give the files written aside under ``own`` their names, the index last: without it, a pair does not exist."""
    Path(prefix + ".idx").unlink(missing_ok=True)
    for suffix in (*suffixes, ".idx"):
        os.replace(own + suffix + ".tmp", prefix + suffix)


def sync(file: BinaryIO) -> None:
    """Return when the disk has what was written."""
    file.flush()
    os.fsync(file.fileno())


def _put(file: BinaryIO, at: int, values: NDArray) -> None:
    file.seek(at)
    file.write(values.tobytes())


def _prefix(prefix: str | Path) -> str:
    """The prefix without .bin or .idx, which a shell's completion likes to add."""
    return str(prefix).removesuffix(".bin").removesuffix(".idx")


def _read_shape(index: str) -> Shape:
    try:
        with open(index, "rb") as file:
            head, size = file.read(_HEADER.size), os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{index} cannot be read", error.strerror or "", _NAME) from None
    if not head.startswith(MAGIC):
        why = f"it begins with {head[:9]!r}, not with {MAGIC!r}"
        raise DataError(f"{index} is not a token index", why, _NAME)
    if len(head) < _HEADER.size:
        raise DataError(f"{index} is cut short", f"it ends within its header, after {size} bytes", _REMAKE)
    shape = _shape(index, head)
    # Megatron's multimodal files have one byte a sequence more, which says nothing about text.
    if size not in (shape.bytes, shape.bytes + shape.sequences):
        why = f"{shape.sequences} sequences need {shape.bytes} bytes, and it has {size}"
        raise DataError(f"{index} is cut short or too long", why, _REMAKE)
    return shape


def _shape(index: str, head: bytes) -> Shape:
    _, version, code, sequences, borders = _HEADER.unpack(head)
    if version != 1:
        raise DataError(f"{index} has version {version}", "only version 1 is known", _REMAKE)
    if not DTYPES.get(code, "float").startswith(("int", "uint")):
        known = ", ".join(f"{n} {name}" for n, name in DTYPES.items() if "float" not in name)
        raise DataError(f"{index} holds no tokens: dtype code {code}", f"tokens are whole numbers: {known}", _REMAKE)
    return Shape(np.dtype(DTYPES[code]), sequences, borders)


def _mapped(path: str, dtype: DTypeLike, count: int, at: int) -> NDArray:
    """A read-only view of a file's numbers. An empty one has no pages, and cannot be mapped."""
    if count == 0:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", at, (count,)).view(np.ndarray)


def _checked_total(tokens: Tokens) -> int:
    """The tokens of a pair whose tables agree with each other and with the length of the .bin."""
    total = _checked_sequences(tokens)
    _check_borders(tokens)
    data = tokens.prefix + ".bin"
    try:
        size = os.stat(data).st_size
    except OSError as error:
        raise DataError(f"{data} cannot be read", error.strerror or "", "put it beside its .idx") from None
    if size != total * tokens.dtype.itemsize:
        why = f"its index speaks of {total} tokens of {tokens.dtype}, which are {total * tokens.dtype.itemsize} bytes"
        raise DataError(f"{data} has {size} bytes and does not belong to its index", why, _REMAKE)
    return total


def _checked_sequences(tokens: Tokens) -> int:
    """The sum of the sizes, when each sequence begins where the one before it ends."""
    total = 0
    for first in range(0, tokens.shape.sequences, _AT_ONCE):
        sizes = tokens._sizes[first : first + _AT_ONCE].astype(np.int64)
        ends = total + np.cumsum(sizes)
        wrong = (tokens._pointers[first : first + _AT_ONCE] != (ends - sizes) * tokens.dtype.itemsize) | (sizes < 0)
        if wrong.any():
            which = first + int(np.argmax(wrong))
            why = "a sequence begins where the one before it ends"
            raise DataError(f"{tokens.prefix}.idx is damaged at sequence {which}", why, _REMAKE)
        total = int(ends[-1])
    return total


def _check_borders(tokens: Tokens) -> None:
    borders = tokens._borders
    whole = len(borders) and borders[0] == 0 and borders[-1] == tokens.shape.sequences
    if not whole or any((np.diff(borders[i : i + _AT_ONCE + 1]) < 0).any() for i in range(0, len(borders), _AT_ONCE)):
        why = f"document borders rise from 0 to the number of sequences, {tokens.shape.sequences}"
        raise DataError(f"{tokens.prefix}.idx is damaged in its documents", why, _REMAKE)
