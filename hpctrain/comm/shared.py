"""Shared: collectives among ranks of one node, through memory that they share.

Three ways, chosen after the ranks have met at the desk, from facts that all know by then:

* small: the message lay on the desk, and the operation is over.
* direct: every source lies in a window. Ranks read, and all_reduce also writes, in each other's tensors: nothing is
  copied, two meetings in all.
* staged: a source is ordinary memory. It passes through a stretch of shared memory of a few MiB (``staged.py``).

Sums are by rank, the same on all ranks; each element is summed by one rank, which hands the same bits to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from struct import Struct

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.bells import Bells
from hpctrain.comm.desk import HERE, NOWHERE, STAGED, WINDOW, Desk, Slip
from hpctrain.comm.group import Op
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import Reducer, cut, starts
from hpctrain.comm.small import Small
from hpctrain.comm.staged import Stage
from hpctrain.comm.window import LINE_BYTES, Place, Window, Windows, make
from hpctrain.comm.wire import overlap
from hpctrain.errors import ShapeError


class Shared:
    """The ranks of a node; ``bells`` are theirs."""

    def __init__(
        self,
        comm: MPI.Comm,
        desk: Desk,
        stage: Stage,
        windows: Windows,
        window: Window,
        reducer: Reducer,
        bells: Bells,
    ) -> None:
        self._comm, self.bells = comm, bells
        self.desk, self.windows = desk, windows
        self._stage, self._window, self._reduce = stage, window, reducer
        self._small = Small(desk, reducer)
        self._rank, self._size = desk.rank, desk.size
        self._plan = Struct(f"<{2 * desk.size}q")

    @classmethod
    def open(cls, comm: MPI.Comm, members: Sequence[int], ledger: Ledger) -> Shared | None:
        """The ranks of ``comm``, ``members`` of the ledger's group. Collective; None where memory cannot be shared.

        ``comm`` is this object's own from here on, unless it is None.
        """
        desk_bytes, stage_bytes = Desk.bytes_for(comm.size), Stage.bytes_for(comm.size)
        window = make(comm, desk_bytes + stage_bytes + 2 * LINE_BYTES)  # a whole line of it is a bell
        if window is None:
            return None
        window.stretches[comm.rank].zero_()
        comm.Barrier()
        parts = [stretch.split([desk_bytes, len(stretch) - desk_bytes]) for stretch in window.stretches]
        desk = Desk(comm, [part[0] for part in parts], window.win.Sync, members, ledger)
        reducer = Reducer()
        stage = Stage([part[1][:stage_bytes] for part in parts], comm.rank, desk.meet, reducer)
        lines = [stretch[-LINE_BYTES:].data_ptr() for stretch in window.stretches]
        bells = Bells(members[comm.rank], dict(zip(members, lines, strict=True)))
        return cls(comm, desk, stage, Windows(comm), window, reducer, bells)

    def buffer(self, operation: Operation, shared: bool) -> Tensor | None:
        """A new window for a tensor, one for all where ``shared``; None on all ranks where there is no room."""
        self.desk.arrive(operation)
        memory = self.windows.make(operation.elements * operation.dtype.itemsize, shared)
        self.desk.meet()  # none writes to the memory of all before all have zeroed it
        return None if memory is None else memory.view(operation.dtype)

    def free(self) -> None:
        """Collective."""
        self.windows.free()
        self._window.free()
        self._comm.Free()

    def barrier(self, operation: Operation) -> None:
        self.desk.arrive(operation)

    def all_reduce(self, operation: Operation, x: Tensor, op: Op) -> None:
        if operation.elements * x.itemsize <= self.desk.small_bytes:
            return self._small.all_reduce(operation, x, op)
        slips = self._arrive(operation, x)
        if _all_in_windows(slips) and not self.windows.shared(slips[0].place):
            self._all_reduce_direct(self._views(slips, x.numel(), x.dtype), op)
        else:
            self._stage.all_reduce(x, op)

    def _all_reduce_direct(self, views: list[Tensor], op: Op) -> None:
        """Each rank sums its piece of all the tensors, and writes it to all of them."""
        sizes = cut(views[0].numel(), self._size, LINE_BYTES // views[0].itemsize)
        for blocks in self._reduce.blocks([view.split(sizes)[self._rank] for view in views]):
            own = blocks[self._rank]
            self._reduce.block(own, blocks, op)
            for rank, block in enumerate(blocks):
                if rank != self._rank:
                    block.copy_(own)
        self.desk.meet()

    def reduce_scatter(self, operation: Operation, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        if operation.elements * x.itemsize <= self.desk.small_bytes:
            return self._small.reduce_scatter(operation, out, x, op, sizes)
        slips = self._arrive(operation, x)
        start, size = starts(sizes)[self._rank], sizes[self._rank]
        safe = _apart(out, x, x[start : start + size])
        if _all_in_windows(slips):
            views = self._views(slips, x.numel(), x.dtype)
            self._reduce(safe, [view[start : start + size] for view in views], op)
            self.desk.meet()
        else:
            self._stage.reduce_scatter(safe, x, op, sizes)
        if safe is not out:
            out.copy_(safe)

    def all_gather(self, operation: Operation, out: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
        common = self._common_place(out)
        if common is NOWHERE and max(sizes) * x.itemsize <= self.desk.small_bytes:
            return self._small.all_gather(operation, out, x, sizes)
        pieces = out.split(list(sizes))
        if overlap(out, x) and x.data_ptr() != pieces[self._rank].data_ptr():
            x = x.clone()
        slips = self._arrive(operation, x, target=common)
        if common is not NOWHERE and all(slip.target == common for slip in slips):
            _move(pieces[self._rank], x)  # one memory for all: each brings its piece
            self.desk.meet()
        elif _all_in_windows(slips):
            self._all_gather_direct(slips, pieces, x)
        else:
            self._stage.all_gather(out, x, sizes)

    def _all_gather_direct(self, slips: list[Slip], pieces: Sequence[Tensor], x: Tensor) -> None:
        for turn in range(self._size):  # each starts with its own, so that not all read from one at once
            rank = (self._rank + turn) % self._size
            if rank == self._rank:
                _move(pieces[rank], x)
            else:
                piece = pieces[rank]
                piece.copy_(self.windows.view(slips[rank].place, rank, piece.numel(), piece.dtype))
        self.desk.meet()

    def all_to_all(
        self, operation: Operation, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> None:
        """Every rank lays down how much it gives to and takes from each other, and a small message behind that."""
        slips = self._arrive_with_plan(operation, x, out_sizes, sizes)
        plans = self._plans(operation)
        if any(slip.way == STAGED for slip in slips):
            return self._stage.all_to_all(out, x, out_sizes, sizes, max(max(plan) for plan in plans))
        target = out.data_ptr()
        for rank, (slip, size) in enumerate(zip(slips, out_sizes, strict=True)):
            skipped, length = sum(plans[rank][: self._rank]), size * x.itemsize
            if slip.way == HERE:
                self.desk.take(target, length, rank, self._plan.size + skipped * x.itemsize)
            else:
                whole = self.windows.view(slip.place, rank, skipped + size, x.dtype)
                out[(target - out.data_ptr()) // x.itemsize :][:size].copy_(whole[skipped:])
            target += length
        if any(slip.way == WINDOW for slip in slips):
            self.desk.meet()

    def _arrive_with_plan(
        self, operation: Operation, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> list[Slip]:
        plan = self._plan.pack(*sizes, *out_sizes)
        self.desk.write(plan)
        length = x.numel() * x.itemsize
        if len(plan) + length > self.desk.small_bytes:
            return self._arrive(operation, x)
        self.desk.lay(x.data_ptr(), length, len(plan))
        return self.desk.arrive(operation)

    def _plans(self, operation: Operation) -> list[tuple[int, ...]]:
        """What each rank gives to each. ShapeError on all ranks where one takes another amount than is given to it."""
        plans = [self._plan.unpack(plan) for plan in self.desk.read(self._plan.size)]
        given = [plan[: self._size] for plan in plans]
        for source, target in product(range(self._size), repeat=2):
            if given[source][target] != plans[target][self._size + source]:
                raise ShapeError(
                    f"{operation.kind}: rank {source} gives {given[source][target]} elements to rank {target}, "
                    f"which takes {plans[target][self._size + source]}",
                    "sizes of the one are out_sizes of the other",
                )
        return given

    def broadcast(self, operation: Operation, x: Tensor, source: int) -> None:
        if operation.elements * x.itemsize <= self.desk.small_bytes:
            return self._small.broadcast(operation, x, source)
        slip = self._arrive(operation, x)[source]
        if slip.way == STAGED:
            return self._stage.broadcast(x, source)
        if self._rank != source:
            x.copy_(self.windows.view(slip.place, source, x.numel(), x.dtype))
        self.desk.meet()

    # ---- where data lie ------------------------------------------------------------------------------------------

    def _arrive(self, operation: Operation, x: Tensor, target: Place = NOWHERE) -> list[Slip]:
        """Say where the source ``x`` is, which is too large for the desk."""
        place = self.windows.find(x)
        return self.desk.arrive(operation, Slip(STAGED if place is None else WINDOW, place or NOWHERE, target))

    def _common_place(self, out: Tensor) -> Place:
        if not self.windows.any_shared:
            return NOWHERE
        place = self.windows.find(out)
        return place if place is not None and self.windows.shared(place) else NOWHERE

    def _views(self, slips: list[Slip], numel: int, dtype: torch.dtype) -> list[Tensor]:
        return [self.windows.view(slip.place, rank, numel, dtype) for rank, slip in enumerate(slips)]


def _all_in_windows(slips: list[Slip]) -> bool:
    return all(slip.way == WINDOW for slip in slips)


def _apart(out: Tensor, x: Tensor, own: Tensor) -> Tensor:
    """Where a result may be written while others still read ``x``: in ``out``, if that is nothing they read."""
    return torch.empty_like(out) if overlap(out, x) and out.data_ptr() != own.data_ptr() else out


def _move(target: Tensor, x: Tensor) -> None:
    if target.data_ptr() != x.data_ptr():
        target.copy_(x)
