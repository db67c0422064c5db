"""Safetensors: where the tensors of a file lie, read and laid out without their numbers.

A file is 8 bytes, the length of what follows (little-endian), JSON with each tensor's dtype, shape and place, and then
the tensors' bytes, row-major, with no gap. A model of several files has an index that names the file of each tensor.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpctrain.checkpoint.format import Slot
from hpctrain.errors import CheckpointError, IncompleteError

ONE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LENGTH_BYTES = 8
HEADER_LIMIT = 100 << 20  # bytes, as in the library of that name: what is longer is no header
AGAIN = "copy it again from where it is whole"


def lay_out(path: Path, slots: Iterable[Slot]) -> dict[str, Slot]:
    """Make a file with room for tensors in this order, and give each with its offset; its bytes are holes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers refuses a file without it
    names, placed, at = {ours: theirs for theirs, ours in DTYPES.items()}, [], 0
    for slot in slots:
        place = {"data_offsets": [at, at + slot.nbytes]}
        header[slot.name] = {"dtype": names[slot.dtype], "shape": slot.shape} | place
        placed.append(replace(slot, offset=at))
        at += slot.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # tensors then begin where any of their elements may
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(LENGTH_BYTES, "little") + text)
        file.truncate(file.tell() + at)
    return {slot.name: replace(slot, offset=slot.offset + LENGTH_BYTES + len(text)) for slot in placed}


def read(path: Path) -> dict[str, Slot]:
    """The tensors of a file, by name. Raises IncompleteError for one that was cut off, CheckpointError for others."""
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        if length > min(HEADER_LIMIT, size - LENGTH_BYTES):
            raise IncompleteError(f"{path} is no whole safetensors file", f"{size} bytes are less than it says", AGAIN)
        text = file.read(length)
    try:
        told = json.loads(text)
        found = {name: _slot(path, name, told[name], LENGTH_BYTES + length) for name in told if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file", f"its header: {error!r}", AGAIN) from None
    for slot in found.values():
        if slot.offset + slot.nbytes > size:
            raise IncompleteError(f"{path} is incomplete", f"{slot.name} goes beyond its {size} bytes", AGAIN)
    return found


def read_folder(folder: Path) -> dict[str, tuple[str, Slot]]:
    """The file and the place of each tensor of a model saved in a folder, in one file or in several with an index."""
    files = _files(folder)
    found = {}
    for name, wanted in files.items():
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name} is not there", f"{INDEX} names it for {len(wanted)} tensors", AGAIN)
        slots = read(folder / name)
        lost = [tensor for tensor in wanted if tensor not in slots]
        if lost:
            raise CheckpointError(f"{folder / name} has no {lost[0]}", f"{INDEX} says that it is there", AGAIN)
        found |= {tensor: (name, slots[tensor]) for tensor in wanted or slots}
    return found


def index_text(files: Mapping[str, str], total_bytes: int) -> str:
    """The index of a model in several files: ``files`` is tensor -> file."""
    return json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": files}, indent=2) + "\n"


def _files(folder: Path) -> dict[str, list[str]]:
    """The names of the files, and which tensors the index wants of each; none where there is no index."""
    if (folder / INDEX).is_file():
        try:
            told = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
            files: dict[str, list[str]] = {}
            for tensor, name in sorted(told.items()):
                files.setdefault(Path(name).name, []).append(tensor)  # its own folder alone is read
            return files
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of tensors", repr(error), AGAIN) from None
    if (folder / ONE_FILE).is_file():
        return {ONE_FILE: []}
    pickled = any(folder.glob("*.bin"))
    raise CheckpointError(
        f"{folder} has neither {ONE_FILE} nor {INDEX}",
        "its *.bin files are pickles, which may run any code when they are read" if pickled else "nothing to import",
        "load it with transformers and save_pretrained it, which writes safetensors" if pickled else "",
    )


def _slot(path: Path, name: str, told: Mapping[str, Any], base: int) -> Slot:
    if told["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: {name} is of dtype {told['dtype']}",
            "weights of a model are floats of 16 bits and more",
            "take a copy of the model that is not quantised",
        )
    start, stop = told["data_offsets"]
    slot = Slot(name, tuple(told["shape"]), DTYPES[told["dtype"]], base + start)
    if slot.nbytes != stop - start:
        raise CheckpointError(f"{path}: {name} has {stop - start} bytes for {list(slot.shape)}", "", AGAIN)
    return slot
