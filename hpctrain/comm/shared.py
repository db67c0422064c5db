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

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.desk import HERE, NOWHERE, ON_THE_DESK, STAGED, WINDOW, Desk, Slip
from hpctrain.comm.group import Op
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import Reducer, cut, starts
from hpctrain.comm.staged import Stage
from hpctrain.comm.window import LINE_BYTES, Place, Window, Windows, make
from hpctrain.comm.wire import overlap
from hpctrain.errors import ShapeError

SIZE_BYTES = 8


class Shared:
    """The ranks of a node."""

    def __init__(
        self, comm: MPI.Comm, desk: Desk, stage: Stage, windows: Windows, window: Window, reducer: Reducer
    ) -> None:
        self._comm = comm
        self.desk, self.windows = desk, windows
        self._stage, self._window, self._reduce = stage, window, reducer
        self._rank, self._size = desk.rank, desk.size

    @classmethod
    def open(cls, comm: MPI.Comm, members: Sequence[int], ledger: Ledger) -> Shared | None:
        """The ranks of ``comm``, ``members`` of the ledger's group. Collective; None where memory cannot be shared.

        ``comm`` is this object's own from here on, unless it is None.
        """
        desk_bytes, stage_bytes = Desk.bytes_for(comm.size), Stage.bytes_for(comm.size)
        window = make(comm, desk_bytes + stage_bytes)
        if window is None:
            return None
        window.stretches[comm.rank].zero_()
        comm.Barrier()
        parts = [stretch.split([desk_bytes, len(stretch) - desk_bytes]) for stretch in window.stretches]
        desk = Desk(comm, [part[0] for part in parts], window.win.Sync, members, ledger)
        reducer = Reducer()
        stage = Stage([part[1][:stage_bytes] for part in parts], comm.rank, desk.meet, reducer)
        return cls(comm, desk, stage, Windows(comm), window, reducer)

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
        slips = self._arrive(operation, x)
        if slips[0].way == HERE:
            self._reduce(x, self.desk.laid(x.numel(), x.dtype), op)
        elif _all_in_windows(slips) and not self.windows.shared(slips[0].place):
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
        slips = self._arrive(operation, x)
        start, size = starts(sizes)[self._rank], sizes[self._rank]
        if slips[0].way == HERE:
            return self._reduce(out, self.desk.laid(size, x.dtype, start), op)
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
        pieces = out.split(list(sizes))
        if overlap(out, x) and x.data_ptr() != pieces[self._rank].data_ptr():
            x = x.clone()
        small = x.numel() * x.itemsize <= self.desk.small_bytes
        if small:
            self.desk.lay(x)
        slip, target = self._slip(x, small), self._common_place(out)
        slips = self.desk.arrive(operation, slip if target is NOWHERE else slip._replace(target=target))
        if slips[0].target != NOWHERE and all(slip.target == slips[0].target for slip in slips):
            _move(pieces[self._rank], x)  # one memory for all: each brings its piece
            self.desk.meet()
        elif any(slip.way == STAGED for slip in slips):
            self._stage.all_gather(out, x, sizes)
        else:
            self._all_gather_direct(slips, pieces, x)

    def _all_gather_direct(self, slips: list[Slip], pieces: Sequence[Tensor], x: Tensor) -> None:
        for turn in range(self._size):  # each starts with its own, so that not all read from one at once
            rank = (self._rank + turn) % self._size
            slip, piece = slips[rank], pieces[rank]
            if slip.way == HERE:
                self.desk.take(piece, rank)
            elif rank == self._rank:
                _move(piece, x)
            else:
                piece.copy_(self.windows.view(slip.place, rank, piece.numel(), piece.dtype))
        if any(slip.way == WINDOW for slip in slips):
            self.desk.meet()

    def all_to_all(
        self, operation: Operation, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> None:
        plan = torch.tensor([*sizes, *out_sizes], dtype=torch.int64)
        head = plan.numel() * SIZE_BYTES
        small = head + x.numel() * x.itemsize <= self.desk.small_bytes
        self.desk.lay(plan)
        if small:
            self.desk.lay(x, head)
        slips = self.desk.arrive(operation, self._slip(x, small)._replace(largest=max(sizes)))
        plans = [laid.tolist() for laid in self.desk.laid(2 * self._size, torch.int64)]
        self._check_plans(operation, plans)
        if any(slip.way == STAGED for slip in slips):
            return self._stage.all_to_all(out, x, out_sizes, sizes, max(slip.largest for slip in slips))
        for rank, (slip, piece) in enumerate(zip(slips, out.split(list(out_sizes)), strict=True)):
            skipped = sum(plans[rank][: self._rank])
            if slip.way == HERE:
                self.desk.take(piece, rank, head + skipped * x.itemsize)
            else:
                whole = self.windows.view(slip.place, rank, skipped + piece.numel(), x.dtype)
                piece.copy_(whole[skipped:])
        if any(slip.way == WINDOW for slip in slips):
            self.desk.meet()

    def broadcast(self, operation: Operation, x: Tensor, source: int) -> None:
        slips = self._arrive(operation, x, needed=self._rank == source)
        way, place = slips[source].way, slips[source].place
        if way == STAGED:
            return self._stage.broadcast(x, source)
        if self._rank != source:
            if way == HERE:
                return self.desk.take(x, source)
            x.copy_(self.windows.view(place, source, x.numel(), x.dtype))
        if way == WINDOW:
            self.desk.meet()

    # ---- where data lie ------------------------------------------------------------------------------------------

    def _arrive(self, operation: Operation, x: Tensor, needed: bool = True) -> list[Slip]:
        """Say where the source ``x`` is; a small one is put on the desk. Not ``needed``: this rank brings nothing."""
        small = x.numel() * x.itemsize <= self.desk.small_bytes
        if small and needed:
            self.desk.lay(x)
        return self.desk.arrive(operation, self._slip(x, small))

    def _slip(self, x: Tensor, small: bool) -> Slip:
        if small:
            return ON_THE_DESK
        place = self.windows.find(x)
        return Slip(STAGED, NOWHERE, NOWHERE, 0) if place is None else Slip(WINDOW, place, NOWHERE, 0)

    def _common_place(self, out: Tensor) -> Place:
        place = self.windows.find(out)
        return place if place is not None and self.windows.shared(place) else NOWHERE

    def _views(self, slips: list[Slip], numel: int, dtype: torch.dtype) -> list[Tensor]:
        return [self.windows.view(slip.place, rank, numel, dtype) for rank, slip in enumerate(slips)]

    def _check_plans(self, operation: Operation, plans: list[list[int]]) -> None:
        for source, given in enumerate(plans):
            for target, taken in enumerate(plans):
                if given[target] != taken[self._size + source]:
                    raise ShapeError(
                        f"{operation.kind}: rank {source} gives {given[target]} elements to rank {target}, "
                        f"which takes {taken[self._size + source]}",
                        "sizes of the one are out_sizes of the other",
                    )


def _all_in_windows(slips: list[Slip]) -> bool:
    return all(slip.way == WINDOW for slip in slips)


def _apart(out: Tensor, x: Tensor, own: Tensor) -> Tensor:
    """Where a result may be written while others still read ``x``: in ``out``, if that is nothing they read."""
    return torch.empty_like(out) if overlap(out, x) and out.data_ptr() != own.data_ptr() else out


def _move(target: Tensor, x: Tensor) -> None:
    if target.data_ptr() != x.data_ptr():
        target.copy_(x)
