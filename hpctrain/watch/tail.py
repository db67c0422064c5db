"""Tail: the last lines of a file, and what is written to it from then on, as bytes: a letter may be half written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

BLOCK_BYTES = 1 << 16


def last_lines(path: Path, count: int) -> tuple[bytes, int]:
    """The last ``count`` lines of a file, and how many bytes of it were read; a line that has no end yet counts too."""
    with path.open("rb") as file:
        size = at = file.seek(0, 2)
        kept = b""
        while at and kept.count(b"\n", 0, -1) < count:
            step = min(BLOCK_BYTES, at)
            at -= step
            file.seek(at)
            kept = file.read(step) + kept
    lines = kept.splitlines(keepends=True)
    return b"".join(lines[len(lines) - count :] if count < len(lines) else lines), size


def followed(path: Path, count: int, over: Callable[[], bool], seconds: float) -> Iterator[bytes]:
    """The last lines of a file, then what is added to it, looked at every so many ``seconds``, until it is ``over``.

    What was written before the end is given, all of it. A file that was begun anew is given from its beginning.
    """
    text, at = last_lines(path, count)
    yield text
    while True:
        ends = over()  # asked before the last look, so that nothing is missed
        with path.open("rb") as file:
            if file.seek(0, 2) < at:
                at = 0
            file.seek(at)
            while block := file.read(BLOCK_BYTES):
                at += len(block)
                yield block
        if ends:
            return
        time.sleep(seconds)
