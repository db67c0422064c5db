"""Blocks: the pieces of a tensor's bytes that have a checksum each, whoever wrote them and whoever reads them.

A block is BLOCK_BYTES of one tensor, counted from the tensor's first byte; its last block is shorter. So blocks depend
on no mesh, and a reader of any box checks what it reads by reading less than a block more at each end of a run.
The digest is XXH3-64 with seed 0 (github.com/Cyan4973/xxHash): it finds damage, and is no proof against malice.
"""

from __future__ import annotations

from collections.abc import Iterable

import xxhash

ALGORITHM = "xxh3_64"
BLOCK_BYTES = 1 << 18


def count(nbytes: int) -> int:
    """How many blocks a tensor of so many bytes has."""
    return -(-nbytes // BLOCK_BYTES)


def digest(data: bytes | memoryview) -> int:
    """The checksum of one block."""
    return xxhash.xxh3_64_intdigest(data)


def digest_of_all(parts: Iterable[bytes]) -> int:
    """The checksum of parts that lie one after another."""
    whole = xxhash.xxh3_64()
    for part in parts:
        whole.update(part)
    return whole.intdigest()


def digests(data: bytes | memoryview) -> list[int]:
    """The checksums of the blocks that lie one after another in ``data``, which begins with a block."""
    return [digest(data[start : start + BLOCK_BYTES]) for start in range(0, len(data), BLOCK_BYTES)]


class Digests:
    """The checksums of a tensor whose bytes come by in order, in pieces of any length: it holds what is left over."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._open, self._length = xxhash.xxh3_64(), 0

    def add(self, data: memoryview) -> None:
        """Count the tensor's next bytes in."""
        while len(data):
            part, data = data[: BLOCK_BYTES - self._length], data[BLOCK_BYTES - self._length :]
            self._open.update(part)
            self._length += len(part)
            if self._length == BLOCK_BYTES:
                self._close()

    def end(self) -> list[int]:
        """The checksums, once every byte was counted in."""
        if self._length:
            self._close()
        return self._done

    def _close(self) -> None:
        self._done.append(self._open.intdigest())
        self._open, self._length = xxhash.xxh3_64(), 0
