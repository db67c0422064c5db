"""Sources: the tensors of a folder of weights, be it of safetensors or of torch DCP, by the names wanted here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hpctrain.checkpoint import dcp, safetensors
from hpctrain.checkpoint.carry import Place, Source
from hpctrain.checkpoint.choice import renamed
from hpctrain.checkpoint.format import Slot
from hpctrain.errors import UsageError

SHOWN = 10  # names that an error lists


def look(folder: Path) -> dict[str, Any]:
    """What is in a folder, for ``opened``, and ``others``: what is there beside tensors. The leading rank calls it."""
    if dcp.is_folder(folder):
        found, others = dcp.read_folder(folder)
        return {"kind": "dcp", "tensors": {name: one.to_json() for name, one in found.items()}, "others": others}
    slots = safetensors.read_folder(folder)
    tensors = {name: [file, asdict(slot)] for name, (file, slot) in slots.items()}
    return {"kind": "safetensors", "tensors": tensors, "others": []}


def opened(
    folder: Path, told: Mapping[str, Any], only: Iterable[str] = ("*",), rename: Mapping[str, str] | None = None
) -> dict[str, Source]:
    """The tensors whose names fit a pattern of ``only``, by what ``rename`` makes of their names.

    ``rename`` is name there to name here, ``*`` being any text, and is one to one. Raises UsageError for a pattern
    that fits nothing, and where two tensors get one name.
    """
    tensors, rename = told["tensors"], rename or {}
    taken = [name for name in tensors if any(fnmatchcase(name, pattern) for pattern in only)]
    _all_fit("only", only, tensors, folder)
    _all_fit("rename", rename, taken, folder)
    found: dict[str, str] = {}
    for name in taken:
        other = found.setdefault(renamed(name, rename), name)
        if other != name:
            raise UsageError(f"--rename makes {other} and {name} one tensor", "", "give each a name of its own")
    open_one = {"dcp": dcp.Stored.from_json, "safetensors": _place}[told["kind"]]
    return {name: open_one(folder, tensors[there]) for name, there in found.items()}


def _place(folder: Path, told: list[Any]) -> Place:
    file, slot = told
    return Place(folder / file, Slot(**slot | {"shape": tuple(slot["shape"])}))


def _all_fit(option: str, patterns: Iterable[str], names: Iterable[str], folder: Path) -> None:
    there = sorted(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in there):
            some = ", ".join(there[:SHOWN]) + ", ..." * (len(there) > SHOWN)
            raise UsageError(
                f"--{option} {pattern!r} fits no tensor of {folder}",
                f"there are {some}" if there else "it has none",
                "give a name there, or a shell pattern of names",
            )
