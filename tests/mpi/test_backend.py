"""Anybody's torch code over MPI: torch's collectives, and what torch builds on them, give one process's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _DistributedBackendOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from hpctrain.comm import backend
from hpctrain.errors import CommError, HpctrainError, ShapeError

pytestmark = [
    pytest.mark.mpi(min_size=4),
    pytest.mark.filterwarnings("ignore:.* is deprecated:FutureWarning"),  # the names that every supported torch has
]

STEPS = 5
ROWS = 8


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """Torch's default group over MPI, opened as a script opens it."""
    dist.init_process_group("mpi4py")
    yield
    dist.destroy_process_group()


@pytest.fixture(params=[1, 2, 4], scope="module")
def mesh(request: pytest.FixtureRequest, world: None) -> DeviceMesh:
    """A mesh of 1, 2 or 4 ranks; where it is not of all, each part of the world has its own and does the same."""
    ranks = request.param
    return init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("part", "in"))["in"]


@pytest.fixture
def folder(comm: MPI.Comm, tmp_path: Path) -> Path:
    """One new folder for all ranks."""
    return Path(comm.bcast(str(tmp_path)))


# ---- collectives, as torch's Python calls them -----------------------------------------------------------------------


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_reductions_give_every_rank_the_reduced_value(comm: MPI.Comm, dtype: torch.dtype, later: bool) -> None:
    ranks = torch.arange(comm.size)
    wanted = {"SUM": ranks.sum(), "MAX": comm.size - 1, "MIN": 0, "PRODUCT": 0, "BOR": 3, "BXOR": 0, "BAND": 0}
    for name, value in wanted.items():
        if dtype.is_floating_point and name.startswith("B"):
            continue
        x = torch.full((3,), comm.rank, dtype=dtype)
        finish(dist.all_reduce(x, getattr(dist.ReduceOp, name), async_op=later))
        assert x.tolist() == [value] * 3, name


def test_averages_and_bools_and_complex_numbers_are_reduced(comm: MPI.Comm) -> None:
    x = torch.full((2,), float(comm.rank))
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [(comm.size - 1) / 2] * 2
    flags = torch.tensor([comm.rank == 0, True])
    anybody = flags.clone()
    dist.all_reduce(flags, dist.ReduceOp.MIN)
    dist.all_reduce(anybody, dist.ReduceOp.SUM)
    assert flags.tolist() == [False, True] and anybody.tolist() == [True, True]
    z = torch.tensor([complex(1, comm.rank)])
    dist.all_reduce(z)
    assert z.item() == complex(comm.size, sum(range(comm.size)))


@pytest.mark.parametrize("later", [False, True])
def test_pieces_go_where_they_belong(comm: MPI.Comm, later: bool) -> None:
    size, rank = comm.size, comm.rank
    mine = torch.tensor([[10.0 * rank + to] for to in range(size)])  # row ``to`` is for that rank

    joined, scattered = torch.empty(size * size, 1), torch.empty(1)
    finish(dist.all_gather_into_tensor(joined, mine, async_op=later))
    assert joined.view(-1).tolist() == [10.0 * source + to for source in range(size) for to in range(size)]
    finish(dist.reduce_scatter_tensor(scattered, mine.view(-1), async_op=later))
    assert scattered.item() == sum(10.0 * source + rank for source in range(size))

    turned = torch.empty(size, 1)
    finish(dist.all_to_all_single(turned, mine, async_op=later))
    assert turned.view(-1).tolist() == [10.0 * source + rank for source in range(size)]
    pieces = [torch.empty(1) for _ in range(size)]
    finish(dist.all_to_all(pieces, list(mine.unbind()), async_op=later))
    assert [piece.item() for piece in pieces] == turned.view(-1).tolist()


def test_pieces_of_different_lengths_go_where_they_belong(comm: MPI.Comm) -> None:
    size, rank = comm.size, comm.rank
    pieces = [torch.empty(source, 2) for source in range(size)]
    dist.all_gather(pieces, torch.full((rank, 2), float(rank)))
    assert all((piece == source).all() for source, piece in enumerate(pieces))

    out = torch.empty(sum(source + rank for source in range(size)), 2)
    rows = [rank + other for other in range(size)]  # as many there as back
    dist.all_to_all_single(out, torch.full((sum(rows), 2), float(rank)), rows, rows)
    assert out[:, 0].tolist() == [float(source) for source in range(size) for _ in range(source + rank)]

    summed = torch.empty(rank + 1)
    dist.reduce_scatter(summed, [torch.full((to + 1,), float(to)) for to in range(size)])
    assert summed.tolist() == [float(size * rank)] * (rank + 1)


def test_the_root_gathers_scatters_reduces_and_broadcasts(comm: MPI.Comm) -> None:
    size, rank, root = comm.size, comm.rank, 1
    pieces = [torch.empty(2) for _ in range(size)] if rank == root else None
    dist.gather(torch.full((2,), float(rank)), pieces, dst=root)
    assert pieces is None or [piece[0].item() for piece in pieces] == list(range(size))
    mine = torch.empty(2)
    dist.scatter(mine, pieces, src=root)
    assert mine.tolist() == [float(rank)] * 2
    dist.broadcast(mine, src=root)
    assert mine.tolist() == [float(root)] * 2
    dist.reduce(mine, dst=root)
    assert rank != root or mine.tolist() == [float(size * root)] * 2
    told = [None] * size
    dist.all_gather_object(told, {"rank": rank})
    assert told == [{"rank": other} for other in range(size)]


def test_messages_go_round_the_ring(comm: MPI.Comm) -> None:
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    out = torch.empty(100_000)
    x = torch.full_like(out, comm.rank)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, to), dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    assert (out == source).all()


def test_compiled_code_calls_the_same_collectives(comm: MPI.Comm) -> None:
    """The functional ones reach the group from C++."""
    group, size, rank = dist.group.WORLD, comm.size, comm.rank
    x = torch.full((size, 2), float(rank))
    assert functional.all_reduce(x, "sum", group).tolist() == [[float(sum(range(size)))] * 2] * size
    assert functional.all_gather_tensor(x[:1], 0, group)[:, 0].tolist() == list(range(size))
    assert functional.reduce_scatter_tensor(x, "avg", 0, group).tolist() == [[sum(range(size)) / size] * 2]
    assert functional.all_to_all_single(x, None, None, group)[:, 0].tolist() == list(range(size))
    assert functional.broadcast(x, 1, group).tolist() == [[1.0] * 2] * size
    assert [y.item() for y in functional.all_reduce_coalesced([x[0, 0], x[1, 1]], "max", group)] == [size - 1] * 2


@pytest.mark.parametrize(
    "old, new",
    [
        ("_allgather_base", "all_gather_single"),
        ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
        ("_reduce_scatter_base", "reduce_scatter_single"),
        ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
        ("alltoall_base", "all_to_all_single"),
    ],
)
def test_old_names_mean_the_new_ones(old: str, new: str) -> None:
    assert getattr(backend.MpiProcessGroup, old) is getattr(backend.MpiProcessGroup, new)


# ---- futures, errors and ends ----------------------------------------------------------------------------------------


def test_futures_end_with_their_results(comm: MPI.Comm) -> None:
    xs = [torch.full((50_000,), float(comm.rank)) for _ in range(4)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    chained = [work.get_future().then(lambda future: future.value()[0].sum().item()) for work in works]
    assert [future.wait() for future in chained] == [50_000.0 * sum(range(comm.size))] * 4
    assert all(work.is_completed() and work.is_success() and work.exception() is None for work in works)


def test_an_error_comes_out_of_wait_and_of_the_future(comm: MPI.Comm) -> None:
    group = dist.new_group()
    work = dist.all_reduce(torch.zeros(3 + comm.rank), group=group, async_op=True)  # not the same on all ranks
    future = work.get_future()
    with pytest.raises(HpctrainError, match="all_reduce"):
        work.wait()
    with pytest.raises(Exception, match="all_reduce"):
        future.wait()
    assert not work.is_success()
    dist.destroy_process_group(group)


def test_what_mpi_cannot_do_is_refused_in_words(comm: MPI.Comm) -> None:
    scaled = SimpleNamespace(op=dist.ReduceOp.PREMUL_SUM)  # only a torch with NCCL makes a real one
    with pytest.raises(CommError, match="PREMUL_SUM cannot be reduced over mpi4py\n  take one of SUM, AVG, MAX"):
        backend._op(scaled, torch.float32)
    with pytest.raises(ShapeError, match="a mean of torch.int64 has no exact value"):
        dist.all_reduce(torch.zeros(1, dtype=torch.int64), dist.ReduceOp.AVG)
    with pytest.raises(CommError, match="cannot be received over mpi4py\n  name its source"):
        dist.recv(torch.zeros(1))


def test_ranks_that_are_not_mpis_are_refused(comm: MPI.Comm) -> None:
    options = _DistributedBackendOptions()
    options.group_rank, options.group_size = comm.rank, comm.size + 1
    with pytest.raises(CommError, match=f"torch says rank {comm.rank} of {comm.size + 1}, MPI says {comm.rank} of"):
        backend._create(options)


def test_the_world_can_be_opened_again(comm: MPI.Comm) -> None:
    dist.destroy_process_group()
    backend.init(timeout_seconds=60)
    assert dist.get_backend() == "mpi4py"
    assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)


# ---- what torch builds on it, against one process --------------------------------------------------------------------


def test_ddp_trains_as_one_process(mesh: DeviceMesh) -> None:
    model = DistributedDataParallel(network(), process_group=mesh.get_group(), bucket_cap_mb=0.001)
    compare_with_one_process(model, mesh)
    assert_same_weights(model.module, mesh)


def test_ddp_finds_unused_parameters(mesh: DeviceMesh) -> None:
    unused = nn.ModuleDict({"used": network(), "spare": nn.Linear(2, 2)})
    unused.forward = lambda x: unused["used"](x)
    model = DistributedDataParallel(unused, process_group=mesh.get_group(), find_unused_parameters=True)
    compare_with_one_process(model, mesh)


def test_fsdp2_trains_as_one_process(mesh: DeviceMesh) -> None:
    compare_with_one_process(sharded(mesh), mesh)


def test_dtensors_train_as_one_process_in_tensor_parallel(mesh: DeviceMesh) -> None:
    """Columns, then rows; every rank has the whole batch."""
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(network(), mesh, plan)
    compare_with_one_process(model, mesh, rows=slice(None))


def test_a_dtensor_product_is_the_product(mesh: DeviceMesh) -> None:
    a, b = torch.randn(5, 7, generator=seed(1)), torch.randn(7, 3, generator=seed(2))
    cut = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
    torch.testing.assert_close(cut.redistribute(mesh, [Replicate()]).to_local(), a @ b)
    torch.testing.assert_close(cut.redistribute(mesh, [Shard(0)]).full_tensor(), a @ b)


def test_dcp_loads_what_it_saved(mesh: DeviceMesh, folder: Path) -> None:
    path = folder / str(dist.get_rank() // mesh.size())  # each part of the world saves its own
    saved, loaded = sharded(mesh), sharded(mesh)
    for parameter in loaded.parameters():
        nn.init.zeros_(parameter)
    dcp.save(saved.state_dict(), checkpoint_id=path, process_group=mesh.get_group())
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=path, process_group=mesh.get_group())
    for name, value in saved.state_dict().items():
        assert isinstance(value, DTensor)
        assert torch.equal(state[name].to_local(), value.to_local()), name


def test_dcp_loads_on_one_rank_what_four_saved(comm: MPI.Comm, folder: Path) -> None:
    dcp.save(sharded(init_device_mesh("cpu", (comm.size,))).state_dict(), checkpoint_id=folder)
    dist.barrier()
    state = {name: torch.zeros_like(value) for name, value in network().state_dict().items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    for name, value in network().state_dict().items():
        assert torch.equal(state[name], value), name


# ---- the network, the batches and the comparison ---------------------------------------------------------------------


def seed(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def network() -> nn.Sequential:
    """A small network, the same on every rank; 10 columns do not cut evenly by 4."""
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 10), nn.LayerNorm(10), nn.Linear(10, 1))
    for number, parameter in enumerate(model.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=seed(number)) * 0.3
    return model


def sharded(mesh: DeviceMesh) -> nn.Module:
    model = network()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def losses(model: nn.Module, rows: slice, joined: Callable[[Tensor], Tensor] = lambda loss: loss) -> list[float]:
    """The losses of a few steps on these rows of a batch; ``joined`` makes the whole batch's of this rank's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    found = []
    for _ in range(STEPS):
        batch = torch.randn(ROWS, 11, generator=seed(1000))[rows]
        loss = (model(batch[:, :10]).squeeze(1) - batch[:, 10]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(joined(loss.detach()).item())
    return found


def compare_with_one_process(model: nn.Module, mesh: DeviceMesh, rows: slice | None = None) -> None:
    share = ROWS // mesh.size()
    own = slice(mesh.get_local_rank() * share, (mesh.get_local_rank() + 1) * share)

    def mean(loss: Tensor) -> Tensor:
        dist.all_reduce(loss, dist.ReduceOp.AVG, group=mesh.get_group())
        return loss

    wanted = losses(network(), slice(None))
    assert losses(model, rows or own, mean) == pytest.approx(wanted, rel=1e-5)
    assert wanted[-1] < wanted[0]  # it learned something


def assert_same_weights(model: nn.Module, mesh: DeviceMesh) -> None:
    for parameter in copy.deepcopy(model).parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, group=mesh.get_group(), group_src=0)
        assert torch.equal(first, parameter)


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()
