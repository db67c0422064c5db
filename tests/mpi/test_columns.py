"""Tensors that are cut by columns: real ranks exchange them, through common memory or by messages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
from mpi4py import MPI

from hpctrain.checkpoint import shares
from hpctrain.checkpoint.blocks import BLOCK_BYTES
from hpctrain.checkpoint.checkpoint import Checkpoint
from hpctrain.checkpoint.state import State
from hpctrain.comm.mpi import MpiGroup
from hpctrain.config import CheckpointConfig
from hpctrain.plan.layout import Cut, Layout
from hpctrain.plan.mesh import Mesh
from tests.support import states
from tests.support.saving import SAVES

pytestmark = pytest.mark.mpi(min_size=4)

Way = Callable[[Checkpoint, int, State], Any]
LAYOUTS = {
    "model/columns": Layout((3000, 301), "float32", (Cut(1, ("dp",)),)),
    "model/deep": Layout((50, 30, 701), "bfloat16", (Cut(2, ("dp",)),)),
    "model/rows": Layout((1000, 299), "float32", (Cut(0, ("dp",)),)),
}


@pytest.mark.parametrize("nodes", [1, 2, 4])
@pytest.mark.parametrize("way", SAVES.values(), ids=SAVES)
def test_columns_cross_between_ranks_of_any_nodes_in_rounds(
    comm: MPI.Comm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Way, nodes: int
):
    monkeypatch.setattr(shares, "ROUND_BYTES", (BLOCK_BYTES, BLOCK_BYTES))
    four = comm.Split(comm.rank // 4, comm.rank)
    mesh, folder = Mesh((("dp", four.size),)), Path(four.bcast(str(tmp_path)))
    group = MpiGroup(four, node_key=str(four.rank * nodes // four.size))
    point = Checkpoint(CheckpointConfig(sync=False), folder, mesh, group)
    path = way(point, 1, states.filled(LAYOUTS, mesh, four.rank, 1))
    state = states.blank(LAYOUTS, mesh, four.rank)
    assert point.resume(state) == 1
    assert states.wrong(state, mesh, four.rank, 1) == []
    with h5py.File(path, locking=False) as file:
        columns = torch.from_numpy(file["model/columns"][...])
    assert states.bits(columns) == states.bits(states.whole(LAYOUTS["model/columns"], 1))
    group.close()
