"""Bridge: collectives of ranks on several nodes, through shared memory inside a node and by messages between nodes.

Inside a node some ranks talk for all. Either each talks to the ranks with its local number on the other nodes, with
its share of the data, or one leader a node talks, with all of it. Where all nodes have as many ranks both are tried
when the group is opened, and the faster one stays; else there are leaders. bf16 and fp16 sums cross between nodes as
fp32, and are rounded once.

Memory beyond the tensors: all_reduce takes an fp32 copy of this rank's share of bf16 or fp16 numbers; reduce_scatter
one copy of x / ranks of a node (all of x where there are leaders); and ranks that do not lie node after node in their
group's order cost all_gather and reduce_scatter one copy of the whole.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.group import Op
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import WIDE, Reducer, cut
from hpctrain.comm.shared import Shared
from hpctrain.comm.window import LINE_BYTES
from hpctrain.comm.wire import Wire

TRIAL_BYTES, TRIALS = 1 << 20, 3


class Bridge:
    """Ranks of several nodes. ``nodes`` lists each node's ranks of the group; the ledger's group is ``comm``'s."""

    def __init__(self, comm: MPI.Comm, shared: Shared, nodes: Sequence[Sequence[int]], ledger: Ledger) -> None:
        self._shared, self._nodes, self.bells = shared, nodes, shared.bells
        self._node = next(index for index, ranks in enumerate(nodes) if comm.rank in ranks)
        self._local = nodes[self._node].index(comm.rank)
        self._order = [rank for ranks in nodes for rank in ranks]  # node after node
        self._whole = Wire(comm.Dup(), ledger, Reducer())
        lane = comm.Split(self._local, self._node)  # those with this local number, one a node where nodes are even
        talkers = [ranks[self._local] for ranks in nodes if len(ranks) > self._local]
        self._lane = Wire(lane, ledger, Reducer(), talkers)
        self._each = len({len(ranks) for ranks in nodes}) == 1
        if self._each and len(nodes[0]) > 1:
            self._each = self._faster_each()

    def free(self) -> None:
        """Collective."""
        self._shared.free()
        self._whole.comm.Free()
        self._lane.comm.Free()

    def buffer(self, operation: Operation, shared: bool) -> Tensor | None:
        """Memory in a window of the node; none that is common to all ranks."""
        self._whole.agree(operation)
        return None if shared else self._shared.buffer(operation, shared)

    def barrier(self, operation: Operation) -> None:
        self._whole.agree(operation)

    def all_reduce(self, operation: Operation, x: Tensor, op: Op) -> None:
        self._whole.agree(operation)
        self._all_reduce(x, op)

    def _all_reduce(self, x: Tensor, op: Op) -> None:
        shares = self._shares(x)
        own = x.split(shares)[self._local]
        wide = _wide(x.dtype, op)
        partial = own if wide == x.dtype else torch.empty_like(own, dtype=wide)
        self._sum_inside(partial, x, op, shares)
        if self._talks:
            self._lane.all_reduce(partial, _inner(op))
            self._finish(own, partial, op)
        self._gather_inside(x, own, shares)

    def reduce_scatter(self, operation: Operation, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        self._whole.agree(operation)
        pieces = x.split(list(sizes))
        mine, partials = [], []
        for ranks in self._nodes:
            whole = _joined(x, [pieces[rank] for rank in ranks])
            shares = [sizes[rank] for rank in ranks] if self._each else self._all_to_leader(whole)
            partials.append(torch.empty(shares[self._local], dtype=_wide(x.dtype, op)))
            self._sum_inside(partials[-1], whole, op, shares)
            mine.append(shares[self._local])
        total = partials[self._node]
        if self._talks:
            self._lane.reduce_scatter(total, torch.cat(partials), _inner(op), mine)
        if not self._each:
            total = self._scatter_inside(total, [sizes[rank] for rank in self._nodes[self._node]])
        self._finish(out, total, op)

    def all_gather(self, operation: Operation, out: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
        self._whole.agree(operation)
        ordered = [sizes[rank] for rank in self._order]
        whole = out if self._order == sorted(self._order) else torch.empty_like(out)
        places = dict(zip(self._order, whole.split(ordered), strict=True))
        (self._gather_by_lanes if self._each else self._gather_by_leaders)(whole, places, x)
        if whole is not out:
            for rank, piece in enumerate(out.split(list(sizes))):
                piece.copy_(places[rank])

    def _gather_by_lanes(self, whole: Tensor, places: dict[int, Tensor], x: Tensor) -> None:
        """Each takes the pieces of its lane from the other nodes; then every node joins what its ranks took."""
        sizes = [len(places[rank]) for rank in self._lane.members]
        taken = torch.empty(sum(sizes), dtype=x.dtype)
        self._lane.all_gather(taken, x, sizes)
        for node, piece in zip(self._node_parts(whole, places), taken.split(sizes), strict=True):
            self._gather_inside(node[0], piece, node[1])

    def _gather_by_leaders(self, whole: Tensor, places: dict[int, Tensor], x: Tensor) -> None:
        parts = self._node_parts(whole, places)
        own, sizes = parts[self._node]
        self._gather_inside(own, x, sizes)
        if self._talks:
            self._lane.all_gather(whole, own, [len(part) for part, _ in parts])
        self._shared.broadcast(Operation.of("broadcast", whole, root=0), whole, 0)

    def _node_parts(self, whole: Tensor, places: dict[int, Tensor]) -> list[tuple[Tensor, list[int]]]:
        """The run of each node in ``whole``, which is joined node after node, and the sizes of its ranks' pieces."""
        sizes = [[len(places[rank]) for rank in ranks] for ranks in self._nodes]
        return list(zip(whole.split([sum(one) for one in sizes]), sizes, strict=True))

    def all_to_all(
        self, operation: Operation, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Every pair of ranks has its own data: there is nothing to join, so all goes by messages."""
        self._whole.agree(operation)
        self._whole.all_to_all(out, x, out_sizes, sizes)

    def broadcast(self, operation: Operation, x: Tensor, source: int) -> None:
        self._whole.agree(operation)
        node = next(index for index, ranks in enumerate(self._nodes) if source in ranks)
        shares = self._shares(x)
        own = x.split(shares)[self._local]
        if node == self._node:
            root = self._nodes[node].index(source)
            self._shared.broadcast(Operation.of("broadcast", x, root=root), x, root)
        if self._talks:
            self._lane.broadcast(own, node)
        if node != self._node:
            self._gather_inside(x, own, shares)

    # ---- inside the node -----------------------------------------------------------------------------------------

    def _sum_inside(self, out: Tensor, x: Tensor, op: Op, shares: Sequence[int]) -> None:
        operation = Operation.of("reduce_scatter", x, op, sizes=shares)
        self._shared.reduce_scatter(operation, out, x, _inner(op), shares)

    def _gather_inside(self, out: Tensor, x: Tensor, shares: Sequence[int]) -> None:
        self._shared.all_gather(Operation.of("all_gather", out, sizes=shares), out, x, shares)

    def _scatter_inside(self, total: Tensor, sizes: Sequence[int]) -> Tensor:
        """Give each rank of the node its piece of what the leader has."""
        own = torch.empty(sizes[self._local], dtype=total.dtype)
        none = [0] * len(sizes)
        given = sizes if self._talks else none
        self._shared.all_to_all(Operation.of("all_to_all", own, elements=0), own, total, [len(own), *none[1:]], given)
        return own

    # ---- who talks -----------------------------------------------------------------------------------------------

    @property
    def _talks(self) -> bool:
        return self._each or self._local == 0

    def _shares(self, x: Tensor) -> list[int]:
        """The sizes of the runs of ``x`` that the ranks of this node talk for."""
        local = len(self._nodes[self._node])
        return cut(x.numel(), local, LINE_BYTES // x.itemsize) if self._each else self._all_to_leader(x)

    def _all_to_leader(self, x: Tensor) -> list[int]:
        return [x.numel()] + [0] * (len(self._nodes[self._node]) - 1)

    def _finish(self, out: Tensor, total: Tensor, op: Op) -> None:
        if op == "mean":
            total = total.div_(len(self._order))
        if out.data_ptr() != total.data_ptr():
            out.copy_(total)

    def _faster_each(self) -> bool:
        """Whether all ranks talking is faster than leaders talking, by the slowest rank's best try."""
        seconds = [self._trial(each) for each in (True, False)]
        slowest = self._whole.comm.allreduce(seconds[0], MPI.MAX), self._whole.comm.allreduce(seconds[1], MPI.MAX)
        return slowest[0] <= slowest[1]

    def _trial(self, each: bool) -> float:
        self._each = each
        x, best = torch.zeros(TRIAL_BYTES // 4), float("inf")
        for _ in range(TRIALS):
            start = time.perf_counter()
            self._all_reduce(x, "sum")
            best = min(best, time.perf_counter() - start)
        return best


def _inner(op: Op) -> Op:
    """What a part of the ranks computes, so that the whole can be made of parts."""
    return "sum" if op == "mean" else op


def _wide(dtype: torch.dtype, op: Op) -> torch.dtype:
    """The dtype in which parts of a reduction are kept."""
    return WIDE.get(dtype, dtype) if _inner(op) == "sum" else dtype


def _joined(x: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """Pieces of ``x`` as one run: a view where they lie one after another."""
    start = pieces[0].storage_offset() - x.storage_offset()
    position = start
    for piece in pieces:
        if piece.numel() and piece.storage_offset() - x.storage_offset() != position:
            return torch.cat(list(pieces))
        position += piece.numel()
    return x[start:position]
