"""Adopt: the tensors of a torch DCP folder as a checkpoint, in the shapes and by the names that they have there.

What they are to a model is not asked: a run that starts from the checkpoint (``checkpoint.start_from``) finds out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpctrain.checkpoint import dcp, sources
from hpctrain.checkpoint.choice import FLOATS
from hpctrain.checkpoint.convert import write_anew
from hpctrain.checkpoint.dcp import Stored
from hpctrain.checkpoint.format import TYPES, Slot
from hpctrain.checkpoint.hub import CONFIG
from hpctrain.checkpoint.parts import Part, Tell, quiet
from hpctrain.checkpoint.state import WEIGHTS
from hpctrain.checkpoint.together import led
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError


def alone(folder: Path, group: Group) -> bool:
    """Whether a folder is one of DCP with no ``config.json`` that says what its tensors are. Collective."""
    return led(group, lambda: dcp.is_folder(folder) and not (folder / CONFIG).is_file(), f"looking at {folder}")


def adopt(
    folder: Path,
    out: Path,
    group: Group,
    only: Iterable[str] = ("*",),
    rename: Mapping[str, str] | None = None,
    dtype: str | None = None,
    tell: Tell = quiet,
) -> dict[str, Any]:
    """Write tensors of a DCP folder as ``model/NAME`` of a checkpoint of step 0; gives what was made.

    ``only`` and ``rename`` as in ``sources.opened``. Floats become ``dtype`` where it is given. Collective: ranks share
    the reading and the writing in parts of at most 64 MiB. Raises CheckpointError, on all ranks, for a folder that
    cannot be read, and where ``out`` is there already; nothing is left then.
    """
    told = led(group, lambda: sources.look(folder), f"looking at {folder}")
    found = sources.opened(folder, told, only, rename)
    slots = [_target(name, one.slot, dtype) for name, one in found.items()]
    named = {slot.name: one for slot, one in zip(slots, found.values(), strict=True)}
    imported = {"from": str(folder), "names": {slot.name: named[slot.name].slot.name for slot in slots}}
    made = write_anew(out, slots, 0, {"imported": imported}, lambda parts: _fetch(named, parts), group, tell)
    return asdict(made) | {"from": str(folder), "to": str(out), "left_out": told["others"]}


def _target(name: str, slot: Slot, dtype: str | None) -> Slot:
    if slot.dtype not in TYPES:
        raise CheckpointError(
            f"{slot.name} is of dtype {slot.dtype}",
            f"a checkpoint has tensors of {', '.join(TYPES)}",
            "leave it out with --only, which names what is to be taken",
        )
    return replace(slot, name=WEIGHTS + name, dtype=dtype if dtype and slot.dtype in FLOATS else slot.dtype)


def _fetch(named: Mapping[str, Stored], parts: Sequence[Part]) -> list[Tensor]:
    found = []
    for part in parts:
        stored = named[part.slot.name]
        found.append(torch.empty(part.numel, dtype=getattr(torch, stored.slot.dtype)))
        stored.fill(part.start, found[-1])
    return found
