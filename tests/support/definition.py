"""Definition files of Apptainer, read by the rules of its documentation (Definition Files, 1.2 and later)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

SECTIONS = {"arguments", "setup", "files", "post", "environment", "runscript", "startscript", "test", "labels", "help"}
VARIABLE = re.compile(r"{{\s*(\w+)\s*}}")


@dataclass(frozen=True)
class Copy:
    """A line of ``%files``: from the folder of the build, or from an earlier stage."""

    source: str
    target: str
    stage: str | None


@dataclass(frozen=True)
class Stage:
    """One part of a definition, from its ``Bootstrap:`` to the next one's."""

    header: Mapping[str, str]
    sections: tuple[tuple[str, str, str], ...]
    """Of each section its name, what stands behind the name, and its lines."""

    @property
    def name(self) -> str:
        return self.header.get("stage", "")

    def script(self, name: str) -> str:
        """The text of all sections of this name."""
        return "".join(lines for kind, _, lines in self.sections if kind == name)

    @cached_property
    def copies(self) -> tuple[Copy, ...]:
        return tuple(copy for kind, words, lines in self.sections if kind == "files" for copy in _copies(words, lines))

    @property
    def defaults(self) -> dict[str, str]:
        """What ``%arguments`` gives, unless the command line gives something else."""
        pairs = (line.split("=", 1) for line in _content(self.script("arguments")))
        return {name.strip(): value.strip() for name, value in pairs}

    @property
    def labels(self) -> dict[str, str]:
        pairs = (line.split(None, 1) for line in _content(self.script("labels")))
        return {name: value for name, value in pairs}


def read(text: str, arguments: Mapping[str, str] | None = None) -> list[Stage]:
    """The stages of a definition, with its variables filled in: by ``arguments``, else by each stage's own defaults.

    Raises ValueError where it is no definition, or where a variable has no value.
    """
    return [_stage(_filled(part, _stage(part).defaults, arguments or {})) for part in parts(text)]


def parts(text: str) -> list[str]:
    """The text of each stage, as it stands."""
    starts = [match.start() for match in re.finditer(r"^bootstrap:", text, re.MULTILINE | re.IGNORECASE)]
    if not starts or list(_content(text[: starts[0]])):
        raise ValueError("a definition begins with Bootstrap:")
    return [text[start:end] for start, end in zip(starts, [*starts[1:], None], strict=True)]


def variables(text: str) -> set[str]:
    """The variables that a text uses, outside of comments."""
    return {name for line in _content(text) for name in VARIABLE.findall(line)}


def _filled(text: str, defaults: Mapping[str, str], arguments: Mapping[str, str]) -> str:
    values = {**defaults, **arguments}

    def fill(line: str) -> str:
        return line if line.lstrip().startswith("#") else VARIABLE.sub(value, line)

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"{match[1]} has no value")
        return values[match[1]]

    return "".join(fill(line) for line in text.splitlines(keepends=True))


def _stage(text: str) -> Stage:
    head, *rest = re.split(r"^(?=[ \t]*%)", text, flags=re.MULTILINE)
    return Stage(dict(_pair(line) for line in _content(head)), tuple(_section(part) for part in rest))


def _pair(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise ValueError(f"the header has the line {line!r}")
    return name.strip().lower(), value.split("#")[0].strip()


def _section(text: str) -> tuple[str, str, str]:
    first, _, lines = text.partition("\n")
    name, _, words = first.strip().removeprefix("%").partition(" ")
    if name.lower() not in SECTIONS:
        raise ValueError(f"there is no section %{name}")
    return name.lower(), words.strip(), lines


def _copies(words: str, lines: str) -> list[Copy]:
    stage = words.removeprefix("from ").strip() if words.startswith("from ") else None
    pairs = (line.split() for line in _content(lines))
    return [Copy(pair[0], pair[-1], stage) for pair in pairs]


def _content(text: str) -> list[str]:
    """The lines that are neither empty nor comments."""
    return [line.strip() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
