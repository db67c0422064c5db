"""Choice: what a new run takes from another run's checkpoint, and under which names it is there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.state import Entry
from hpctrain.errors import CheckpointError, UsageError

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Choice:
    """``only``: shell patterns of names here. ``rename``: name in the file to name here, ``*`` being any text."""

    only: tuple[str, ...] = ("model/*",)
    rename: Mapping[str, str] | None = None

    def pair(self, path: Path, index: Index, entries: Sequence[Entry]) -> list[tuple[Entry, Slot]]:
        """Each tensor that is taken, with its place in the file.

        Raises CheckpointError that lists every one that the file lacks, has too much, or has in another shape;
        UsageError for a pattern that fits nothing.
        """
        slots = named(path, index, self.rename or {}, "checkpoint.rename")
        all_fit("checkpoint.only", self.only, [entry.name for entry in entries], "this run")
        taken = [entry for entry in entries if takes(self.only, entry.name)]
        faults = [fault for entry in taken if (fault := _fault(entry, slots.get(entry.name)))]
        known = {entry.name for entry in taken}
        there = sorted(name for name in slots if takes(self.only, name))
        faults += [f"{name}: in the file alone" for name in there if name not in known]
        if faults:
            raise CheckpointError(
                f"{path} does not fit this run: {len(faults)} tensors to take from it differ",
                "\n  ".join(faults),
                "take fewer (checkpoint.only), give their names there (checkpoint.rename), or choose the model's shape",
            )
        return [(entry, slots[entry.name]) for entry in taken]


def takes(only: Sequence[str], name: str) -> bool:
    """Whether one of the patterns fits the name."""
    return any(fnmatchcase(name, pattern) for pattern in only)


def named(path: Path, index: Index, rename: Mapping[str, str], key: str) -> dict[str, Slot]:
    """The file's tensors under their new names.

    Raises UsageError, with ``key`` where ``rename`` was given, for a pattern that fits nothing, and for one new name of
    two tensors.
    """
    all_fit(key, list(rename), [slot.name for slot in index.slots], str(path), _has)
    slots: dict[str, Slot] = {}
    for slot in index.slots:
        name = renamed(slot.name, rename)
        if name in slots:
            raise UsageError(f"{key} makes two tensors {name}", f"{slots[name].name} and {slot.name} of {path}")
        slots[name] = slot
    return slots


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The name by the first pattern that fits it; what its ``*`` stands for goes where the new name has one."""
    for pattern, new in rename.items():
        if _has(name, pattern):
            head, star, tail = pattern.partition("*")
            return new.replace("*", name[len(head) : len(name) - len(tail)], 1) if star else new
    return name


def _has(name: str, pattern: str) -> bool:
    """Whether the name fits a pattern of at most one star: what two stand for could not be told apart."""
    head, star, tail = pattern.partition("*")
    if not star:
        return name == pattern
    return len(name) >= len(head + tail) and name.startswith(head) and name.endswith(tail)


def _fault(entry: Entry, slot: Slot | None) -> str | None:
    wanted = f"{entry.layout.dtype} {list(entry.layout.shape)}"
    if slot is None:
        return f"{entry.name}: not in the file, this run wants {wanted}"
    convertible = slot.dtype == entry.layout.dtype or {slot.dtype, entry.layout.dtype} <= set(FLOATS)
    if slot.shape == entry.layout.shape and convertible:
        return None
    return f"{entry.name}: {slot.dtype} {list(slot.shape)} in the file, this run wants {wanted}"


def all_fit(
    key: str,
    patterns: Sequence[str],
    names: Sequence[str],
    where: str,
    fits: Callable[[str, str], bool] = fnmatchcase,
) -> None:
    """Raise UsageError for a pattern, given by ``key``, that fits none of the names ``where`` they are."""
    for pattern in patterns:
        if not any(fits(name, pattern) for name in names):
            raise UsageError(
                f"{key}: {pattern!r} names no tensor of {where}", "a misspelt name would be passed over in silence",
                "hpctrain ckpt inspect shows the names in a file",
            )  # fmt: skip
