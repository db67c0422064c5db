"""Choice: what a new run takes from another run's checkpoint, and under which names it is there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.state import Entry
from hpctrain.errors import CheckpointError, ConfigError

FLOATS = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True)
class Choice:
    """``only``: shell patterns of names here. ``rename``: name in the file to name here, ``*`` being any text."""

    only: tuple[str, ...] = ("model/*",)
    rename: Mapping[str, str] | None = None

    def pair(self, path: Path, index: Index, entries: Sequence[Entry]) -> list[tuple[Entry, Slot]]:
        """Each tensor that is taken, with its place in the file.

        Raises CheckpointError that lists every one that the file lacks, has too much, or has in another shape;
        ConfigError for a pattern that fits nothing.
        """
        slots = self._named(path, index)
        _all_fit("only", self.only, [entry.name for entry in entries], "names no tensor of this run")
        taken = [entry for entry in entries if self._takes(entry.name)]
        faults = [fault for entry in taken if (fault := _fault(entry, slots.get(entry.name)))]
        known = {entry.name for entry in taken}
        faults += [f"{name}: in the file alone" for name in sorted(slots) if self._takes(name) and name not in known]
        if faults:
            raise CheckpointError(
                f"{path} does not fit this run: {len(faults)} tensors to take from it differ",
                "\n  ".join(faults),
                "take fewer (checkpoint.only), give their names there (checkpoint.rename), or choose the model's shape",
            )
        return [(entry, slots[entry.name]) for entry in taken]

    def _takes(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.only)

    def _named(self, path: Path, index: Index) -> dict[str, Slot]:
        """The file's tensors under this run's names."""
        rename = self.rename or {}
        _all_fit("rename", list(rename), [slot.name for slot in index.slots], f"names no tensor of {path}")
        slots: dict[str, Slot] = {}
        for slot in index.slots:
            name = renamed(slot.name, rename)
            if name in slots:
                raise ConfigError(
                    f"checkpoint.rename makes two tensors {name}", f"{slots[name].name} and {slot.name} of {path}"
                )
            slots[name] = slot
        return slots


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The name by the first pattern that fits it; what its ``*`` stands for goes where the new name has one."""
    for pattern, new in rename.items():
        head, star, tail = pattern.partition("*")
        if not star and name == pattern:
            return new
        if star and len(name) >= len(head + tail) and name.startswith(head) and name.endswith(tail):
            return new.replace("*", name[len(head) : len(name) - len(tail)], 1)
    return name


def _fault(entry: Entry, slot: Slot | None) -> str | None:
    wanted = f"{entry.layout.dtype} {list(entry.layout.shape)}"
    if slot is None:
        return f"{entry.name}: not in the file, this run wants {wanted}"
    convertible = slot.dtype == entry.layout.dtype or {slot.dtype, entry.layout.dtype} <= set(FLOATS)
    if slot.shape == entry.layout.shape and convertible:
        return None
    return f"{entry.name}: {slot.dtype} {list(slot.shape)} in the file, this run wants {wanted}"


def _all_fit(key: str, patterns: Sequence[str], names: Sequence[str], why: str) -> None:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"checkpoint.{key}: {pattern!r} {why}", "a misspelt name would be passed over in silence",
                "hpctrain ckpt inspect shows the names in a file",
            )  # fmt: skip
