"""Sharded tensors that ranks saved by torch's DCP come in, read by ranks over MPI, and what goes out torch loads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hpctrain.checkpoint import dcp_write
from hpctrain.checkpoint.adopt import adopt
from hpctrain.comm import backend
from hpctrain.comm.mpi import MpiGroup
from tests.support.runs import shared_folder
from tests.support.weights import model_of, read, saved

pytestmark = pytest.mark.mpi(min_size=4)
PLACES = {
    "rows": (Shard(0), Replicate()),
    "columns": (Shard(1), Replicate()),
    "both": (Shard(0), Shard(1)),
    "the same twice": (Shard(0), Shard(0)),
    "copies": (Replicate(), Replicate()),
}


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    backend.init(timeout_seconds=60)
    yield
    dist.destroy_process_group()


def tensors() -> dict[str, Tensor]:
    """The same on every rank; 13 and 7 divide over no ranks."""
    make = torch.Generator().manual_seed(3)
    made = {name: torch.randn(13, 7, generator=make) for name in PLACES}
    return made | {"bf16": torch.randn(13, 7, generator=make).bfloat16()}


def test_tensors_that_ranks_share_come_in_bit_for_bit(comm: MPI.Comm, world: None, tmp_path: Path) -> None:
    folder, group = shared_folder(comm, tmp_path), MpiGroup(comm)
    mesh = init_device_mesh("cpu", (2, comm.size // 2))
    places = PLACES | {"bf16": (Shard(0), Replicate())}
    state = {name: distribute_tensor(one, mesh, places[name]) for name, one in tensors().items()}
    dcp.save(state | {"alone": torch.tensor(4.0), "step": 3}, checkpoint_id=folder / "dcp")
    assert len(list((folder / "dcp").glob("*.distcp"))) > 1
    made = adopt(folder / "dcp", folder / "back.h5", group)
    found = read(folder / "back.h5")
    expected = {f"model/{name}": one for name, one in tensors().items()} | {"model/alone": torch.tensor(4.0)}
    assert found.keys() == expected.keys() and made["left_out"] == ["step"]
    assert all(torch.equal(found[name], one) and found[name].dtype == one.dtype for name, one in expected.items())
    group.close()


def test_torch_loads_on_ranks_what_other_ranks_wrote(comm: MPI.Comm, world: None, tmp_path: Path) -> None:
    folder, group = shared_folder(comm, tmp_path), MpiGroup(comm)
    if group.leads:
        saved(folder / "run", model_of())
    group.barrier()
    (source,) = (folder / "run").glob("*.h5")
    dcp_write.export(source, folder / "dcp", group)
    mesh = init_device_mesh("cpu", (comm.size,))
    expected = {name.removeprefix("model/"): one for name, one in read(source).items()}
    state = {name: distribute_tensor(torch.zeros_like(one), mesh, [Shard(0)]) for name, one in expected.items()}
    dcp.load(state, checkpoint_id=folder / "dcp")
    assert all(torch.equal(state[name].full_tensor(), one) for name, one in expected.items())
    group.close()
