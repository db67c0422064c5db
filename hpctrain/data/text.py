"""Text: documents out of text files and JSONL, by their place.

All files, end to end, are one long row of bytes; a document belongs to the range of bytes that holds its first one. So
any cut of the row into ranges gives each document once, in the same order: ranks need not know of each other.
"""

from __future__ import annotations

import json
import os
import sysconfig
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path

from hpctrain.errors import DataError

# Never entered below a folder that is read: what is installed or generated there is not its text.
LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages"})


@dataclass(frozen=True)
class File:
    """A file and its place in the row of all files."""

    path: str
    start: int
    size: int

    @property
    def stop(self) -> int:
        return self.start + self.size


Document = str | DataError


def expand(name: str) -> str:
    """A source's name with ``{stdlib}`` filled in: the folder of the Python standard library."""
    return name.replace("{stdlib}", sysconfig.get_path("stdlib"))


def find(sources: Sequence[str], pattern: str) -> tuple[File, ...]:
    """The files that ``sources`` name: a file itself, or those of a folder and below whose name fits ``pattern``.

    Sources stay in their order, and the files of a folder are sorted by path.
    """
    paths = [path for source in sources for path in _paths(Path(expand(source)), pattern)]
    sizes = [os.stat(path).st_size for path in paths]
    starts = accumulate(sizes, initial=0)
    return tuple(File(path, start, size) for path, start, size in zip(paths, starts, sizes, strict=False))


def documents(files: Sequence[File], start: int, stop: int, key: str = "text") -> Iterator[Document]:
    """The documents whose first byte lies from ``start`` up to ``stop``; one that cannot be read is its DataError.

    A text file is one document. In JSONL (``.jsonl``, ``.ndjson``) each line is an object with its text under ``key``.
    """
    # The file before the first that begins here may reach into the range.
    first = max(0, bisect_left(files, start, key=lambda file: file.start) - 1)
    for file in files[first:]:
        if file.start >= stop:
            return
        read = READERS.get(Path(file.path).suffix, _text)
        yield from read(file, start - file.start, stop - file.start, key)


def _paths(source: Path, pattern: str) -> list[str]:
    if source.is_file():
        return [str(source)]
    if not source.is_dir():
        raise DataError(f"{source} is neither a file nor a folder", "", "give text files, folders or JSONL")
    found = sorted(_walk(source, pattern), key=lambda path: path.relative_to(source).parts)
    if not found:
        mend = "give another pattern (--pattern, data.pattern), such as '*.py'"
        raise DataError(f"no file in {source} is called {pattern}", "folders are searched to their depth", mend)
    return [str(path) for path in found]


def _walk(folder: Path, pattern: str) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if fnmatch(name, pattern) and path.is_file():
                yield path


def _text(file: File, start: int, stop: int, key: str) -> Iterator[Document]:
    if start <= 0:
        yield _decoded(Path(file.path).read_bytes(), file.path)


def _lines(file: File, start: int, stop: int, key: str) -> Iterator[Document]:
    with open(file.path, "rb") as lines:
        if start > 0:
            # From one byte before: a line that begins just at the start is ours.
            lines.seek(start - 1)
            lines.readline()
        at = lines.tell()
        while at < stop and (line := lines.readline()):
            if line.strip():
                yield _value(line, key, file.path, at)
            at += len(line)


READERS: dict[str, Callable[[File, int, int, str], Iterator[Document]]] = {".jsonl": _lines, ".ndjson": _lines}


def _decoded(raw: bytes, what: str) -> Document:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"{what} is not UTF-8 text: byte 0x{raw[error.start]:02x} at {error.start}"
        return DataError(wrong, error.reason, "bring it to UTF-8, or leave such documents out with --on-error skip")


def _value(line: bytes, key: str, path: str, at: int) -> Document:
    """The text under ``key`` of a line that begins at byte ``at``."""
    try:
        found = json.loads(line)
        text = found[key]
        text.encode()  # JSON can write half a character, "\\ud800", which is no text
        return text
    except (KeyError, TypeError, AttributeError):
        why = f"it has no text under {key!r}"
    except (ValueError, RecursionError) as error:
        why = f"it is not JSON in UTF-8: {error}"
    mend = "name the key with --json-key, mend the line, or leave such documents out with --on-error skip"
    return DataError(f"{path}, line {_line_number(path, at)} cannot be used", why, mend)


def _line_number(path: str, at: int) -> int:
    """Counted only when it is asked for, since ranks begin in the middle of a file."""
    lines = 1
    with open(path, "rb") as file:
        while at > 0 and (chunk := file.read(min(at, 1 << 20))):
            lines += chunk.count(b"\n")
            at -= len(chunk)
    return lines
