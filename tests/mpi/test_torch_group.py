"""TorchGroup over gloo: it meets over MPI, leaves torch's default group alone, and says what went wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpctrain.comm.store import LOOPBACK, Seat, open_store
from hpctrain.comm.torch import TorchGroup, open_torch_group
from hpctrain.errors import CommError, LateError
from tests.contract.group import GroupContract

pytestmark = pytest.mark.mpi(min_size=4)


class TestTorchGroup(GroupContract):
    @classmethod
    def open(cls, comm: MPI.Comm) -> TorchGroup:
        return open_torch_group(comm, "gloo")


def test_ranks_of_one_host_meet_on_loopback_at_one_port(comm: MPI.Comm) -> None:
    shared = open_store(comm, 30)
    ports = comm.allgather(shared.store.port)
    shared.store.add("here", 1)
    comm.Barrier()
    came = int(shared.store.get("here"))
    comm.Barrier()  # rank 0's end is everybody's
    assert shared.address == LOOPBACK
    assert len(set(ports)) == 1
    assert came == comm.size


def test_ranks_of_several_hosts_meet_at_an_address_that_leads_elsewhere(comm: MPI.Comm) -> None:
    own = Seat.here().addresses
    if not own:
        pytest.skip("this machine has loopback only")
    shared = open_store(comm, 30, Seat(f"node{comm.rank}", own))
    assert shared.store.host in own
    assert shared.address == shared.store.host


@pytest.mark.parametrize("addresses", [(), ("203.0.113.7",)], ids=["loopback only", "not an address of it"])
def test_hosts_that_do_not_reach_each_other_are_refused_on_every_rank(comm: MPI.Comm, addresses: tuple[str]) -> None:
    seat = Seat(f"node{comm.rank // 2}", addresses)
    with pytest.raises(CommError, match="reaches no address of host node0, where rank 0 is\n  .* on 2 hosts; tried: "):
        open_store(comm, 30, seat)


def test_the_default_group_of_torch_stays_free(comm: MPI.Comm) -> None:
    group = open_torch_group(comm, "gloo")
    group.barrier()
    group.close()
    assert not dist.is_initialized()


def test_groups_with_common_members_do_not_mix(comm: MPI.Comm) -> None:
    row = comm.Split(comm.rank // 2, comm.rank)
    column = comm.Split(comm.rank % 2, comm.rank)
    groups = [open_torch_group(part, "gloo", name, 60.0, part.allgather(comm.rank)) for part, name in
              ((row, "row"), (column, "column"))]  # fmt: skip
    totals = [torch.tensor([float(comm.rank)]) for _ in groups]
    handles = [group.all_reduce(total, later=True) for group, total in zip(groups, totals, strict=True)]
    for handle in reversed(handles):
        handle.wait()
    good = [total.item() == sum(group.ranks) for group, total in zip(groups, totals, strict=True)]
    for group in groups:
        group.close()
    assert all(good)


def test_a_rank_that_does_not_come_is_an_error_that_names_the_operation(comm: MPI.Comm, first) -> None:
    pair = first(2)
    if pair is not None:
        group = open_torch_group(pair, "gloo", "dp", timeout_seconds=1.0)
        if group.leads:  # and the other one does not come
            handle = group.all_reduce(torch.ones(3), later=True)
            for _ in range(2):  # a second wait tells the same
                with pytest.raises(LateError, match="all_reduce of group dp, rank 0 of 2: a rank did not come in time"):
                    handle.wait()
            with pytest.raises(CommError, match="broadcast of group dp, rank 0 of 2: failed\n  .*\n  see what"):
                group.broadcast(torch.ones(3))
        pair.Barrier()
        group.close()  # does not wait for anybody again


def test_a_backend_that_is_not_there_is_refused(comm: MPI.Comm) -> None:
    with pytest.raises(CommError, match="'smoke' is not a backend of torch\n  take one of gloo, nccl, xccl"):
        open_torch_group(comm, "smoke")
    absent = [name for name in ("nccl", "xccl") if not dist.is_backend_available(name)]
    for name in absent:
        with pytest.raises(CommError, match=f"was built without {name}\n  install a torch wheel"):
            open_torch_group(comm, name)
