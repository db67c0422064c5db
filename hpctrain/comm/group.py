"""Group: ranks that talk to each other, and the promise that every transport keeps.

A group of one is a group: code calls collectives without asking how many ranks there are. The public methods here
check what can be checked without talking, bring tensors into one contiguous piece, and call the transport's
underscored method; transports (``SoloGroup``, ``MpiGroup``, ``TorchGroup``) only move bytes.

The rules, for every transport:

* Collective: every rank of the group calls, with the same operation, dtype and sizes, in the same order.
* ``rank`` and every ``source`` or ``to`` count within the group; ``ranks`` lists the members' ranks in the world.
* Sums of bf16 and fp16 are added up in fp32 and rounded once. ``mean`` is for floating dtypes; a bool is reduced
  with ``max`` (any) or ``min`` (all).
* A piece may have no elements; its rank calls all the same.
* Each call gives a ``Handle``. With ``later=False`` it is done on return. With ``later=True`` the tensors belong to
  the group until ``wait()`` returns; handles of one group finish in the order in which they were asked for, save for
  ``send`` and ``recv``, which start at once, so that two ranks may send to each other first.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from hpctrain.errors import CommError, ShapeError

Op = Literal["sum", "mean", "max", "min"]


class Handle:
    """A piece of communication that may still be under way. This class itself is one that is done."""

    def wait(self) -> None:
        """Return when the result is in place; raise what went wrong. May be called again."""

    def done(self) -> bool:
        """Whether ``wait`` would return at once."""
        return True


DONE = Handle()


class Then(Handle):
    """A handle that does one more thing, once, when the one inside is done: here, copying a result to its place."""

    def __init__(self, inner: Handle, finish: Any) -> None:
        self._inner, self._finish = inner, finish

    def wait(self) -> None:
        self._inner.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()

    def done(self) -> bool:
        return self._finish is None or self._inner.done()


class Group(ABC):
    """Ranks that talk to each other; see the module for the rules."""

    device = torch.device("cpu")  # where the transport takes tensors from

    def __init__(self, ranks: Sequence[int], rank: int, name: str = "world") -> None:
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.name = name

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the group where one must."""
        return self.rank == 0

    # ---- tensors -------------------------------------------------------------------------------------------------

    def all_reduce(self, x: Tensor, op: Op = "sum", *, later: bool = False) -> Handle:
        """Reduce ``x`` over all ranks, in place; every rank gets bit for bit the same result."""
        _check_op(op, x.dtype)
        whole = _flat(x)
        handle = self._all_reduce(whole, op, later)
        return handle if whole is x else self._placed(handle, x, whole, later)

    def all_gather(self, out: Tensor, x: Tensor, *, sizes: Sequence[int] | None = None, later: bool = False) -> Handle:
        """Join every rank's ``x`` in ``out``, in rank order; ``sizes`` gives each piece's elements where unequal."""
        sizes = self._sizes(sizes, out, x, "all_gather")
        whole = _room(out)
        handle = self._all_gather(whole, _flat(x), sizes, later)
        return self._placed(handle, out, whole, later)

    def reduce_scatter(
        self, out: Tensor, x: Tensor, op: Op = "sum", *, sizes: Sequence[int] | None = None, later: bool = False
    ) -> Handle:
        """Reduce ``x`` over all ranks and leave piece ``rank`` of it in ``out``; ``sizes`` as in ``all_gather``.

        ``x`` keeps its value, unless it overlaps ``out``.
        """
        _check_op(op, x.dtype)
        sizes = self._sizes(sizes, x, out, "reduce_scatter")
        whole = _room(out)
        handle = self._reduce_scatter(whole, _flat(x), op, sizes, later)
        return self._placed(handle, out, whole, later)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_sizes: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        later: bool = False,
    ) -> Handle:
        """Send piece j of ``x`` to rank j and take its piece for us into ``out``.

        ``sizes`` and ``out_sizes`` give the elements that go to and come from each rank; equal pieces when not given.
        """
        sizes = self._split(sizes, x, "all_to_all: sizes")
        out_sizes = self._split(out_sizes, out, "all_to_all: out_sizes")
        _check_same(out, x, "all_to_all")
        whole = _room(out)
        handle = self._all_to_all(whole, _flat(x), out_sizes, sizes, later)
        return self._placed(handle, out, whole, later)

    def broadcast(self, x: Tensor, source: int = 0, *, later: bool = False) -> Handle:
        """Give every rank the ``x`` of rank ``source``, in place."""
        self._check_peer(source, "source")
        whole = _flat(x)
        return self._placed(self._broadcast(whole, source, later), x, whole, later)

    def send(self, x: Tensor, to: int, *, tag: int = 0, later: bool = False) -> Handle:
        """Send ``x`` to one rank, which calls ``recv`` with as many elements."""
        self._check_peer(to, "to")
        return self._send(_flat(x), to, tag, later)

    def recv(self, x: Tensor, source: int, *, tag: int = 0, later: bool = False) -> Handle:
        """Take what rank ``source`` sends into ``x``."""
        self._check_peer(source, "source")
        whole = _room(x)
        return self._placed(self._recv(whole, source, tag, later), x, whole, later)

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has come here."""

    # ---- memory --------------------------------------------------------------------------------------------------

    def buffer(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A flat zeroed tensor of this rank, in memory from which collectives need no copy. Collective, equal sizes."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def common(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """One flat zeroed memory that all ranks of a node map, each seeing the others' writes after a barrier.

        None where ranks cannot share memory. Collective, equal sizes.
        """
        return None

    # ---- small values --------------------------------------------------------------------------------------------

    def share(self, value: Any, source: int = 0) -> Any:
        """Give every rank the JSON-able ``value`` of rank ``source``."""
        text = self._text(value)
        length = torch.tensor([text.numel()], device=self.device)
        self.broadcast(length, source)
        if self.rank != source:
            text = text.new_empty(int(length))
        self.broadcast(text, source)
        return _value(text)

    def collect(self, value: Any) -> list[Any]:
        """Every rank's JSON-able ``value``, in rank order, on every rank."""
        text = self._text(value)
        lengths = torch.empty(self.size, dtype=torch.int64, device=self.device)
        self.all_gather(lengths, torch.tensor([text.numel()], device=self.device))
        sizes = lengths.tolist()
        joined = text.new_empty(sum(sizes))
        self.all_gather(joined, text, sizes=sizes)
        return [_value(piece) for piece in joined.split(sizes)]

    def _text(self, value: Any) -> Tensor:
        return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(self.device)

    def close(self) -> None:  # noqa: B027 - a transport that holds nothing has nothing to free
        """Free what the group holds. Collective. The group is not used after it."""

    # ---- what a transport does: flat contiguous tensors, every size known -------------------------------------------

    @abstractmethod
    def _all_reduce(self, x: Tensor, op: Op, later: bool) -> Handle: ...

    @abstractmethod
    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle: ...

    @abstractmethod
    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle: ...

    @abstractmethod
    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> Handle: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int, later: bool) -> Handle: ...

    @abstractmethod
    def _send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle: ...

    @abstractmethod
    def _recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle: ...

    # ---- checks --------------------------------------------------------------------------------------------------

    def _placed(self, handle: Handle, target: Tensor, whole: Tensor, later: bool) -> Handle:
        """Bring a result that was made in ``whole`` to ``target``, where they are not the same memory."""
        if whole is target or whole.data_ptr() == target.data_ptr():
            return handle
        placed = Then(handle, lambda: target.detach().copy_(whole.view(target.shape)))
        if not later:
            placed.wait()
        return placed

    def _sizes(self, sizes: Sequence[int] | None, joined: Tensor, piece: Tensor, what: str) -> Sequence[int]:
        _check_same(joined, piece, what)
        sizes = self._split(sizes, joined, what)
        if piece.numel() != sizes[self.rank]:
            raise ShapeError(
                f"{what}: the piece of rank {self.rank} has {piece.numel()} elements, not {sizes[self.rank]}",
                f"the {self.size} pieces of group {self.name} make {joined.numel()} elements",
                "give sizes= where pieces differ",
            )
        return sizes

    def _split(self, sizes: Sequence[int] | None, x: Tensor, what: str) -> Sequence[int]:
        if sizes is None:
            if x.numel() % self.size:
                what = f"{what}: {x.numel()} elements do not cut into {self.size} equal pieces"
                raise ShapeError(what, "", "give sizes=")
            return (x.numel() // self.size,) * self.size
        if len(sizes) != self.size or sum(sizes) != x.numel() or min(sizes, default=0) < 0:
            raise ShapeError(f"{what}: sizes {list(sizes)} are not {x.numel()} elements over {self.size} ranks")
        return sizes

    def _check_peer(self, peer: int, what: str) -> None:
        if not 0 <= peer < self.size:
            raise CommError(f"{what} = {peer} is not a rank of group {self.name}", f"it has {self.size} ranks")


class SoloGroup(Group):
    """A group of one: every collective is the identity, and a message to oneself waits in a queue."""

    def __init__(self, rank: int = 0, name: str = "solo") -> None:
        super().__init__((rank,), 0, name)
        self._mail: dict[int, list[Tensor]] = {}

    def barrier(self) -> None:
        return None

    def common(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(numel, dtype=dtype)

    def _all_reduce(self, x: Tensor, op: Op, later: bool) -> Handle:
        return DONE

    def _all_gather(self, out: Tensor, x: Tensor, sizes: Sequence[int], later: bool) -> Handle:
        return _copied(out, x)

    def _reduce_scatter(self, out: Tensor, x: Tensor, op: Op, sizes: Sequence[int], later: bool) -> Handle:
        return _copied(out, x)

    def _all_to_all(
        self, out: Tensor, x: Tensor, out_sizes: Sequence[int], sizes: Sequence[int], later: bool
    ) -> Handle:
        return _copied(out, x)

    def _broadcast(self, x: Tensor, source: int, later: bool) -> Handle:
        return DONE

    def _send(self, x: Tensor, to: int, tag: int, later: bool) -> Handle:
        self._mail.setdefault(tag, []).append(x.clone())
        return DONE

    def _recv(self, x: Tensor, source: int, tag: int, later: bool) -> Handle:
        if not self._mail.get(tag):
            raise CommError(f"nothing was sent with tag {tag}", "a rank alone receives only what it sent before")
        return _copied(x, self._mail[tag].pop(0))


def _value(text: Tensor) -> Any:
    return json.loads(text.cpu().numpy().tobytes())


def _copied(out: Tensor, x: Tensor) -> Handle:
    if out.data_ptr() != x.data_ptr():
        out.copy_(x)
    return DONE


def _flat(x: Tensor) -> Tensor:
    """The elements of ``x`` in one run, ``x`` itself where it is one; gradients are no matter of a transport."""
    if x.requires_grad:
        x = x.detach()
    if not x.is_contiguous():
        x = x.contiguous()
    return x if x.dim() == 1 else x.view(-1)


def _room(x: Tensor) -> Tensor:
    """One run of memory for a result: that of ``x`` where it is one already."""
    return _flat(x if x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format))


def _check_same(a: Tensor, b: Tensor, what: str) -> None:
    if a.dtype != b.dtype or a.device != b.device:
        raise ShapeError(f"{what}: {a.dtype} on {a.device} and {b.dtype} on {b.device} do not go together")


def _check_op(op: Op, dtype: torch.dtype) -> None:
    if op == "mean" and not dtype.is_floating_point:
        raise ShapeError(f"a mean of {dtype} has no exact value", "", "sum it, or bring it to a floating dtype")
    if dtype == torch.bool and op not in ("max", "min"):
        raise ShapeError(f"{op} of bool has no meaning", "", "use max for any and min for all")
