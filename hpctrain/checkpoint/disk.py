"""Byte ranges to and from one file, by several threads, past the page cache where that is the quicker way.

Writing: neighbouring pieces are gathered in a page-aligned buffer and go out in one call. Only whole pages that are all
ours go unbuffered (O_DIRECT); the torn pages at the ends of a range go through the page cache, which is coherent when
another rank writes the rest of that page. So no page is ever written both ways, and nobody reads, changes and rewrites
a neighbour's bytes. On the file systems of THROUGH all go through the page cache, and the disk is told at once to begin
with them. No MPI call is made here.

Reading goes through the page cache: replicas on one node then read the disk once.

Ranks that begin each at another share of what they have (``begin``) keep out of each other's way.

Whoever writes or reads may look at the bytes while they are in a processor's cache (``seen``), such as to digest them:
the threads that would wait for the disk do it, and memory is gone through once.
"""

from __future__ import annotations

import ctypes
import errno
import os
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from hpctrain.comm.meet import own_cores
from hpctrain.errors import IncompleteError

PAGE = 4096
# Bytes in one call that writes unbuffered, that writes where the disk is told to begin with them (with more, some saves
# took twice as long), and that reads (the kernel reads ahead, and catches up sooner after a jump).
CHUNK, BEGIN, READ = 1 << 22, 1 << 20, 1 << 19
GAP = 1 << 16  # bytes read and thrown away rather than starting another call
CORES = len(own_cores())
WRITERS = min(4, CORES)  # threads of a process
READERS = min(4, max(1, CORES // 2))  # more of them than this disturb the kernel's reading ahead
BEGUN = 64  # such calls that a thread has on their way through the page cache before it waits for the first one
LIBC = ctypes.CDLL(None, use_errno=True)

# By the number that statfs(2) gives. On ext4 unbuffered writes were a third slower than the page cache with the disk
# told to begin at once; perhaps since it books each of them as written, and longer stretches of the cache.
THROUGH = {0xEF53: "ext2, ext3, ext4"}
WRITE, WAIT = 2, 7  # of sync_file_range(2): begin to write; wait for what was begun, write, and wait again


@dataclass(frozen=True)
class Piece:
    """Flat bytes in memory, and the offset in the file where they lie.

    A long piece is moved in parts, cut at multiples of a call's bytes from ``origin`` on, a multiple of PAGE; ``of``
    says whose the bytes are to who sees the parts.
    """

    at: int
    memory: Tensor
    origin: int = 0
    of: Any = None

    @property
    def end(self) -> int:
        """The offset after the last byte."""
        return self.at + self.memory.numel()

    def part(self, start: int, stop: int) -> Piece:
        """The bytes from ``start`` to ``stop`` of it."""
        return Piece(self.at + start, self.memory[start:stop], self.origin, self.of)


Chunk = list[Piece]
Seen = Callable[[Piece], None]


class Buffer:
    """Page-aligned memory of one chunk, as a tensor to copy and as bytes to write."""

    def __init__(self) -> None:
        memory = mmap(-1, CHUNK + PAGE)  # a chunk may begin anywhere in a page
        self.bytes = memoryview(memory)
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)


def unseen(piece: Piece) -> None:
    """What is done with bytes that nobody wants to see."""


def write(path: Path, pieces: Iterable[Piece], sync: bool, seen: Seen = unseen, begin: float = 0) -> None:
    """Write every piece to its place in a file that is there; with ``sync`` the disk has them on return.

    ``seen`` is called by several threads, once with every part of a piece, in memory of the host, just before it is
    written.
    """
    plain = os.open(path, os.O_WRONLY)
    through = _kind(plain) in THROUGH
    direct = plain if through else _open_direct(path)
    tell = Begun(plain) if through else _leave
    chunks = _chunks(order(pieces, begin), 0, BEGIN if through else CHUNK)
    try:
        _spread(lambda chunk, buffer: _put(chunk, buffer, plain, direct, seen, tell), chunks, WRITERS)
        if sync:
            os.fsync(plain)
    except OSError as error:
        raise _named(error, path) from None
    finally:
        for opened in {plain, direct}:
            os.close(opened)


def read(path: Path, pieces: Iterable[Piece], seen: Seen = unseen, begin: float = 0) -> None:
    """Fill the memory of every piece from its place in the file. Raises IncompleteError where the file ends early.

    ``seen`` is called by several threads, once with every part of a piece, just after it was filled.
    """
    opened = os.open(path, os.O_RDONLY)
    chunks = _chunks(order(pieces, begin), GAP, READ)
    try:
        _spread(lambda chunk, buffer: _get(chunk, buffer, opened, path, seen), chunks, READERS)
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


def order(pieces: Iterable[Piece], begin: float = 0) -> list[Piece]:
    """The pieces as they lie in the file, from the share ``begin`` of their bytes on; what is before it comes last."""
    ordered = sorted(pieces, key=lambda piece: piece.at)
    ends = list(accumulate(piece.memory.numel() for piece in ordered))
    first = bisect_right(ends, begin * ends[-1]) if ends else 0
    return ordered[first:] + ordered[:first]


def cut(pieces: Iterable[Piece], size: int) -> Iterator[Piece]:
    """Parts of the pieces, cut at multiples of ``size`` from where each counts from."""
    for piece in pieces:
        length, done = piece.memory.numel(), 0
        if length <= size and (piece.at - piece.origin) % size + length <= size:
            if length:
                yield piece
            continue
        while done < length:
            stop = min(length, done + size - (piece.at + done - piece.origin) % size)
            yield piece.part(done, stop)
            done = stop


def _kind(opened: int) -> int:
    """The number of the file system; 0 where it cannot be told."""
    told = (ctypes.c_long * 32)()  # more than struct statfs has, whose first member it is
    return 0 if LIBC.fstatfs(opened, told) else int(told[0])


def _leave(start: int, length: int) -> None:
    """What is done after an unbuffered write: the disk has it already."""


class Begun:
    """Has the disk begin with what was written to the page cache, and keeps little of it waiting; live, of all threads.

    Without it, the disk would idle until the cache is full of what must be written, and then the writers would. Where
    it cannot be told, fsync is left to do it all. Call it with the first byte and the number of bytes.
    """

    def __init__(self, opened: int) -> None:
        self.opened, self.ranges = opened, deque[tuple[int, int]]()

    def __call__(self, start: int, length: int) -> None:
        self._tell(start, length, WRITE)
        self.ranges.append((start, length))
        if len(self.ranges) > BEGUN * WRITERS:
            self._tell(*self.ranges.popleft(), WAIT)

    def _tell(self, start: int, length: int, what: int) -> None:
        LIBC.sync_file_range(self.opened, ctypes.c_int64(start), ctypes.c_int64(length), what)


def _open_direct(path: Path) -> int:
    """Opened to go past the page cache; through it, where the file system refuses that."""
    try:
        return os.open(path, os.O_WRONLY | getattr(os, "O_DIRECT", 0))
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_WRONLY)


def _chunks(pieces: Iterable[Piece], gap: int, size: int) -> Iterator[Chunk]:
    """Parts of pieces in their order; together are those that lie within ``gap`` of each other and fill no ``size``."""
    chunk: Chunk = []
    for piece in cut(pieces, size):
        if chunk and not (0 <= piece.at - chunk[-1].end <= gap and piece.end - chunk[0].at <= size):
            yield chunk
            chunk = []
        chunk.append(piece)
    if chunk:
        yield chunk


def _spread(act: Callable[[Chunk, Buffer], None], chunks: Iterator[Chunk], threads: int) -> None:
    """Let threads take one chunk after another; after an error none takes another one, and it is raised.

    Where there is one, it is the caller's.
    """
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

    if threads == 1:
        return work()
    with ThreadPoolExecutor(threads, "checkpoint") as pool:
        workers = [pool.submit(work) for _ in range(threads)]
    for worker in workers:
        worker.result()


def _put(chunk: Chunk, buffer: Buffer, plain: int, direct: int, seen: Seen, tell: Callable[[int, int], None]) -> None:
    start, stop = chunk[0].at, chunk[-1].end
    if plain == direct and len(chunk) == 1 and chunk[0].memory.device.type == "cpu":
        seen(chunk[0])
        _pwrite(plain, memoryview(chunk[0].memory.numpy()), start, plain)
        return tell(start, stop - start)
    base = start - start % PAGE  # the buffer's first byte belongs here, so both are aligned alike
    for piece in chunk:
        copy = buffer.tensor[piece.at - base : piece.end - base].copy_(piece.memory)
        if seen is not unseen:
            seen(replace(piece, memory=copy))
    first, last = -(-start // PAGE) * PAGE, stop // PAGE * PAGE
    if first >= last or plain == direct:
        _pwrite(plain, buffer.bytes[start - base : stop - base], start, plain)
        return tell(start, stop - start)
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


def _get(chunk: Chunk, buffer: Buffer, opened: int, path: Path, seen: Seen) -> None:
    start, stop = chunk[0].at, chunk[-1].end
    only = chunk[0].memory if len(chunk) == 1 else None
    if only is not None and only.device.type == "cpu":
        _pread(opened, memoryview(only.numpy()), start, path)
    else:
        _pread(opened, buffer.bytes[: stop - start], start, path)
        for piece in chunk:
            piece.memory.copy_(buffer.tensor[piece.at - start : piece.end - start])
    for piece in chunk:
        seen(piece)


def _pread(opened: int, into: memoryview, at: int, path: Path) -> None:
    while into:
        done = os.preadv(opened, [into], at)
        if not done:
            raise IncompleteError(
                f"{path} ends at byte {os.fstat(opened).st_size}, before its tensors do",
                "it was cut off after it was written",
                "copy it again from where it is whole, or remove it to go on from an older one",
            )
        into, at = into[done:], at + done


def _named(error: OSError, path: Path) -> OSError:
    """The error with the file in it, which reads and writes by descriptor do not know."""
    return error if error.filename else OSError(error.errno, error.strerror, str(path))
