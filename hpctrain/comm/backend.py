"""MPI as a backend of torch.distributed, for anybody's torch code: DDP, FSDP2, DTensor, DCP and plain collectives.

    import hpctrain.comm.backend
    torch.distributed.init_process_group("mpi4py")

is all that a script needs under mpirun or srun: rank, size and the store that torch wants come over MPI. Where a
launcher of torch has set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, torch's own way is taken. Works run in the
order in which they were asked for, on a thread of the group, while the caller goes on; errors come out of ``wait()``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial, reduce
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.group import DONE, Group, Handle, Op, Then
from hpctrain.comm.mpi import MpiGroup
from hpctrain.comm.store import open_store
from hpctrain.errors import CommError

NAME = "mpi4py"
TORCHS_OWN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
DEFAULT_SECONDS = 600.0
LARGEST_TAG = 32767  # that MPI promises

RedOp = dist.ReduceOp.RedOpType
OPS = {RedOp.SUM: "sum", RedOp.AVG: "mean", RedOp.MAX: "max", RedOp.MIN: "min"}
BOOL_OPS = {RedOp.SUM: "max", RedOp.MAX: "max", RedOp.BOR: "max"} | dict.fromkeys(
    (RedOp.MIN, RedOp.PRODUCT, RedOp.BAND), "min"
)
FOLDS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    RedOp.PRODUCT: torch.mul,
    RedOp.BAND: torch.bitwise_and,
    RedOp.BOR: torch.bitwise_or,
    RedOp.BXOR: torch.bitwise_xor,
}


def init(timeout_seconds: float = DEFAULT_SECONDS) -> None:
    """Make MPI's world the default group of torch.distributed. Collective over all ranks."""
    dist.init_process_group(NAME, init_method="mpi://", timeout=timedelta(seconds=timeout_seconds))


class MpiWork(dist.Work):
    """A handle of a group, as torch wants it. The group's own limit holds, not one given to ``wait``."""

    def __init__(self, handle: Handle, results: list[Tensor], follow: Callable[[MpiWork, torch.futures.Future], None]):
        super().__init__()
        self._handle, self._results, self._follow = handle, results, follow
        self._lock = Lock()  # a future's thread may wait beside the caller
        self._future: torch.futures.Future | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._lock:
            self._handle.wait()
        return True

    def is_completed(self) -> bool:
        return self._handle.done()

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """What went wrong, if anything; waits for the end."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def synchronize(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future:
        """A future of the results, which fails as the work does."""
        if self._future is None:
            ended: torch.futures.Future = torch.futures.Future()
            self._future = ended.then(lambda _: self.result())  # only an error of a callback reaches C++ as an error
            self._follow(self, ended)
        return self._future


class MpiProcessGroup(dist.ProcessGroup):
    """A group over MPI, under the names by which torch calls for collectives, old and new."""

    def __init__(self, group: Group, comm: MPI.Comm | None = None) -> None:
        super().__init__(group.rank, group.size)
        self.group = group
        self._comm = comm
        self._name = self._description = ""
        self._followed: SimpleQueue[tuple[MpiWork, torch.futures.Future] | None] = SimpleQueue()
        self._follower: Thread | None = None

    # ---- what it is called ---------------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    # ---- reductions ----------------------------------------------------------------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        return self._works([self._all_reduce(x, opts.reduceOp, _later(opts)) for x in tensors], tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        """Every rank gets what only the root must."""
        return self.allreduce(tensors, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        handles = [
            self._reduce_scatter(out, _joined(pieces), opts.reduceOp, _counts(pieces), _later(opts))
            for out, pieces in zip(outputs, inputs, strict=True)
        ]
        return self._works(handles, outputs)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> MpiWork:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> MpiWork:
        handles = [
            self._reduce_scatter(out, x, opts.reduceOp, None, _later(opts))
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._works(handles, outputs)

    # ---- moves ---------------------------------------------------------------------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        handles = [self.group.broadcast(_real(x), opts.rootRank, later=_later(opts)) for x in tensors]
        return self._works(handles, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        handles = []
        for pieces, x in zip(outputs, inputs, strict=True):
            sizes = _counts(pieces)
            whole = _real(x).new_empty(sum(sizes))
            gathered = self.group.all_gather(whole, _real(x), sizes=sizes, later=_later(opts))
            handles.append(Then(gathered, partial(_dealt, pieces, whole)))
        return self._works(handles, [piece for pieces in outputs for piece in pieces])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        """``outputs`` has a list for each rank, each with a piece for each input."""
        return self.allgather([list(pieces) for pieces in zip(*outputs, strict=True)], inputs, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> MpiWork:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        handles = [
            self.group.all_gather(_real(out), _real(x), later=_later(opts))
            for out, x in zip(outputs, inputs, strict=True)
        ]
        return self._works(handles, outputs)

    def all_to_all_single(
        self, output: Tensor, input: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> MpiWork:
        out, x = _real(output), _real(input)
        out_sizes, sizes = _elements(output_splits, out), _elements(input_splits, x)
        handle = self.group.all_to_all(out, x, out_sizes=out_sizes, sizes=sizes, later=_later(opts))
        return self._works([handle], [output])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> MpiWork:
        return self._works([self._exchange(outputs, inputs, _later(opts))], outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> MpiWork:
        """An exchange in which everybody has something for the root only."""
        empty = inputs[0].new_empty(0)
        pieces = [inputs[0] if rank == opts.rootRank else empty for rank in range(self.group.size)]
        taken = outputs[0] if self.group.rank == opts.rootRank else [empty] * self.group.size
        return self._works([self._exchange(taken, pieces, _later(opts))], taken)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> MpiWork:
        """An exchange in which only the root has something, for everybody."""
        empty = outputs[0].new_empty(0)
        pieces = inputs[0] if self.group.rank == opts.rootRank else [empty] * self.group.size
        taken = [outputs[0] if rank == opts.rootRank else empty for rank in range(self.group.size)]
        return self._works([self._exchange(taken, pieces, _later(opts))], outputs)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> MpiWork:
        return self._works([self.group.send(_real(x), to, tag=tag, later=True) for x in tensors], tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> MpiWork:
        return self._works([self.group.recv(_real(x), source, tag=tag, later=True) for x in tensors], tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> MpiWork:
        raise CommError("a message from any rank cannot be received over mpi4py", "", "name its source: src=")

    def barrier(self, opts: Any = None) -> MpiWork:
        if not _later(opts):
            self.group.barrier()
            return self._works([DONE], [])
        return self._works([self.group.all_reduce(torch.zeros(1), later=True)], [])

    # The names before torch 2.13, which code outside torch still calls.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # ---- the end -------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End the group. Collective; torch's ``destroy_process_group`` calls it."""
        if self._follower is not None:
            self._followed.put(None)
            self._follower.join()
            self._follower = None
        self.group.close()
        if self._comm is not None and not MPI.Is_finalized():
            self._comm.Free()
        self._comm = None

    # ---- doing ---------------------------------------------------------------------------------------------------

    def _all_reduce(self, x: Tensor, op: Any, later: bool) -> Handle:
        if name := _op(op, x.dtype):
            return self.group.all_reduce(_real(x), name, later=later)
        rows = x.new_empty(self.group.size, *x.shape)
        return Then(self.group.all_gather(_real(rows), _real(x), later=later), lambda: x.copy_(_folded(rows, op)))

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Any, sizes: list[int] | None, later: bool) -> Handle:
        if name := _op(op, x.dtype):
            return self.group.reduce_scatter(_real(out), _real(x), name, sizes=sizes, later=later)
        rows = out.new_empty(self.group.size, *out.shape)
        return Then(self.group.all_to_all(rows, x, sizes=sizes, later=later), lambda: out.copy_(_folded(rows, op)))

    def _exchange(self, outputs: list[Tensor], inputs: list[Tensor], later: bool) -> Handle:
        x, sizes, out_sizes = _joined(inputs), _counts(inputs), _counts(outputs)
        whole = x.new_empty(sum(out_sizes))
        exchanged = self.group.all_to_all(whole, x, out_sizes=out_sizes, sizes=sizes, later=later)
        return Then(exchanged, partial(_dealt, outputs, whole))

    def _works(self, handles: list[Handle], results: list[Tensor]) -> MpiWork:
        return MpiWork(handles[0] if len(handles) == 1 else All(handles), results, self._follow)

    def _follow(self, work: MpiWork, ended: torch.futures.Future) -> None:
        """Complete a future when its work ends: C++ waits for futures without asking the work."""
        if work.is_completed():
            return ended.set_result(None)
        if self._follower is None:
            self._follower = Thread(target=self._see_ends, name=f"{NAME}-futures", daemon=True)
            self._follower.start()
        self._followed.put((work, ended))

    def _see_ends(self) -> None:
        while (next_one := self._followed.get()) is not None:
            work, ended = next_one
            work.exception()  # waits; whoever asks the future is told the same
            ended.set_result(None)


class All(Handle):
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def done(self) -> bool:
        return all(handle.done() for handle in self._handles)


# ---- tensors and operations ------------------------------------------------------------------------------------------


def _later(opts: Any) -> bool:
    """Whether the caller goes on meanwhile; torch before 2.8 does not tell, and always asks for a work."""
    return getattr(opts, "asyncOp", True)


def _op(op: Any, dtype: torch.dtype) -> Op | None:
    """The group's name for an operation of torch; None where the group has none, and it is folded here."""
    name = (BOOL_OPS if dtype == torch.bool else OPS).get(op.op)
    if name is None and op.op not in FOLDS:
        raise CommError(f"{op.op.name} cannot be reduced over mpi4py", "", f"take one of {_names(OPS | FOLDS)}")
    return name


def _names(ops: Iterable[Any]) -> str:
    return ", ".join(op.name for op in ops)


def _folded(rows: Tensor, op: Any) -> Tensor:
    return reduce(FOLDS[op.op], rows.unbind())


def _real(x: Tensor) -> Tensor:
    """``x`` as real numbers, in the same memory."""
    return torch.view_as_real(x) if x.is_complex() else x


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([_real(piece).reshape(-1) for piece in pieces])


def _counts(pieces: Sequence[Tensor]) -> list[int]:
    return [_real(piece).numel() for piece in pieces]


def _dealt(pieces: Sequence[Tensor], whole: Tensor) -> None:
    """Put the parts of ``whole`` into the pieces."""
    for piece, part in zip(pieces, whole.split(_counts(pieces)), strict=True):
        _real(piece).copy_(part.view_as(_real(piece)))


def _elements(rows: Sequence[int], x: Tensor) -> list[int] | None:
    """Rows of ``x`` as numbers of elements; torch gives no rows where the pieces are equal."""
    return [count * x.shape[1:].numel() for count in rows] if rows else None


# ---- registration ----------------------------------------------------------------------------------------------------


def _create(options: Any, more: object = None) -> MpiProcessGroup:
    """Make a group of torch's; only its members come here."""
    world = MPI.COMM_WORLD
    ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
    if max(ranks) >= world.size or ranks[options.group_rank] != world.rank or len(ranks) != options.group_size:
        raise CommError(
            f"torch says rank {options.group_rank} of {options.group_size}, MPI says {world.rank} of {world.size}",
            "over mpi4py, ranks are MPI's",
            "start with mpirun or srun, not torchrun, and give no rank or world size",
        )
    members = world.group.Incl(ranks)
    comm = world.Create_group(members, crc32(options.group_id.encode()) & LARGEST_TAG)
    members.Free()
    name, seconds = f"{NAME} {options.group_id}", options.timeout.total_seconds()
    return MpiProcessGroup(MpiGroup(comm, name, seconds, ranks=ranks), comm)


def _meet(url: str, timeout: timedelta = timedelta(seconds=DEFAULT_SECONDS), **more: Any) -> Iterator[tuple]:
    """Torch's rendezvous, over MPI: a store, the rank and the size."""
    world = MPI.COMM_WORLD
    yield open_store(world, timeout.total_seconds()).store, world.rank, world.size


def _meet_unless_told(url: str, **more: Any) -> Iterator[tuple]:
    """``env://``, which bare ``init_process_group`` takes: torch's own where the environment is there."""
    own = all(name in os.environ for name in TORCHS_OWN)
    yield from (TORCHS_ENV if own else _meet)(url, **more)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
dist.register_rendezvous_handler("mpi", _meet)
# Torch has no public way to change what a bare init_process_group does; init() is the way that needs none.
_handlers = sys.modules["torch.distributed.rendezvous"]._rendezvous_handlers
TORCHS_ENV, _handlers["env"] = _handlers["env"], _meet_unless_told
