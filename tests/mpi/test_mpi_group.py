"""MpiGroup keeps every promise of a group."""

from __future__ import annotations

import time

import pytest
import torch

from hpctrain.comm import patience
from hpctrain.comm.group import SoloGroup
from hpctrain.comm.mpi import MpiGroup
from hpctrain.errors import CommError, LateError, ShapeError
from tests.contract.group import GroupContract, numbers
from tests.support.runs import shared_folder

pytestmark = pytest.mark.mpi(min_size=4)


class TestMpiGroup(GroupContract):
    @classmethod
    def open(cls, comm):
        return MpiGroup(comm)


class TestMpiGroupOfRanksThatShareNoMemory(GroupContract):
    sizes = (2, 4)

    @classmethod
    def open(cls, comm):
        return MpiGroup(comm, node_key=str(comm.rank))


class TestMpiGroupOverTwoEvenNodes(GroupContract):
    sizes = (4,)

    @classmethod
    def open(cls, comm):
        return MpiGroup(comm, node_key="01"[comm.rank // 2])


class TestMpiGroupOverCyclicNodes(GroupContract):
    sizes = (4,)

    @classmethod
    def open(cls, comm):
        return MpiGroup(comm, node_key="01"[comm.rank % 2])


class TestMpiGroupOverUnevenNodes(GroupContract):
    sizes = (4,)

    @classmethod
    def open(cls, comm):
        return MpiGroup(comm, node_key="0001"[comm.rank])


class TestMpiGroupOverThreeNodes(GroupContract):
    sizes = (4,)

    @classmethod
    def open(cls, comm):
        return MpiGroup(comm, node_key="0120"[comm.rank])


NODES = {"one node": "0000", "no shared memory": "0123", "even nodes": "0011", "uneven nodes": "0001"}


@pytest.fixture(params=NODES.values(), ids=NODES)
def nodes(request):
    """The node of each rank, a letter each."""
    return request.param


@pytest.fixture
def open_group(first):
    """Opens a group of the first ranks; a rank that is not one of them gets a group of one."""
    opened = []

    def open_(ranks=4, **more):
        comm = first(ranks)
        opened.append(SoloGroup() if comm is None else MpiGroup(comm, **more))
        return opened[-1]

    yield open_
    for group in opened:
        group.close()


def test_ranks_with_different_operations_are_all_told_who_came_with_what(open_group, comm, nodes):
    group = open_group(node_key=nodes[comm.rank], timeout_seconds=20)
    with pytest.raises(CommError) as told:
        if comm.rank == 2:
            group.broadcast(torch.zeros(3), 1)
        else:
            group.all_reduce(torch.zeros(3))
    assert "all_reduce sum of 3 float32" in str(told.value)
    assert "rank 2: broadcast of 3 float32 from 1" in str(told.value)


def test_ranks_with_different_sizes_are_all_told(open_group, comm, nodes):
    group = open_group(node_key=nodes[comm.rank], timeout_seconds=20)
    with pytest.raises(CommError, match="rank 3: all_reduce sum of 9 float32"):
        group.all_reduce(torch.zeros(9 if comm.rank == 3 else 8))


def test_pieces_cut_differently_are_told(open_group, comm):
    group = open_group(timeout_seconds=20)
    sizes = [1, 1, 1, 5] if comm.rank == 3 else [5, 1, 1, 1]
    with pytest.raises(CommError, match="rank 3: all_gather of 8 float32 cut by"):
        group.all_gather(torch.zeros(8), torch.zeros(sizes[comm.rank]), sizes=sizes)


def test_all_to_all_sizes_that_do_not_match_are_told(open_group, comm):
    group = open_group(timeout_seconds=20)
    sizes = [3, 1, 1, 1] if comm.rank == 1 else [1, 1, 1, 1]
    with pytest.raises(ShapeError, match="all_to_all: rank 1 gives 3 elements to rank 0, which takes 1"):
        group.all_to_all(torch.zeros(4), torch.zeros(sum(sizes)), sizes=sizes, out_sizes=[1, 1, 1, 1])


def test_a_group_goes_on_after_ranks_have_differed(open_group, comm):
    group = open_group(timeout_seconds=20)
    with pytest.raises(CommError):
        group.all_reduce(torch.zeros(1 + comm.rank))
    assert group.collect(comm.rank) == [0, 1, 2, 3]


@pytest.mark.parametrize("elements", [4, 100_000])
def test_a_late_rank_is_named_and_told(open_group, comm, nodes, elements, tmp_path):
    group = open_group(node_key=nodes[comm.rank], timeout_seconds=1, name="late")
    folder = shared_folder(comm, tmp_path)
    group.barrier()
    while comm.rank == 1 and len(list(folder.iterdir())) < 3:  # until the others have given up; without a look at MPI
        time.sleep(0.02)
    with pytest.raises(LateError) as told:
        group.all_reduce(torch.zeros(elements))
    (folder / str(comm.rank)).touch()
    operation = f"#2 all_reduce sum of {elements} float32"
    if comm.rank == 1:
        assert "gave up: this rank is late" in str(told.value) and operation in str(told.value)
    else:
        assert f"rank 1 did not come to {operation} in group late within 1 s" in str(told.value)
    with pytest.raises(CommError, match="group late has failed before and cannot do barrier"):
        group.barrier()


def test_a_message_that_nobody_sends_names_the_peer(open_group, comm):
    group = open_group(timeout_seconds=0.5)
    if comm.rank == 0:
        with pytest.raises(LateError, match="rank 3 did not come to #1 recv of 5 float32 from 3"):
            group.recv(torch.zeros(5), 3)


def test_a_message_wakes_the_rank_that_waits_for_it(open_group, comm, monkeypatch):
    for name in ("FIRST_SLEEP_SECONDS", "LONGEST_SLEEP_SECONDS"):
        monkeypatch.setattr(patience, name, 10_000.0)  # without a bell it would sleep on
    group = open_group()
    for turn in range(20):
        x = torch.full((3,), float(turn))
        if comm.rank == 0:
            group.send(x, 1)
        if comm.rank == 1:
            group.recv(came := torch.empty(3), 0)
            assert torch.equal(came, x)
        group.barrier()


@pytest.mark.parametrize("sent", [3, 9])
def test_a_message_of_another_size_is_an_error(open_group, comm, sent):
    group = open_group(timeout_seconds=20)
    if comm.rank == 0:
        group.send(torch.zeros(sent), 1)
    if comm.rank == 1:
        with pytest.raises(CommError, match="recv of 5 float32 from 0"):
            group.recv(torch.zeros(5), 0)


def test_a_tensor_outside_the_hosts_memory_is_refused(open_group):
    with pytest.raises(ShapeError, match="all_reduce: a tensor on meta cannot travel over MPI"):
        open_group().all_reduce(torch.zeros(3, device="meta"))


def test_a_tensor_in_a_window_is_known_wherever_it_lies_there(open_group, comm):
    group = open_group(2)
    buffer = group.buffer(400_000, torch.float32)
    for x in (buffer, buffer[1:], buffer[1000:200_000].view(199, 1000), buffer.view(torch.int32)[5:]):
        value = numbers(group.rank, x.numel(), x.dtype).view(x.shape)
        x.copy_(value)
        group.all_reduce(x)
        assert torch.equal(x, sum(numbers(rank, x.numel(), x.dtype) for rank in range(group.size)).view(x.shape))


def test_gathering_into_common_memory_moves_only_what_is_not_there(open_group):
    group = open_group()
    memory = group.common(4 * 50_000, torch.float32)
    own = memory.chunk(4)[group.rank]
    own.fill_(group.rank)
    group.all_gather(memory, own)
    assert torch.equal(memory, torch.arange(4.0).repeat_interleave(50_000))


@pytest.mark.mpi_limit(400)
def test_messages_over_two_gib_arrive_whole(open_group, comm):
    length = 2**31 + 16
    group = open_group(2)
    if group.size == 2:
        x = torch.zeros(length, dtype=torch.uint8)
        _mark(x, group.rank == 0)
        group.broadcast(x)
        _check_marks(x)
        _mark(x, group.rank == 1)
        group.recv(x, 1) if group.rank == 0 else group.send(x, 0)
        _check_marks(x)
        half = length // 2
        piece = x[: half + 1] if group.rank == 0 else x[half + 1 :]
        piece.fill_(group.rank + 1)
        group.all_gather(x, piece, sizes=[half + 1, half - 1])
        assert x[half].item() == 1 and x[half + 1].item() == 2 and x[-1].item() == 2


def _mark(x, source):
    """Marks at both ends and around the border of 32-bit counts, in the tensor of the source alone."""
    x.zero_()
    if source:
        x[0], x[-1], x[2**31 - 1], x[2**31] = 1, 2, 3, 4


def _check_marks(x):
    assert (x[0], x[-1], x[2**31 - 1], x[2**31]) == (1, 2, 3, 4)
    assert x[1 : 2**31 - 1].max() == 0
