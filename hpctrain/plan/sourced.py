"""Sourced: what stands beside the values of a TOML file, the tags of their sources and a word about them.

    memory_gib = 64  # [olcf] of a module's 128

says that ``memory_gib`` is 64, where that is written (``olcf``; what it means is said under ``[sources]``), and how the
figure was come by. A comment may have several tags, or none.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

UNCHECKED = "unchecked"
"""The tag of what somebody remembers, and found nowhere."""

TAGS = re.compile(r"\s*\[([a-z0-9-]+)\]")
HEADER = re.compile(r"(\[\[?)([\w.-]+)\]\]?\s*(#.*)?$")
BEGINS = re.compile(r"([\w.-]+)\s*=\s*\[\s*(#.*)?$")


@dataclass(frozen=True)
class Value:
    """A value of a file, with what stands beside it."""

    key: str
    """Dotted, such as ``links[0].gb_per_second``."""
    value: Any
    tags: tuple[str, ...] = ()
    """Its sources."""
    word: str = ""
    """What else the comment says."""

    @property
    def unchecked(self) -> bool:
        """Whether its source is somebody's memory."""
        return UNCHECKED in self.tags


def values(text: str) -> tuple[Value, ...]:
    """The values of a TOML file in its order: one for each line that holds one.

    Comments are found where a line holds one value, which may be an item of a list that is written over several lines.
    """
    beside = dict(_comments(text))
    return tuple(Value(key, value, *_parted(beside.get(key, ""))) for key, value in _walk(tomllib.loads(text), beside))


def _parted(comment: str) -> tuple[tuple[str, ...], str]:
    """The tags that a comment begins with, and the rest of it."""
    tags: list[str] = []
    while found := TAGS.match(comment):
        tags.append(found[1])
        comment = comment[found.end() :]
    return tuple(tags), comment.strip()


def _walk(value: Any, beside: dict[str, str], key: str = "") -> Iterator[tuple[str, Any]]:
    """The values that have a comment, and those that hold none that has."""
    parts = {} if key in beside else _parts(value, key, beside)
    if not parts:
        yield key, value
    for name, part in parts.items():
        yield from _walk(part, beside, name)


def _parts(value: Any, key: str, beside: dict[str, str]) -> dict[str, Any]:
    """What a table has, by its keys, and a list of tables, or of lines with comments."""
    if isinstance(value, dict):
        return {f"{key}.{name}".removeprefix("."): part for name, part in value.items()}
    if not isinstance(value, list):
        return {}
    parts = {f"{key}[{index}]": part for index, part in enumerate(value)}
    return parts if any(name in beside or isinstance(part, dict) for name, part in parts.items()) else {}


def _comments(text: str) -> Iterator[tuple[str, str]]:
    """The comment beside each value that has one, by the value's key."""
    prefix, listed, counts = "", "", Counter[str]()
    for line in map(str.strip, text.splitlines()):
        key = ""
        if line.startswith("]"):
            listed = ""
        elif header := HEADER.match(line):
            name = header[2] if header[1] == "[" else f"{header[2]}[{counts[header[2]]}]"
            prefix = f"{name}."
            counts[header[2]] += 1
        elif begins := BEGINS.match(line):
            listed = prefix + begins[1]
        elif listed and line and not line.startswith("#"):
            key, line = f"{listed}[{counts[listed]}]", f"={line}"
            counts[listed] += 1
        else:
            key = prefix + line.partition("=")[0].strip()
        if comment := _comment(line.partition("=")[2]):
            yield key, comment


def _comment(text: str) -> str:
    """What stands after a value's number sign; text in quotes may have such signs too."""
    for sign in re.finditer("#", text):
        try:
            tomllib.loads("value = " + text[: sign.start()].rstrip().removesuffix(","))
        except tomllib.TOMLDecodeError:
            continue
        return text[sign.end() :].strip()
    return ""
