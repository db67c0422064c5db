"""The same state by torch's distributed checkpoint (DCP), over gloo: each rank writes files of its own, DTensors tell
whose piece is whose, and a load under another mesh reads what it needs of all of them.

DCP is set as its own documentation has it: one file a rank, or as many as it has threads, synced to the disk; an
asynchronous save copies the state first, beside a GPU in memory that is kept for the next one (it pins that, which
fails without one).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hpctrain.bench.peer import process_group
from hpctrain.checkpoint.state import Held
from hpctrain.cluster.world import World
from hpctrain.plan.layout import Layout


class Dcp:
    """Saves and loads by DCP among the ranks of a process group; live. All ranks of it call all there is."""

    def __init__(self, process_group: dist.ProcessGroup, threads: int, later: bool) -> None:
        self.group, self.later = process_group, later
        self.threads = threads
        self._mesh = DeviceMesh.from_group(process_group, "cpu")
        self._writer: dcp.FileSystemWriter | None = None

    def save(self, folder: Path, state: Mapping[str, Held]) -> Callable[[], Any]:
        """Begin a save into a new folder; what is given waits for its end, where it is not there yet."""
        self._writer = self._writer or dcp.FileSystemWriter(
            folder, thread_count=self.threads, cache_staged_state_dict=self.later and torch.accelerator.is_available()
        )
        self._writer.reset(folder)
        if not self.later:
            dcp.save(self._tensors(state), storage_writer=self._writer, process_group=self.group)
            return lambda: None
        future: Any = dcp.async_save(self._tensors(state), storage_writer=self._writer, process_group=self.group)
        return future.result

    def load(self, folder: Path, state: Mapping[str, Held]) -> None:
        """Fill the tensors of ``state`` in place."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch of torch
            reader = dcp.FileSystemReader(folder)
            dcp.load(self._tensors(state), storage_reader=reader, process_group=self.group)

    def _tensors(self, state: Mapping[str, Held]) -> dict[str, DTensor]:
        return {name: self._tensor(held.layout, held.tensor) for name, held in state.items()}

    def _tensor(self, layout: Layout, own: Tensor) -> DTensor:
        """The piece that we hold as DTensor's, in the same memory."""
        (cut,) = layout.cuts
        shape = torch.Size(layout.shape)
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(own, self._mesh, [Shard(cut.dim)], run_check=False, shape=shape, stride=stride)


def processes(world: World, count: int) -> dist.ProcessGroup:
    """The process group, over gloo, of the first ``count`` ranks. Collective over all ranks."""
    whole = process_group(world, "gloo")
    return whole if count == world.size else dist.new_group(range(count), backend="gloo")
