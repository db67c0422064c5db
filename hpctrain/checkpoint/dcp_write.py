"""DCP, written: a checkpoint's weights as a folder for ``torch.distributed.checkpoint.load``, by torch's own writer.

A tensor goes out in chunks of whole rows, each into a file of its own: so a rank has two or three chunks in memory,
whatever the size of a tensor, where torch would keep all that it writes into one file.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hpctrain.checkpoint import hub, inspect
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.choice import FLOATS
from hpctrain.checkpoint.format import Index, Slot
from hpctrain.checkpoint.parts import Part, Tell, quiet, read
from hpctrain.checkpoint.save import sync_file
from hpctrain.checkpoint.state import WEIGHTS
from hpctrain.checkpoint.together import led, together
from hpctrain.comm.group import Group
from hpctrain.errors import CheckpointError
from hpctrain.plan.hub import share
from hpctrain.plan.layout import ITEMSIZE, Box

CHUNK_BYTES = 256 << 20


def export(source: Path, out: Path, group: Group, dtype: str | None = None, tell: Tell = quiet) -> dict[str, Any]:
    """Write the weights of a checkpoint (a file, or the newest of a folder) as a DCP folder; gives what was made.

    The keys are the weights' names without ``model/``. ``out`` is new, or an empty folder. Floats keep their dtype
    where none is given. What is read is checked. Collective: all ranks raise CheckpointError (DamagedError where the
    checkpoint is damaged) where it cannot be done, and then nothing is left.
    """
    told = led(group, lambda: _look(source, out), f"looking at {source}")
    path, index, aside = Path(told["path"]), Index.from_json(told["index"]), Path(told["aside"])
    try:
        plans, metadata = _plans(index.slots, group.size, dtype)
        writer = FileSystemWriter(aside, single_file_per_rank=False)
        planner = Planner(path, index, sum(_nbytes(item) for item in plans[group.rank].items), tell)
        made = together(group, lambda: _write(writer, plans, group.rank, planner), f"writing {out}")
        results = [[_result(*one) for one in theirs] for theirs in group.collect(made)]
        led(group, lambda: _publish(writer, metadata, results, aside, out), f"publishing {out}")
    except BaseException:
        if group.leads:  # without talking: after an error others may not answer
            shutil.rmtree(aside, ignore_errors=True)
        raise
    return _report(path, out, index, [item for plan in plans for item in plan.items])


class Planner(DefaultSavePlanner):
    """Gives torch's writer each chunk when it asks for it. It has a state: how many bytes it gave."""

    def __init__(self, path: Path, index: Index, total: int, tell: Tell) -> None:
        super().__init__()
        self.path, self.table, self.total, self.tell, self.done = path, index.table, total, tell, 0
        self.slots = {slot.name.removeprefix(WEIGHTS): slot for slot in index.slots}

    def resolve_data(self, item: WriteItem) -> Tensor:
        """The chunk's elements, checked as they are read."""
        slot, data = self.slots[item.index.fqn], item.tensor_data
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        start = next((offset for offset, _ in box.runs(slot.shape)), 0)
        every = BLOCK_BYTES // ITEMSIZE[slot.dtype]
        first, last = start // every * every, min(-(-(start + box.size) // every) * every, prod(slot.shape))
        (memory,) = read(self.path, [Part(slot, first, last)], self.table)
        self.done += _nbytes(item)
        self.tell(self.done, self.total)
        return memory[start - first :][: box.size].view(box.shape).to(data.properties.dtype)


def _report(path: Path, out: Path, index: Index, items: Sequence[WriteItem]) -> dict[str, Any]:
    made = {"from": str(path), "to": str(out), "step": index.step, "tensors": len(index.slots)}
    return made | {"bytes": sum(map(_nbytes, items)), "files": len(items)}


def _plans(slots: Sequence[Slot], ranks: int, dtype: str | None) -> tuple[list[SavePlan], Any]:
    """What each rank writes, and torch's metadata of it all."""
    items = [item for slot in slots for item in _items(slot, dtype)]
    own = [share([_nbytes(item) for item in items], ranks, rank) for rank in range(ranks)]
    return create_default_global_save_plan([SavePlan([items[number] for number in numbers]) for numbers in own])


def _items(slot: Slot, dtype: str | None) -> Iterator[WriteItem]:
    """The chunks of a tensor, each of whole rows."""
    name, kind = slot.name.removeprefix(WEIGHTS), dtype if dtype and slot.dtype in FLOATS else slot.dtype
    properties = TensorProperties(dtype=getattr(torch, kind))
    for box in _boxes(replace(slot, dtype=kind)):
        chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
        data = TensorWriteData(chunk, properties, torch.Size(slot.shape))
        yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def _boxes(slot: Slot) -> Iterator[Box]:
    if not slot.shape or not slot.nbytes:
        yield Box((0,) * len(slot.shape), slot.shape)
        return
    rows, rest = slot.shape[0], slot.shape[1:]
    step = max(1, CHUNK_BYTES * rows // slot.nbytes)
    for row in range(0, rows, step):
        yield Box((row, *(0 for _ in rest)), (min(step, rows - row), *rest))


def _nbytes(item: WriteItem) -> int:
    data = item.tensor_data
    return prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _write(writer: FileSystemWriter, plans: list[SavePlan], rank: int, planner: Planner) -> list[list[Any]]:
    """Write a rank's chunks; gives where each is, as plain values that can travel."""
    results = writer.write_data(writer.prepare_global_plan(plans)[rank], planner).wait()
    return [
        [one.index.fqn, list(one.index.offset), one.index.index, one.size_in_bytes, asdict(one.storage_data)]
        for one in results
    ]


def _result(name: str, offset: list[int], index: int, size: int, place: dict[str, Any]) -> WriteResult:
    return WriteResult(MetadataIndex(name, offset, index), size, _StorageInfo(**place))


# ---- what the leading rank does alone --------------------------------------------------------------------------------


def _look(source: Path, out: Path) -> dict[str, Any]:
    hub.check_new(out)
    path, index = inspect.find(source)
    slots = tuple(slot for slot in index.slots if slot.name.startswith(WEIGHTS))
    if not slots:
        raise CheckpointError(f"{path} has no weights", f"none of its tensors is named {WEIGHTS}...", "name another")
    aside = hub.place_aside(out)
    aside.mkdir()
    return {"path": str(path), "index": replace(index, slots=slots, attributes={}).to_json(), "aside": str(aside)}


def _publish(writer: FileSystemWriter, metadata: Any, results: list[Any], aside: Path, out: Path) -> None:
    writer.finish(metadata, results)
    sync_file(aside)
    os.replace(aside, out)  # onto nothing, or an empty folder: one that was filled meanwhile is refused
    sync_file(Path(os.path.abspath(out)).parent)
