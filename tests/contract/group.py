"""What every transport promises: subclass ``GroupContract`` in a test file, say how a group is opened, and run it.

    class TestMpiGroup(GroupContract):
        @classmethod
        def open(cls, comm):
            return MpiGroup(comm)

It is run under MPI with 4 ranks, on groups of ``sizes`` of them. A rank that is not in a group has one of its own
meanwhile: a group of one is a group, and keeps the promise too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from hpctrain.comm.group import Group, Handle, SoloGroup
from hpctrain.errors import CommError, ShapeError

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*FLOATS, torch.int64, torch.bool, torch.uint8)
BYTES = (0, 1, 2_001, 70_001)  # nothing, next to nothing, little, and more than goes as one small message
MANY = 1_500_001  # elements: more than passes through shared memory at once
FOLDS = {
    "sum": lambda rows: rows.double().sum(0) if rows.is_floating_point() else rows.sum(0),
    "mean": lambda rows: rows.double().mean(0),
    "max": lambda rows: rows.long().amax(0) if not rows.is_floating_point() else rows.amax(0),
    "min": lambda rows: rows.long().amin(0) if not rows.is_floating_point() else rows.amin(0),
}

Place = Callable[[Tensor], Tensor]


def numbers(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """What ``rank`` brings: multiples of the group's possible sizes, so small that every dtype holds sums exactly."""
    values = (torch.arange(length) * 7 + rank * 5) % 11 * 4
    return (values % 8 == 0) if dtype == torch.bool else values.to(dtype)


def cases() -> Iterator[tuple[torch.dtype, int, bool]]:
    """Dtypes, numbers of elements, and whether to wait later: each dtype and each size with both."""
    lengths = ((dtype, -(-size // dtype.itemsize)) for dtype, size in product(DTYPES, BYTES))
    return ((dtype, length, later) for (dtype, length), later in zip(lengths, cycle([False, True, True]), strict=False))


def rows(group: Group, length: int, dtype: torch.dtype) -> Tensor:
    """What every rank brings, a row each."""
    return torch.stack([numbers(rank, length, dtype) for rank in range(group.size)])


def folded(group: Group, length: int, dtype: torch.dtype, op: str) -> Tensor:
    return FOLDS[op](rows(group, length, dtype)).to(dtype)


def ops(dtype: torch.dtype) -> tuple[str, ...]:
    if dtype == torch.bool:
        return ("max", "min")
    return ("sum", "mean", "max", "min") if dtype.is_floating_point else ("sum", "max", "min")


def uneven(group: Group, length: int) -> list[int]:
    """Sizes of one piece a rank, all different, the first one empty."""
    return [rank * length + rank % 2 for rank in range(group.size)]


class GroupContract:
    """The promise. A subclass gives ``open``; one whose groups are not on the CPU also ``device``."""

    device = "cpu"
    sizes: tuple[int, ...] = (1, 2, 4)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "group" in metafunc.fixturenames:
            metafunc.parametrize("group", self.sizes, indirect=True, scope="class")

    @classmethod
    def open(cls, comm: Any) -> Group:
        raise NotImplementedError

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, request: pytest.FixtureRequest, first: Callable[[int], Any]) -> Iterator[Group]:
        comm = first(request.param)
        group = SoloGroup() if comm is None else cls.open(comm)
        yield group
        group.close()

    @pytest.fixture(scope="class")
    @classmethod
    def arena(cls, group: Group) -> Tensor:
        return group.buffer(1 << 24, torch.uint8)

    @pytest.fixture(params=["ordinary", "window", "strided"])
    def place(self, request: pytest.FixtureRequest, arena: Tensor) -> Place:
        """Puts a tensor into ordinary memory, the group's own, or one that is not contiguous."""
        taken = 64  # off the window's start: any place in it must do

        def window(x: Tensor) -> Tensor:
            nonlocal taken
            room = -(-x.numel() * x.itemsize // 64) * 64
            start = taken if taken + room <= arena.numel() else 64  # what lies at the start has served by now
            taken = start + room
            return arena[start : start + x.numel() * x.itemsize].view(x.dtype).copy_(x.view(-1)).view(x.shape)

        def strided(x: Tensor) -> Tensor:
            return torch.zeros(*x.shape, 2, dtype=x.dtype, device=self.device)[..., 1].copy_(x)

        def ordinary(x: Tensor) -> Tensor:
            return x.clone().to(self.device)

        return {"ordinary": ordinary, "window": window, "strided": strided}[request.param]

    # ---- collectives ---------------------------------------------------------------------------------------------

    def test_all_reduce_leaves_the_reduced_value_on_every_rank(self, group, place):
        for dtype, length, later in cases():
            for op in ops(dtype):
                x = place(numbers(group.rank, length, dtype))
                group.all_reduce(x, op, later=later).wait()
                _same(x, folded(group, length, dtype, op))

    def test_reduce_scatter_leaves_each_rank_its_piece_and_the_source_as_it_was(self, group, place):
        for dtype, length, later in cases():
            for op in ops(dtype):
                whole = length * group.size
                x, out = place(numbers(group.rank, whole, dtype)), place(torch.zeros(length, dtype=dtype))
                group.reduce_scatter(out, x, op, later=later).wait()
                _same(out, folded(group, whole, dtype, op).chunk(group.size)[group.rank] if length else out)
                _same(x, numbers(group.rank, whole, dtype))

    def test_all_gather_joins_the_pieces_in_rank_order(self, group, place):
        for dtype, length, later in cases():
            x, out = place(numbers(group.rank, length, dtype)), place(torch.zeros(length * group.size, dtype=dtype))
            group.all_gather(out, x, later=later).wait()
            _same(out, rows(group, length, dtype).view(-1))

    def test_all_to_all_turns_rows_into_columns(self, group, place):
        for dtype, length, later in cases():
            whole = length * group.size
            x, out = place(numbers(group.rank, whole, dtype)), place(torch.zeros(whole, dtype=dtype))
            group.all_to_all(out, x, later=later).wait()
            _same(out, rows(group, whole, dtype).view(group.size, group.size, length)[:, group.rank].reshape(-1))

    def test_broadcast_gives_the_sources_value(self, group, place):
        for dtype, length, later in cases():
            for source in range(group.size):
                x = place(numbers(group.rank, length, dtype))
                group.broadcast(x, source, later=later).wait()
                _same(x, numbers(source, length, dtype))

    def test_pieces_may_differ_in_size(self, group, place):
        for length in (1, 500, 30_000):
            sizes = uneven(group, length)
            mine = rows(group, sum(sizes), torch.float32)
            out = place(torch.zeros(sizes[group.rank]))
            group.reduce_scatter(out, place(mine[group.rank]), sizes=sizes)
            _same(out, mine.sum(0).split(sizes)[group.rank])
            joined = place(torch.zeros(sum(sizes)))
            group.all_gather(joined, out, sizes=sizes)
            _same(joined, mine.sum(0))

    def test_all_to_all_takes_uneven_pieces(self, group, place):
        def size(source, target):
            return (source * 7 + target * 3) % 5 * 4000 * (source != 1)  # rank 1 sends nothing at all

        sizes, out_sizes = [], []
        for peer in range(group.size):
            sizes.append(size(group.rank, peer))
            out_sizes.append(size(peer, group.rank))
        x, out = place(numbers(group.rank, sum(sizes), torch.float32)), place(torch.zeros(sum(out_sizes)))
        group.all_to_all(out, x, out_sizes=out_sizes, sizes=sizes)
        for peer, piece in enumerate(out.split(out_sizes)):
            start = sum(size(peer, target) for target in range(group.rank))
            _same(piece, numbers(peer, start + len(piece), torch.float32)[start:])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_much_more_than_passes_at_once_arrives_whole(self, group, place, dtype):
        length = MANY // group.size * group.size
        x = place(numbers(group.rank, length, dtype))
        piece = place(torch.zeros(length // group.size, dtype=dtype))
        group.reduce_scatter(piece, x)
        total = folded(group, length, dtype, "sum")
        _same(piece, total.chunk(group.size)[group.rank])
        group.all_reduce(x)
        _same(x, total)
        x.zero_()
        group.all_gather(x, piece)
        _same(x, total)
        group.all_to_all(x, x.clone())
        _same(x, total.chunk(group.size)[group.rank].repeat(group.size))
        group.broadcast(x, group.size - 1)
        _same(x, total.chunk(group.size)[-1].repeat(group.size))

    def test_a_piece_of_the_source_may_be_the_target(self, group, place):
        for length in (10, 200_000):
            x = place(numbers(group.rank, length * group.size, torch.float32))
            own = x.chunk(group.size)[group.rank]
            total = folded(group, length * group.size, torch.float32, "sum")
            group.reduce_scatter(own, x)
            _same(own, total.chunk(group.size)[group.rank])
            group.all_gather(x, own)
            _same(x, total)

    def test_the_target_may_lie_anywhere_in_the_source(self, group, place):
        for length in (10, 200_000):
            x = place(numbers(group.rank, length * group.size, torch.float32))
            start = length // 2 * (group.size > 1)
            group.reduce_scatter(x[start : start + length], x)
            total = folded(group, length * group.size, torch.float32, "sum")
            _same(x[start : start + length], total.chunk(group.size)[group.rank])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_narrow_sums_are_added_up_in_fp32(self, group, place, dtype):
        for length in (5, 300_000):
            # One after another, rounded each time, 2048 + 1 + 1 + 1 stays 2048 in both formats.
            x = place(torch.full((length,), 1.0 if group.rank else 2048.0, dtype=dtype))
            group.all_reduce(x)
            _same(x, torch.full((length,), 2048.0 + group.size - 1).to(dtype))

    def test_sums_are_the_same_bits_on_every_rank(self, group, place):
        for length in (100, 300_000):
            x = place(torch.randn(length, generator=torch.Generator().manual_seed(group.rank)))
            group.all_reduce(x, "mean")
            alike = torch.empty(group.size, length, device=self.device)
            group.all_gather(alike, x.clone())
            assert (alike == alike[0]).all()

    def test_a_tensor_that_wants_gradients_is_reduced_like_any_other(self, group):
        x = numbers(group.rank, 10, torch.float32).to(self.device).requires_grad_()
        group.all_reduce(x)
        _same(x.detach(), folded(group, 10, torch.float32, "sum"))

    # ---- messages ------------------------------------------------------------------------------------------------

    def test_what_is_sent_arrives(self, group, place):
        for dtype, length, _ in cases():
            x, out = place(numbers(group.rank, length, dtype)), place(torch.zeros(length, dtype=dtype))
            to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
            sent = group.send(x, to, later=True)
            group.recv(out, source)
            sent.wait()
            _same(out, numbers(source, length, dtype))

    def test_two_ranks_may_send_to_each_other_first(self, group):
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        x, out = numbers(group.rank, MANY, torch.float32).to(self.device), torch.zeros(MANY, device=self.device)
        sent = group.send(x, to, later=True)
        group.recv(out, source, later=True).wait()
        sent.wait()
        _same(out, numbers(source, MANY, torch.float32))

    def test_messages_to_one_rank_keep_their_order(self, group):
        to, source = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        sent = [group.send(torch.full((3,), i, device=self.device), to, later=True) for i in range(5)]
        for i in range(5):
            out = torch.zeros(3, dtype=torch.int64, device=self.device)
            group.recv(out, source)
            assert out.tolist() == [i] * 3
        for handle in sent:
            handle.wait()

    # ---- handles -------------------------------------------------------------------------------------------------

    def test_many_operations_wanted_later_end_in_order(self, group, place):
        for length in (10, 100_000):
            xs = [place(numbers(group.rank, length, torch.float32)) for _ in range(6)]
            handles: list[Handle] = [group.all_reduce(x, later=True) for x in xs]
            now = place(numbers(group.rank, length, torch.float32))
            group.all_reduce(now)  # comes after those that are still under way
            handles[-1].wait()
            assert all(handle.done() for handle in handles)
            for x, handle in zip(xs, handles, strict=True):
                handle.wait()
                handle.wait()
                _same(x, folded(group, length, torch.float32, "sum"))
            _same(now, folded(group, length, torch.float32, "sum"))

    # ---- memory and small values ---------------------------------------------------------------------------------

    def test_buffers_are_zero_and_apart(self, group):
        a, b = group.buffer(1000, torch.float32), group.buffer(10, torch.bfloat16)
        assert not a.any() and not b.any() and a.shape == (1000,) and b.shape == (10,)
        a.fill_(group.rank + 1)
        b.fill_(7)
        group.barrier()
        assert (a == group.rank + 1).all() and (b == 7).all()

    def test_common_memory_is_seen_by_all(self, group):
        memory = group.common(group.size * 5, torch.int64)
        if memory is not None:
            memory[group.rank * 5 : group.rank * 5 + 5] = group.rank
            group.barrier()
            assert memory.tolist() == [rank for rank in range(group.size) for _ in range(5)]

    def test_pieces_are_gathered_into_common_memory(self, group):
        for length in (5, 200_000):
            memory = group.common(group.size * length, torch.float32)
            if memory is not None:
                group.all_gather(memory, numbers(group.rank, length, torch.float32))
                _same(memory, rows(group, length, torch.float32).view(-1))

    def test_values_are_shared_and_collected(self, group):
        assert group.share({"from": group.rank}, group.size - 1) == {"from": group.size - 1}
        assert group.collect(["x" * group.rank, group.rank]) == [["x" * rank, rank] for rank in range(group.size)]

    # ---- refusals ------------------------------------------------------------------------------------------------

    def test_a_peer_outside_the_group_is_refused(self, group):
        with pytest.raises(CommError, match=rf"source = {group.size} is not a rank of group"):
            group.broadcast(torch.zeros(1), group.size)

    def test_sizes_that_do_not_add_up_are_refused(self, group):
        with pytest.raises(ShapeError, match="are not 9 elements over"):
            group.all_gather(torch.zeros(9), torch.zeros(1), sizes=[10] * group.size)

    def test_a_piece_of_another_size_is_refused(self, group):
        with pytest.raises(ShapeError, match="has 3 elements, not 2"):
            group.all_gather(torch.zeros(2 * group.size), torch.zeros(3))

    def test_a_mean_of_integers_is_refused(self, group):
        with pytest.raises(ShapeError, match="a mean of torch.int64 has no exact value"):
            group.all_reduce(torch.zeros(1, dtype=torch.int64), "mean")


def _same(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0)
