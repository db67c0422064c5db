"""TorchGroup over NCCL keeps the contract of a group, and splits groups off a group.

    python -m pytest --with-mpi tests/gpu                          one GPU: groups of one
    mpirun -n 4 python -m pytest --only-mpi tests/gpu              a GPU for each of 4 ranks
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.comm.torch import TorchGroup, open_torch_group
from tests.contract.group import GroupContract

GPUS = torch.cuda.device_count() if dist.is_nccl_available() else 0


def _lack(comm) -> str:
    """Why NCCL cannot be tried here, as all ranks see it; empty when it can."""
    if not dist.is_nccl_available():
        return f"this torch ({torch.__version__}) was built without NCCL"
    if GPUS < comm.size:
        return f"{GPUS} GPUs for {comm.size} ranks: NCCL takes one for each"
    return ""


@pytest.fixture(autouse=True, scope="module")
def gpu(comm) -> None:
    """Give this rank its GPU, or skip with the reason."""
    reason = next((lack for lack in comm.allgather(_lack(comm)) if lack), "")
    if reason:
        pytest.skip(reason)
    torch.cuda.set_device(comm.rank % GPUS)


pytestmark = [pytest.mark.gpu, pytest.mark.mpi]


class TestNcclGroup(GroupContract):
    device = "cuda"

    @classmethod
    def open(cls, comm) -> TorchGroup:
        return open_torch_group(comm, "nccl", timeout_seconds=60)

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, request, comm, first):
        if request.param > comm.size:
            pytest.skip(f"{comm.size} ranks do not make a group of {request.param}")
        part = first(request.param)
        group = cls.open(MPI.COMM_SELF if part is None else part)
        yield group
        group.close()


def test_a_group_is_split_off_another(comm) -> None:
    whole = open_torch_group(comm, "nccl", timeout_seconds=60)
    half = comm.Split(comm.rank % 2, comm.rank)
    part = open_torch_group(half, "nccl", "part", 60, half.allgather(comm.rank), parent=whole)
    x = torch.full((1000,), float(comm.rank), device="cuda")
    part.all_reduce(x)
    assert x[0].item() == sum(part.ranks)
    part.close()
    whole.close()


def test_a_barrier_waits_on_the_host(comm) -> None:
    group = open_torch_group(comm, "nccl", timeout_seconds=60)
    x = torch.ones(1 << 24, device="cuda")
    group.all_reduce(x, later=True)
    group.barrier()
    assert torch.cuda.current_stream().query()
    group.close()
