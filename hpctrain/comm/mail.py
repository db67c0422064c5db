"""Mail: messages between two ranks of a group.

They start at once, past the queue of collectives, and end when they end: two ranks that send to each other first must
not wait for each other. Who waits too long is told which peer did not come.
"""

from __future__ import annotations

from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.bells import Bells
from hpctrain.comm.group import Handle
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.reduce import Reducer
from hpctrain.comm.wire import Wire
from hpctrain.errors import CommError, ShapeError

SAME_TENSOR = "both ranks must mean the same number of elements and the same dtype"


class Mail:
    """Messages over a duplicate of ``comm``, so that none is mistaken for a piece of a collective. Collective."""

    def __init__(self, comm: MPI.Comm, ledger: Ledger, bells: Bells) -> None:
        self._wire = Wire(comm.Dup(), ledger, Reducer(), bells=bells)
        self._ledger, self._bells = ledger, bells

    def send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle:
        check_place("send", x)
        requests = self._wire.send(x, to, tag)
        self._bells.ring(to)
        return self._started(Operation.of("send", x, root=to), x, requests, later)

    def recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle:
        check_place("recv", x)
        return self._started(Operation.of("recv", x, root=source), x, self._wire.recv(x, source, tag), later)

    def free(self) -> None:
        """Collective."""
        self._wire.comm.Free()

    def _started(self, operation: Operation, x: Tensor, requests: list[MPI.Request], later: bool) -> Handle:
        self._ledger.add(operation)
        message = Message(self._wire, self._ledger, self._bells, operation, x, requests)
        if not later:
            message.wait()
        return message


class Message(Handle):
    """A message under way; it holds the tensor until MPI lets go of it."""

    def __init__(
        self,
        wire: Wire,
        ledger: Ledger,
        bells: Bells,
        operation: Operation,
        x: Tensor,
        requests: list[MPI.Request],
    ) -> None:
        self._wire, self._ledger, self._bells = wire, ledger, bells
        self._operation, self._number = operation, ledger.number
        self._x, self._requests = x, requests
        self._statuses = [MPI.Status() for _ in requests]
        self._error: CommError | None = None

    def done(self) -> bool:
        if self._requests and MPI.Request.Testall(self._requests, self._statuses):
            self._end()
        return not self._requests

    def wait(self) -> None:
        if self._requests:
            self._wait()
        if self._error is not None:
            raise self._error

    def _wait(self) -> None:
        try:
            ended = self._wire.ends(self._requests, statuses=self._statuses)
        except MPI.Exception as error:
            raise CommError(
                f"MPI could not do {self._operation} in group {self._ledger.name}", str(error), SAME_TENSOR
            ) from error
        if not ended:
            self._wire.keep(self._requests, self._x)
            raise self._ledger.late([self._operation.root], f"#{self._number} {self._operation}")
        self._end()

    def _end(self) -> None:
        self._requests = []  # MPI would say of requests that have ended that nothing came
        if self._operation.kind == "recv":
            self._error = self._shortage()
            self._bells.ring(self._operation.root)  # its sender may wait for it to be taken

    def _shortage(self) -> CommError | None:
        came = sum(status.Get_count(MPI.BYTE) for status in self._statuses)
        wanted = self._x.numel() * self._x.itemsize
        if came == wanted:
            return None
        return CommError(
            f"{self._operation} in group {self._ledger.name}: {came} bytes came, not {wanted}",
            f"{self._ledger.named(self._operation.root)} sent another tensor than this rank waits for",
            SAME_TENSOR,
        )


def check_place(what: str, x: Tensor) -> None:
    """Refuse a tensor that is not in the host's memory."""
    if x.device.type != "cpu":
        raise ShapeError(
            f"{what}: a tensor on {x.device} cannot travel over MPI",
            "MPI groups move the host's memory",
            "bring it to the CPU first, or set comm.backend to nccl",
        )
