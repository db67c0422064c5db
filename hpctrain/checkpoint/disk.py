"""Byte ranges to and from one file, by several threads, past the page cache where the file system takes it.

Writing: neighbouring pieces are gathered in a page-aligned buffer and go out in one call. Only whole pages that are all
ours go unbuffered (O_DIRECT); the torn pages at the ends of a range go through the page cache, which is coherent when
another rank writes the rest of that page. So no page is ever written both ways, and nobody reads, changes and rewrites
a neighbour's bytes. No MPI call is made here.

Reading goes through the page cache: replicas on one node then read the disk once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from hpctrain.errors import IncompleteError

PAGE = 4096
CHUNK = 4 << 20  # bytes in one call
GAP = 1 << 16  # bytes read and thrown away rather than starting another call
THREADS = 4
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Piece:
    """Flat bytes in memory, and the offset in the file where they lie."""

    at: int
    memory: Tensor

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.at + self.memory.numel()


Chunk = list[Piece]


class Buffer:
    """Page-aligned memory of one chunk, as a tensor to copy and as bytes to write."""

    def __init__(self) -> None:
        memory = mmap(-1, CHUNK)
        self.bytes = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)


def write(path: Path, pieces: Iterable[Piece], sync: bool) -> None:
    """Write every piece to its place in a file that is there; with ``sync`` the disk has them on return."""
    plain = os.open(path, os.O_WRONLY)
    direct = _open_direct(path)
    try:
        _spread(lambda chunk, buffer: _put(chunk, buffer, plain, direct), _chunks(pieces, 0))
        if sync:
            os.fsync(plain)
    except OSError as error:
        raise _named(error, path) from None
    finally:
        for opened in {plain, direct}:
            os.close(opened)


def read(path: Path, pieces: Iterable[Piece]) -> None:
    """Fill the memory of every piece from its place in the file. Raises IncompleteError where the file ends early."""
    opened = os.open(path, os.O_RDONLY)
    try:
        # Threads that share a descriptor do not look like a sequence; told of it, the kernel reads ahead.
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        _spread(lambda chunk, buffer: _get(chunk, buffer, opened, path), _chunks(pieces, GAP))
    except OSError as error:
        raise _named(error, path) from None
    finally:
        os.close(opened)


def reserve(path: Path) -> None:
    """Have the file system set aside room for the whole length of a file, so that no write meets a full disk.

    Where it cannot do that, nothing is done: imitating it, as the C library's posix_fallocate does, would write it all.
    """
    opened = os.open(path, os.O_RDWR)
    try:
        length = os.fstat(opened).st_size
        if length and LIBC.fallocate(opened, 0, ctypes.c_int64(0), ctypes.c_int64(length)):
            code = ctypes.get_errno()
            if code not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(opened)


def lacking(path: Path, pieces: Iterable[Piece]) -> int:
    """How many of the pieces' bytes are not in the file, after somebody else wrote them.

    Only where the file has holes is it read, and only those pieces: a file system may store zeros as a hole.
    """
    opened = os.open(path, os.O_RDONLY)
    try:
        return sum(_lacking(chunk, opened) for chunk in _chunks(pieces, GAP))
    finally:
        os.close(opened)


def _lacking(chunk: Chunk, opened: int) -> int:
    try:
        if os.lseek(opened, chunk[0].at, os.SEEK_HOLE) >= chunk[-1].end:
            return 0
    except OSError as error:
        if error.errno != errno.ENXIO:  # beyond the end of the file: all of it is lacking
            raise
    found = [os.pread(opened, piece.memory.numel(), piece.at) for piece in chunk]
    wrong = (piece for piece, seen in zip(chunk, found, strict=True) if piece.memory.cpu().numpy().tobytes() != seen)
    return sum(piece.memory.numel() for piece in wrong)


def _open_direct(path: Path) -> int:
    """Opened to go past the page cache; through it, where the file system refuses that."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_WRONLY)


def _chunks(pieces: Iterable[Piece], gap: int) -> Iterator[Chunk]:
    """Pieces in file order, cut at multiples of CHUNK, with those together that lie within ``gap`` of each other."""
    chunk: Chunk = []
    for piece in _cut(sorted(pieces, key=lambda piece: piece.at)):
        if chunk and (piece.at - chunk[-1].end > gap or piece.at // CHUNK != chunk[0].at // CHUNK):
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


def _cut(pieces: Sequence[Piece]) -> Iterator[Piece]:
    for piece in pieces:
        done = 0
        while done < piece.memory.numel():
            at = piece.at + done
            length = min(piece.end - at, CHUNK - at % CHUNK)
            yield Piece(at, piece.memory[done : done + length])
            done += length


def _spread(act: Callable[[Chunk, Buffer], None], chunks: Iterator[Chunk]) -> None:
    """Let threads take one chunk after another; after an error none takes another one, and it is raised."""
    lock, stopped = Lock(), False

    def take() -> Chunk | None:
        with lock:
            return None if stopped else next(chunks, None)

    def work() -> None:
        nonlocal stopped
        buffer = Buffer()
        try:
            while chunk := take():
                act(chunk, buffer)
        except BaseException:
            stopped = True
            raise

    with ThreadPoolExecutor(THREADS, "checkpoint") as pool:
        workers = [pool.submit(work) for _ in range(THREADS)]
    for worker in workers:
        worker.result()


def _put(chunk: Chunk, buffer: Buffer, plain: int, direct: int) -> None:
    start, stop = chunk[0].at, chunk[-1].end
    base = start - start % PAGE  # the buffer's first byte belongs here, so both are aligned alike
    for piece in chunk:
        buffer.tensor[piece.at - base : piece.end - base].copy_(piece.memory)
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    if first >= last:
        return _pwrite(plain, buffer.bytes[start - base : stop - base], start, plain)
    _pwrite(plain, buffer.bytes[start - base : first - base], start, plain)
    _pwrite(direct, buffer.bytes[first - base : last - base], first, plain)
    _pwrite(plain, buffer.bytes[last - base : stop - base], last, plain)


def _pwrite(opened: int, data: memoryview, at: int, plain: int) -> None:
    """Write all of ``data``; what unbuffered writing refuses (EINVAL) goes through ``plain``."""
    while data:
        try:
            done = os.pwrite(opened, data, at)
        except OSError as error:
            if error.errno != errno.EINVAL or opened == plain:
                raise
            opened = plain
            continue
        if not done:
            raise OSError(errno.EIO, "the file system took no more bytes")
        data, at = data[done:], at + done


def _get(chunk: Chunk, buffer: Buffer, opened: int, path: Path) -> None:
    start, stop = chunk[0].at, chunk[-1].end
    only = chunk[0].memory if len(chunk) == 1 else None
    if only is not None and only.device.type == "cpu":
        return _pread(opened, memoryview(only.numpy()), start, path)
    _pread(opened, buffer.bytes[: stop - start], start, path)
    for piece in chunk:
        piece.memory.copy_(buffer.tensor[piece.at - start : piece.end - start])


def _pread(opened: int, into: memoryview, at: int, path: Path) -> None:
    while into:
        done = os.preadv(opened, [into], at)
        if not done:
            raise IncompleteError(
                f"{path} ends at byte {at}, before its tensors do",
                "it was cut off after it was written",
                "copy it again from where it is whole, or remove it to go on from an older one",
            )
        into, at = into[done:], at + done


def _named(error: OSError, path: Path) -> OSError:
    """The error with the file in it, which reads and writes by descriptor do not know."""
    return error if error.filename else OSError(error.errno, error.strerror, str(path))
