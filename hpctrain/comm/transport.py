"""Which way a group's data go: through shared memory, by messages, or by both."""

from __future__ import annotations

from collections.abc import Sequence

from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.bells import SILENT
from hpctrain.comm.bridge import Bridge
from hpctrain.comm.group import Op
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import Reducer
from hpctrain.comm.shared import Shared
from hpctrain.comm.wire import Wire


def open_transport(comm: MPI.Comm, ledger: Ledger, node_key: str | None) -> Shared | Bridge | Plain:
    """The best way for the ranks of ``comm``. Collective; all ranks get the same kind."""
    node = node_of(comm, node_key)
    nodes = sorted({tuple(ranks) for ranks in comm.allgather(node.allgather(comm.rank))})
    if max(map(len, nodes)) > 1:
        shared = Shared.open(node, nodes[_index(nodes, comm.rank)], ledger)
        if comm.allreduce(shared is not None, MPI.LAND):
            return shared if len(nodes) == 1 else Bridge(comm, shared, nodes, ledger)
    node.Free()
    return Plain(Wire(comm.Dup(), ledger, Reducer()))


def _index(nodes: list[tuple[int, ...]], rank: int) -> int:
    return next(index for index, ranks in enumerate(nodes) if rank in ranks)


def node_of(comm: MPI.Comm, node_key: str | None) -> MPI.Comm:
    """The ranks of ``comm`` on this rank's node, in the order of their ranks."""
    if node_key is None:
        return comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    return comm.Split(comm.allgather(node_key).index(node_key), comm.rank)


class Plain:
    """Messages alone, each operation after an agreement that it is the same on all ranks."""

    bells = SILENT

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def free(self) -> None:
        self._wire.comm.Free()

    def buffer(self, operation: Operation, shared: bool) -> None:
        self._wire.agree(operation)

    def barrier(self, operation: Operation) -> None:
        self._wire.agree(operation)

    def all_reduce(self, operation: Operation, x: Tensor, op: Op) -> None:
        self._wire.agree(operation)
        self._wire.all_reduce(x, op)

    def all_gather(self, operation: Operation, out: Tensor, x: Tensor, sizes: Sequence[int]) -> None:
        self._wire.agree(operation)
        self._wire.all_gather(out, x, sizes)

    def reduce_scatter(self, operation: Operation, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        self._wire.agree(operation)
        self._wire.reduce_scatter(out, x, op, sizes)

    def all_to_all(
        self, operation: Operation, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]
    ) -> None:
        self._wire.agree(operation)
        self._wire.all_to_all(out, x, out_sizes, sizes)

    def broadcast(self, operation: Operation, x: Tensor, source: int) -> None:
        self._wire.agree(operation)
        self._wire.broadcast(x, source)
