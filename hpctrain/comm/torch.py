"""TorchGroup: a group whose bytes torch.distributed moves, with NCCL, gloo or xccl, and no address to configure.

It stands on torch's process group objects themselves, not on ``init_process_group``: the process-wide default group
stays free for whoever wants it. On an accelerator "done" means done for the current stream, as everywhere in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d  # has all options and groups; torch.distributed only some
from torch import Tensor

from hpctrain.comm.group import DONE, Group, Handle, Op, SoloGroup
from hpctrain.comm.reduce import WIDE
from hpctrain.comm.store import SharedStore, open_store
from hpctrain.errors import CommError, LateError

if TYPE_CHECKING:
    from mpi4py import MPI

Finish = Callable[[], Any]

REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # divided afterwards, in the dtype of the sum: not every backend has AVG
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}
FOLDS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda pieces: pieces.sum(0, dtype=_sum_dtype(pieces.dtype)),
    "mean": lambda pieces: pieces.sum(0, dtype=_sum_dtype(pieces.dtype)) / len(pieces),
    "max": lambda pieces: pieces.amax(0),
    "min": lambda pieces: pieces.amin(0),
}
SCATTERS = ("nccl", "xccl")  # have a reduce-scatter that beats an exchange; gloo's reduces everything everywhere


def open_torch_group(
    comm: MPI.Comm,
    backend: str,
    name: str = "world",
    timeout_seconds: float = 600.0,
    ranks: Sequence[int] | None = None,
    parent: TorchGroup | None = None,
) -> TorchGroup:
    """Open a group of the ranks of ``comm``, which meet over MPI. Collective.

    ``ranks`` are the members' ranks in the world. The group uses the current device of its kind. With ``parent``, an
    NCCL group is split off that group's communicator, which is quicker: then all ranks of the parent open the groups
    of one split at the same time. Raises CommError when torch lacks the backend or the hosts do not reach each other.
    """
    kind, make = _backend(backend)
    ranks = tuple(range(comm.size)) if ranks is None else tuple(ranks)
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
    with _told(f"opening group {name} over {backend}, rank {comm.rank} of {comm.size}"):
        shared = open_store(comm, timeout_seconds)
        limit = timedelta(seconds=timeout_seconds)
        process_group = make(_Opening(shared, comm.rank, ranks, limit, device, parent))
    return TorchGroup(process_group, ranks, comm.rank, name, device, shared)


class TorchGroup(Group):
    """Ranks that talk through a torch process group; it holds the store that its ranks met in."""

    def __init__(
        self,
        process_group: Any,
        ranks: Sequence[int],
        rank: int,
        name: str,
        device: torch.device,
        shared: SharedStore | None = None,
    ) -> None:
        super().__init__(ranks, rank, name)
        self.device = device
        self.process_group = process_group
        self.backend = process_group.name()
        self._shared = shared
        self._newest: _Pending | None = None
        self._self = SoloGroup(name=name)  # a message to oneself needs no transport, and NCCL has none

    def barrier(self) -> None:
        flag = torch.zeros(1, device=self.device)
        self._all_reduce(flag, "sum", False)
        flag.item()  # waits on the host, also where the reduction only stands in a stream

    def close(self) -> None:
        with suppress(CommError):  # of a group that has failed, nobody needs anything
            self.barrier()  # rank 0 keeps the store until all are here
        self.process_group.shutdown()
        self._shared = None

    def _all_reduce(self, x: Tensor, op: Op, later: bool) -> Handle:
        if x.numel() == 0:
            return DONE
        total = _summable(x, op)
        options = _options(c10d.AllreduceOptions, later, reduceOp=REDUCE_OPS[op])

        def finish() -> None:
            if op == "mean":
                total.div_(self.size)
            if total.data_ptr() != x.data_ptr():
                x.copy_(total)

        return self._start("all_reduce", later, lambda: [self.process_group.allreduce([total], options)], finish)

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        if out.numel() == 0:
            return DONE
        if len(set(sizes)) > 1:
            return self._all_gather_uneven(out, x, sizes, later)
        out, x, options = _bytes(out), _bytes(x), _options(c10d.AllgatherOptions, later)
        return self._start("all_gather", later, lambda: [self.process_group._allgather_base(out, x, options)])

    def _all_gather_uneven(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        """Every piece is broadcast, all at once: no byte more than the pieces have, and gloo gathers only even ones."""
        pieces = out.split(list(sizes))
        if pieces[self.rank].data_ptr() != x.data_ptr():
            pieces[self.rank].copy_(x)
        roots = [(_bytes(piece), root) for root, piece in enumerate(pieces) if piece.numel()]
        return self._start("all_gather", later, lambda: [self._cast(piece, root, later) for piece, root in roots])

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle:
        if x.numel() == 0:
            return DONE
        if self.backend in SCATTERS and len(set(sizes)) == 1 and _summable(x[:1], op).dtype == x.dtype:
            return self._reduce_scatter_native(out, x, op, later)
        pieces = x.new_empty(self.size, out.numel())
        own = [out.numel()] * self.size
        return self._start(
            "reduce_scatter",
            later,
            lambda: [self._exchange(pieces.view(-1), x, own, sizes, later)],
            lambda: out.copy_(FOLDS[op](pieces)),
        )

    def _reduce_scatter_native(self, out: Tensor, x: Tensor, op: Op, later: bool) -> Handle:
        options = _options(c10d.ReduceScatterOptions, later, reduceOp=REDUCE_OPS[op])

        def finish() -> None:
            if op == "mean":
                out.div_(self.size)

        return self._start(
            "reduce_scatter", later, lambda: [self.process_group._reduce_scatter_base(out, x, options)], finish
        )

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> Handle:
        return self._start("all_to_all", later, lambda: [self._exchange(out, x, out_sizes, sizes, later)])

    def _broadcast(self, x: Tensor, source: int, later: bool) -> Handle:
        if x.numel() == 0:
            return DONE
        return self._start("broadcast", later, lambda: [self._cast(_bytes(x), source, later)])

    def _send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle:
        if to == self.rank:
            return self._self._send(x, 0, tag, later)
        return self._message("send", later, lambda: self.process_group.send([_bytes(x)], to, tag))

    def _recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle:
        if source == self.rank:
            return self._self._recv(x, 0, tag, later)
        return self._message("recv", later, lambda: self.process_group.recv([_bytes(x)], source, tag))

    # ---- torch's calls -------------------------------------------------------------------------------------------

    def _cast(self, x: Tensor, source: int, later: bool) -> dist.Work:
        return self.process_group.broadcast([x], _options(c10d.BroadcastOptions, later, rootRank=source))

    def _exchange(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> dist.Work:
        there, back = ([size * x.element_size() for size in each] for each in (sizes, out_sizes))
        options = _options(c10d.AllToAllOptions, later)
        return self.process_group.alltoall_base(_bytes(out), _bytes(x), back, there, options)

    def _start(
        self, what: str, later: bool, start: Callable[[], list[dist.Work]], finish: Finish = lambda: None
    ) -> Handle:
        """Start a collective, which ends after those that were started before it."""
        where = self._where(what)
        with _told(where):
            works = start()
        self._newest = handle = _Pending(where, works, finish, self._newest)
        if not later:
            handle.wait()
        return handle

    def _message(self, what: str, later: bool, start: Callable[[], dist.Work]) -> Handle:
        """Start a message, which ends when it ends: two ranks that send to each other first must not block."""
        where = self._where(what)
        with _told(where):
            handle = _Pending(where, [start()], lambda: None, None)
        if not later:
            handle.wait()
        return handle

    def _where(self, what: str) -> str:
        return f"{what} of group {self.name}, rank {self.rank} of {self.size}"


class _Pending(Handle):
    """Works of torch that are under way, and what is to be done with their result.

    It ends the collectives before it first: torch gives the works of one group to several threads.
    """

    def __init__(
        self, where: str, works: Sequence[dist.Work | None], finish: Finish, before: _Pending | None
    ) -> None:
        self._where, self._finish, self._before = where, finish, before
        self._works = [work for work in works if work is not None]  # NCCL has none for what is already in the stream
        self._error: CommError | None = None

    def wait(self) -> None:
        for handle in reversed(list(self._unended())):
            handle._end()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return all(work.is_completed() for handle in self._unended() for work in handle._works)

    def _unended(self) -> Iterator[_Pending]:
        handle: _Pending | None = self
        while handle is not None and handle._finish is not None:
            yield handle
            handle = handle._before

    def _end(self) -> None:
        try:
            with _told(self._where):
                for work in self._works:
                    work.wait()
                self._finish()
        except CommError as error:  # it belongs to whoever waits for this one
            self._error = error
        self._works, self._finish, self._before = [], None, None  # lets go of the tensors


@contextmanager
def _told(where: str) -> Iterator[None]:
    """Turn what torch raises into this tree's errors."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        if "timed out" in reason.lower():
            mend = "see what the other ranks say; a slow start or step may need a larger comm.timeout_seconds"
            raise LateError(f"{where}: a rank did not come in time", reason, mend) from error
        raise CommError(f"{where}: failed", reason, "see what the other ranks say: one may have ended") from error


# ---- dtypes ----------------------------------------------------------------------------------------------------------


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return WIDE.get(dtype, dtype)


def _summable(x: Tensor, op: Op) -> Tensor:
    """``x`` in the dtype that is reduced: halves are added in fp32, and a bool's max and min are those of its byte."""
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    return x.to(_sum_dtype(x.dtype)) if op in ("sum", "mean") else x


def _bytes(x: Tensor) -> Tensor:
    """The memory of ``x``: what is only moved needs no dtype, and backends lack some."""
    return x.as_strided(x.shape, (1,)).view(torch.uint8)  # one element alone may have any stride


def _options(kind: type, later: bool, **fields: Any) -> Any:
    options = kind()
    options.asyncOp = later
    for field, value in fields.items():
        setattr(options, field, value)
    return options


# ---- backends --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Opening:
    """What a process group of torch is made from."""

    shared: SharedStore
    rank: int
    ranks: tuple[int, ...]
    limit: timedelta
    device: torch.device
    parent: TorchGroup | None


def _gloo(this: _Opening) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    device = c10d.ProcessGroupGloo.create_device(hostname=this.shared.address)  # else whatever the host name means
    options._devices, options._timeout = [device], this.limit
    return c10d.ProcessGroupGloo(this.shared.store, this.rank, len(this.ranks), options)


def _nccl(this: _Opening) -> Any:
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = this.limit
    if this.parent is not None:
        options.split_from = this.parent.process_group
        options.split_color = min(this.ranks)  # no two groups of one split have it in common
    group = c10d.ProcessGroupNCCL(this.shared.store, this.rank, len(this.ranks), options)
    group.eager_connect_single_device(this.device)  # a split is of all ranks at once, and what cannot connect says so
    return group


def _xccl(this: _Opening) -> Any:
    options = c10d.ProcessGroupXCCL.Options()
    options._timeout = this.limit
    return c10d.ProcessGroupXCCL(this.shared.store, this.rank, len(this.ranks), options)


BACKENDS: dict[str, tuple[str, Callable[[_Opening], Any]]] = {
    "gloo": ("cpu", _gloo),
    "nccl": ("cuda", _nccl),
    "xccl": ("xpu", _xccl),
}


def _backend(name: str) -> tuple[str, Callable[[_Opening], Any]]:
    if name not in BACKENDS:
        raise CommError(f"{name!r} is not a backend of torch", "", f"take one of {', '.join(BACKENDS)}")
    if not dist.is_backend_available(name):
        raise CommError(
            f"this torch ({torch.__version__}) was built without {name}",
            "",
            "install a torch wheel for this machine's accelerator, or take another comm.backend",
        )
    return BACKENDS[name]
