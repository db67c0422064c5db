"""Folders of torch's DCP, written and read by torch itself in one process."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from hpctrain.plan.layout import Box, piece


def save(folder: Path, state: Mapping[str, Any], writer: dcp.FileSystemWriter | None = None, **how: Any) -> None:
    """Save a state as torch's users do, without ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what is wanted
        dcp.save(dict(state), storage_writer=writer or dcp.FileSystemWriter(folder), no_dist=True, **how)


def load(folder: Path, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fill a state by torch's own reader."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


class Shards(DefaultSavePlanner):
    """Saves each tensor in pieces along some dims, as ranks that share it would."""

    def __init__(self, dims: Sequence[int], pieces: int) -> None:
        super().__init__(flatten_state_dict=False)
        self.dims, self.pieces = dims, pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, one in self.state_dict.items() for item in self._items(name, one)])
        return self.plan

    def _items(self, name: str, whole: Tensor) -> Iterator[WriteItem]:
        for box in boxes(tuple(whole.shape), self.dims, self.pieces):
            chunk = ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
            data = TensorWriteData(chunk, TensorProperties(dtype=whole.dtype), whole.shape)
            yield WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, item: WriteItem) -> Tensor:
        chunk = item.tensor_data.chunk
        return self.state_dict[item.index.fqn][Box(tuple(chunk.offsets), tuple(chunk.sizes)).slices]


def boxes(shape: tuple[int, ...], dims: Sequence[int], pieces: int) -> Iterator[Box]:
    """A tensor of ``shape`` in pieces along those of ``dims`` that it has."""
    cuts = [
        [piece(length, pieces, one) for one in range(pieces)] if dim in dims else [(0, length)]
        for dim, length in enumerate(shape)
    ]
    for bounds in product(*cuts):
        box = Box(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))
        if box.size or not shape:
            yield box


def as_shards(folder: Path, state: Mapping[str, Tensor], dims: Sequence[int], pieces: int = 2) -> None:
    """Save a state with every tensor in pieces, over two files."""
    save(folder, state, dcp.FileSystemWriter(folder, thread_count=2), planner=Shards(dims, pieces))
