"""Wire: collectives by MPI's messages alone, for ranks that share no memory.

Every wait is a poll with a limit. Tensors are flat and contiguous and travel as bytes, so every dtype is served;
sums are made here, in rank order, so that they are the same on every rank and bf16 adds up in fp32. A call of MPI
counts in 32 bits with many libraries: a message is cut into pieces of at most 1 GiB.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.bells import SILENT, Bells
from hpctrain.comm.group import Op
from hpctrain.comm.operation import Ledger, Operation
from hpctrain.comm.patience import Patience
from hpctrain.comm.reduce import Reducer, cut, starts

PIECE_BYTES = 1 << 30
STEP_BYTES = 4 << 20  # of each piece that is reduced at once: bounds the memory that sums need to size x 4 MiB
SMALL_BYTES = 64 << 10  # up to here each rank takes all pieces and sums for itself: one exchange in place of two
PEERS_AT_ONCE = 32
ROLL_SECONDS = 2.0
LATE_PART = 0.1  # of the limit: who hears so soon after coming that another gave up came after that
EXCHANGE_TAG, ROLL_TAG = 1, 2


class Wire:
    """Messages of one communicator, which must be this object's own."""

    def __init__(
        self,
        comm: MPI.Comm,
        ledger: Ledger,
        reducer: Reducer,
        members: Sequence[int] | None = None,
        bells: Bells = SILENT,
    ) -> None:
        """``members`` are the ranks, within the ledger's group, of this communicator's ranks.

        ``bells`` may ring where there is something to look for.
        """
        self.comm, self.ledger = comm, ledger
        self.rank, self.size = comm.rank, comm.size
        self.members = members or range(comm.size)
        self._reduce, self._bells = reducer, bells
        self._stuck: list[Any] = []  # requests that will never end still own their memory

    # ---- collectives ---------------------------------------------------------------------------------------------

    def agree(self, operation: Operation) -> None:
        """Raise on all ranks where they do not all come with the same operation."""
        packed = operation.packed()
        mark = int.from_bytes(blake2b(packed, digest_size=7).digest(), "little")
        ends, most = torch.tensor([mark, -mark]), torch.empty(2, dtype=torch.int64)
        self.wait([self.comm.Iallreduce([raw(ends), MPI.INT64_T], [raw(most), MPI.INT64_T], MPI.MAX)], ends)
        if most[0] != -most[1]:
            told = torch.empty(self.size * len(packed), dtype=torch.uint8)
            self.all_gather(told, torch.frombuffer(bytearray(packed), dtype=torch.uint8))
            operations = [Operation.unpacked(bytes(one.tolist())) for one in told.chunk(self.size)]
            raise self.ledger.differing(dict(zip(self.members, operations, strict=True)))

    def barrier(self) -> None:
        self.wait([self.comm.Ibarrier()])

    def broadcast(self, x: Tensor, source: int) -> None:
        self.wait([self.comm.Ibcast([piece, MPI.BYTE], source) for piece in pieces(x)])

    def all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int] | None = None) -> None:
        sizes = sizes or (x.numel(),) * self.size
        own = out.split(list(sizes))[self.rank]
        if out.numel() * out.itemsize > PIECE_BYTES:
            return self.exchange(out.split(list(sizes)), [x] * self.size)
        if own.data_ptr() != x.data_ptr():
            own.copy_(x)
        counts = [size * out.itemsize for size in sizes]
        target = [raw(out), counts, starts(counts), MPI.BYTE]
        self.wait([self.comm.Iallgatherv(MPI.IN_PLACE, target)])

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int]) -> None:
        self.exchange(out.split(list(out_sizes)), x.split(list(sizes)))

    def reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int]) -> None:
        """``out`` may overlap ``x``, which is lost then."""
        step = STEP_BYTES // x.itemsize
        result = torch.empty_like(out) if overlap(out, x) else out
        steps = [piece.split(step) for piece in x.split(list(sizes))]
        for turn in range(-(-max(sizes) // step)):
            mine = [turns[turn] if turn < len(turns) else x[:0] for turns in steps]
            inbox = torch.empty(self.size, mine[self.rank].numel(), dtype=x.dtype)
            self.exchange(list(inbox), mine)
            start = turn * step
            self._reduce(result[start : start + inbox.shape[1]], list(inbox), op)
        if result is not out:
            out.copy_(result)

    def all_reduce(self, x: Tensor, op: Op) -> None:
        if x.numel() * x.itemsize * self.size <= SMALL_BYTES:
            inbox = torch.empty(self.size, x.numel(), dtype=x.dtype)
            self.all_gather(inbox.view(-1), x)
            return self._reduce(x, list(inbox), op)
        for part in x.split(self.size * STEP_BYTES // x.itemsize):
            sizes = cut(part.numel(), self.size)
            own = part.split(sizes)[self.rank]
            self.reduce_scatter(own, part, op, sizes)
            self.all_gather(part, own, sizes)

    def exchange(self, into: Sequence[Tensor], out_of: Sequence[Tensor]) -> None:
        """Send ``out_of[peer]`` to and take ``into[peer]`` from every peer; nothing travels where it is empty."""
        if into[self.rank].data_ptr() != out_of[self.rank].data_ptr():
            into[self.rank].copy_(out_of[self.rank])
        for first in range(1, self.size, PEERS_AT_ONCE):
            turns = range(first, min(self.size, first + PEERS_AT_ONCE))
            coming = [(self.rank - turn) % self.size for turn in turns]
            requests = [request for peer in coming for request in self.recv(into[peer], peer, EXCHANGE_TAG)]
            for peer in ((self.rank + turn) % self.size for turn in turns):
                requests += self.send(out_of[peer], peer, EXCHANGE_TAG)
            self.wait(requests)

    # ---- messages ------------------------------------------------------------------------------------------------

    def send(self, x: Tensor, to: int, tag: int) -> list[MPI.Request]:
        return [self.comm.Isend([piece, MPI.BYTE], to, tag) for piece in pieces(x)]

    def recv(self, x: Tensor, source: int, tag: int) -> list[MPI.Request]:
        return [self.comm.Irecv([piece, MPI.BYTE], source, tag) for piece in pieces(x)]

    # ---- waiting -------------------------------------------------------------------------------------------------

    def wait(self, requests: list[MPI.Request], keep: Any = None) -> None:
        """Return when all are done. LateError, which says who was late: this rank, or those that are silent.

        ``keep`` is held where MPI may go on writing to it after an error.
        """
        start = time.monotonic()
        if self.ends(requests, lambda: self._gave_up() is None):
            return
        self.keep(requests, keep)
        by = self._gave_up()
        if by is not None and time.monotonic() - start < LATE_PART * self.ledger.limit_seconds:
            raise self.ledger.given_up(self.members[by])
        raise self.ledger.late([self.members[rank] for rank in self._silent()])

    def ends(
        self,
        requests: list[MPI.Request],
        goes_on: Callable[[], bool] = lambda: True,
        statuses: list[MPI.Status] | None = None,
    ) -> bool:
        """Wait until all are done, while ``goes_on`` and within the limit; whether it came to that."""
        patience = Patience(self.ledger.limit_seconds, self._bells)
        while not over(requests, statuses):
            if not (patience.pause() and goes_on()):
                return False
        return True

    def keep(self, requests: list[MPI.Request], memory: Any) -> None:
        """Hold what a request that will never end may still write to."""
        self._stuck.append((requests, memory))

    def _gave_up(self) -> int | None:
        """A rank whose patience has ended: it sent the word that ``_silent`` sends."""
        heard = self.comm.Iprobe(MPI.ANY_SOURCE, ROLL_TAG, status := MPI.Status())
        return status.source if heard else None

    def _silent(self) -> list[int]:
        """The ranks that do not say within a moment that they too have waited too long."""
        word, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(self.size, dtype=torch.uint8)
        others = [peer for peer in range(self.size) if peer != self.rank]
        asked = [self.comm.Isend([raw(word), MPI.BYTE], peer, ROLL_TAG) for peer in others]
        answers = {peer: self.comm.Irecv([raw(heard[peer : peer + 1]), MPI.BYTE], peer, ROLL_TAG) for peer in others}
        self._stuck.append((word, heard, asked, dict(answers)))
        patience = Patience(ROLL_SECONDS)
        while answers and patience.pause():
            answers = {peer: request for peer, request in answers.items() if not request.Test()}
        return sorted(answers)


def over(requests: list[MPI.Request], statuses: list[MPI.Status] | None = None) -> bool:
    """Whether all are done. Open MPI looks first and only then fetches what has come, so it is asked twice."""
    return MPI.Request.Testall(requests, statuses) or MPI.Request.Testall(requests, statuses)


def raw(x: Tensor) -> MPI.buffer:
    """The memory of a flat tensor, as MPI takes it whatever its dtype."""
    return MPI.buffer.fromaddress(x.data_ptr(), x.numel() * x.itemsize)


def pieces(x: Tensor) -> list[MPI.buffer]:
    """The memory of ``x`` in runs that MPI can count; none for no elements."""
    whole = raw(x)
    return [whole[start : start + PIECE_BYTES] for start in range(0, len(whole), PIECE_BYTES)]


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two flat tensors share memory."""
    start, other = a.data_ptr(), b.data_ptr()
    return start < other + b.numel() * b.itemsize and other < start + a.numel() * a.itemsize
