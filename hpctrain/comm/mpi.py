"""MpiGroup: a group over MPI. Ranks of a node talk through memory that they share, nodes through messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.group import DONE, Group, Handle, Op
from hpctrain.comm.mail import Mail, check_place
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.transport import open_transport
from hpctrain.comm.worker import Worker
from hpctrain.errors import CommError, LateError


class MpiGroup(Group):
    """The ranks of an MPI communicator. Making one is collective over ``comm``, which stays the caller's.

    ``ranks`` are the members' ranks in the world where ``comm`` is not the world; ``node_key`` tells which ranks
    share a node where it is not MPI that shall say it.
    """

    def __init__(
        self,
        comm: MPI.Comm,
        name: str = "world",
        timeout_seconds: float = 600.0,
        node_key: str | None = None,
        ranks: Sequence[int] | None = None,
    ) -> None:
        super().__init__(ranks or range(comm.size), comm.rank, name)
        self.comm = comm  # for others that talk by MPI among the same ranks, as parallel HDF5 does
        self._ledger = Ledger(name, self.ranks, timeout_seconds)
        self._worker = Worker(name, threads=MPI.Query_thread() == MPI.THREAD_MULTIPLE)
        self._transport = open_transport(comm, self._ledger, node_key)
        self._mail = Mail(comm, Ledger(name, self.ranks, timeout_seconds), self._transport.bells)
        self._failed: Exception | None = None

    def barrier(self) -> None:
        self._do(Operation("barrier"), self._transport.barrier)

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        memory = self._memory(Operation("buffer", dtype, numel), False)
        return torch.zeros(numel, dtype=dtype) if memory is None else memory

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        return self._memory(Operation("common", dtype, numel), True)

    def close(self) -> None:
        self._worker.close()
        if self._failed is None and not MPI.Is_finalized():
            self._transport.free()
            self._mail.free()

    def _memory(self, operation: Operation, shared: bool) -> Tensor | None:
        found: list[Tensor | None] = []
        self._do(operation, lambda same: found.append(self._transport.buffer(same, shared)))
        return found[0]

    # ---- what Group asks for -------------------------------------------------------------------------------------

    def _all_reduce(self, x: Tensor, op: Op, later: bool) -> Handle:
        return self._do(Operation.of("all_reduce", x, op), self._transport.all_reduce, x, op, later=later)

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        operation = Operation.of("all_gather", out, sizes=sizes)
        return self._do(operation, self._transport.all_gather, out, x, sizes, later=later)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle:
        operation = Operation.of("reduce_scatter", x, op, sizes=sizes)
        return self._do(operation, self._transport.reduce_scatter, out, x, op, sizes, later=later)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> Handle:
        operation = Operation.of("all_to_all", x, elements=0)  # sizes differ from rank to rank
        return self._do(operation, self._transport.all_to_all, out, x, out_sizes, sizes, later=later)

    def _broadcast(self, x: Tensor, source: int, later: bool) -> Handle:
        return self._do(Operation.of("broadcast", x, root=source), self._transport.broadcast, x, source, later=later)

    def _send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle:
        return self._mail.send(x, to, tag, later)

    def _recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle:
        return self._mail.recv(x, source, tag, later)

    # ---- doing ---------------------------------------------------------------------------------------------------

    def _do(self, operation: Operation, work: Callable[..., None], *tensors: Any, later: bool = False) -> Handle:
        """Do a collective in its turn; the transport sees to it that all ranks come with the same one."""
        if tensors and not tensors[0].is_cpu:
            check_place(operation.kind, tensors[0])
        if not later and self._worker.idle:  # as the worker would do it, a call sooner
            self._guarded(operation, work, tensors)
            return DONE
        return self._worker.do(partial(self._guarded, operation, work, tensors), later)

    def _guarded(self, operation: Operation, work: Callable[..., None], tensors: Sequence[Any]) -> None:
        if self._failed is not None:
            raise CommError(f"group {self.name} has failed before and cannot do {operation}", str(self._failed))
        self._ledger.add(operation)
        try:
            work(operation, *tensors)
        except LateError as error:
            self._failed = error
            raise
        except MPI.Exception as error:
            self._failed = error
            raise CommError(f"MPI could not do {operation} in group {self.name}", str(error)) from error
