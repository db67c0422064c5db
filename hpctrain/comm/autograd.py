"""Collectives that a gradient flows through: the joints of tensor, sequence, context and expert parallelism.

Every one is a linear map, so its gradient is its adjoint, which is again one of them. Which one depends on what a
tensor means on the ranks of the group:

* *own*: each rank holds its own tensor, and its gradient is that rank's own.
* *alike*: every rank holds the same tensor, and every rank's gradient of it is the whole gradient.
* *parts*: the tensor is the sum of what the ranks hold (of an alike tensor's gradient: each rank knows a part).

    function         takes    gives    gradient          where it is met
    copy, copies     alike    parts    all-reduce        into a column-parallel linear; weights used on own tokens
    reduce           parts    alike    as it is          out of a row-parallel linear
    gather           own      parts    reduce-scatter    from a sequence-cut region into a tensor-cut one
    reduce_scatter   parts    own      all-gather        and back
    split            alike    own      all-gather        an input that all ranks have, cut by sequence
    join             own      alike    own slice         logits of a cut vocabulary, when all ranks use them alike
    exchange         own      own      exchange back     tokens to their experts, heads against sequence
    shift            own      own      shift back        keys and values around a ring

In the column "gives", *parts* says that the ranks use the same tensor differently, so that each has a part of its
gradient. The pairs of tensor parallelism are Shoeybi 2019 (section 3), of sequence parallelism Korthikanti 2022
(section 4.2). All of them are collective, forwards and backwards: every rank of the group calls both, in one order.
Gradients of gradients work too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hpctrain.comm.group import Group
from hpctrain.errors import ShapeError

Sizes = Sequence[int] | None
Map = Callable[[Tensor], Tensor]


def copy(x: Tensor, group: Group) -> Tensor:
    """Hand an alike ``x`` to ranks that go on differently with it; its gradient is the sum of theirs."""
    return _linear(x, _same, lambda grad: _sum(grad, group))


def copies(xs: Sequence[Tensor], group: Group) -> tuple[Tensor, ...]:
    """``copy`` of several tensors of one dtype; their gradients are summed in one collective, when all are there."""
    return _Copies.apply(group, *xs) if group.size > 1 else tuple(xs)


def reduce(x: Tensor, group: Group) -> Tensor:
    """Add up the ranks' ``x``, for ranks that go on alike with the sum; the gradient passes as it is."""
    return _linear(x, lambda y: _sum(y, group), _same)


def gather(x: Tensor, group: Group, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Join the ranks' pieces along ``dim``, in rank order, for ranks that go on differently with the whole.

    ``sizes`` gives each rank's length in ``dim`` where they differ; all other dims are equal on all ranks. The
    gradient is a reduce-scatter. Raises ShapeError when a piece is not as long as ``sizes`` says.
    """
    sizes = _lengths(sizes, x.shape[dim] * group.size, group, "gather")
    return _linear(x, lambda y: _gathered(y, group, dim, sizes), lambda grad: _scattered(grad, group, dim, sizes))


def reduce_scatter(x: Tensor, group: Group, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Add up the ranks' ``x`` and keep this rank's piece of the sum along ``dim``; the gradient is an all-gather.

    ``sizes`` gives each rank's length in ``dim`` where they differ. Raises ShapeError when ``x`` does not cut so.
    """
    sizes = _lengths(sizes, x.shape[dim], group, "reduce_scatter")
    return _linear(x, lambda y: _scattered(y, group, dim, sizes), lambda grad: _gathered(grad, group, dim, sizes))


def split(x: Tensor, group: Group, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Keep this rank's piece of an alike ``x`` along ``dim``; the gradient is an all-gather. ``sizes`` as above."""
    sizes = _lengths(sizes, x.shape[dim], group, "split")
    return _linear(x, lambda y: _sliced(y, group, dim, sizes), lambda grad: _gathered(grad, group, dim, sizes))


def join(x: Tensor, group: Group, dim: int = 0, sizes: Sizes = None) -> Tensor:
    """Join the ranks' pieces as ``gather`` does, for ranks that go on alike; the gradient is the rank's own slice."""
    sizes = _lengths(sizes, x.shape[dim] * group.size, group, "join")
    return _linear(x, lambda y: _gathered(y, group, dim, sizes), lambda grad: _sliced(grad, group, dim, sizes))


def exchange(x: Tensor, group: Group, out_sizes: Sizes = None, sizes: Sizes = None) -> Tensor:
    """Send rows of ``x`` to every rank and take theirs, in rank order; the gradient goes the way back.

    ``sizes`` and ``out_sizes`` give the rows (dim 0) that go to and come from each rank; equal shares when not given.
    """
    there = _lengths(sizes, len(x), group, "exchange: sizes")
    back = _lengths(out_sizes, len(x), group, "exchange: out_sizes")
    return _linear(x, lambda y: _exchanged(y, group, back, there), lambda grad: _exchanged(grad, group, there, back))


def shift(x: Tensor, group: Group, by: int = 1) -> Tensor:
    """Give ``x`` to the rank that is ``by`` further on around the ring, and take the same shape from behind.

    An exchange with one piece that is not empty: no order of sends and receives to get wrong on any transport.
    """
    there, back = ([0] * group.size for _ in range(2))
    there[(group.rank + by) % group.size] = back[(group.rank - by) % group.size] = x.numel()
    return exchange(x.reshape(-1), group, back, there).view(x.shape)


class _Pair(Function):
    """A linear map and its adjoint; the adjoint's own gradient is the map again, and so on to any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _linear(grad, ctx.back, ctx.there), None, None


def _linear(x: Tensor, there: Map, back: Map) -> Tensor:
    return _Pair.apply(x, there, back)


class _Copies(Function):
    """The identity of many tensors; its adjoint, a sum, takes those that have a gradient as one.

    A backward that puts gradients off comes here more than once, with none or some of them: the same on all ranks.
    """

    @staticmethod
    def forward(ctx: Any, group: Group, *xs: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        ctx.set_materialize_grads(False)
        return tuple(map(_same, xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        there = [grad for grad in grads if grad is not None]
        if not there:
            return (None,) * (1 + len(grads))
        total = reduce(torch.cat([grad.reshape(-1) for grad in there]), ctx.group)
        parts = iter(total.split([grad.numel() for grad in there]))
        return None, *(None if grad is None else next(parts).view(grad.shape) for grad in grads)


# ---- the maps: plain tensors in and out, contiguous results -------------------------------------------------------


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(x: Tensor, group: Group) -> Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    group.all_reduce(total)
    return total


def _gathered(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    piece = x.movedim(dim, 0).contiguous()
    whole = piece.new_empty(sum(sizes), *piece.shape[1:])
    group.all_gather(whole, piece, sizes=_elements(sizes, piece))
    return whole.movedim(0, dim).contiguous()


def _scattered(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    whole = x.movedim(dim, 0).contiguous()
    piece = whole.new_empty(sizes[group.rank], *whole.shape[1:])
    group.reduce_scatter(piece, whole, sizes=_elements(sizes, whole))
    return piece.movedim(0, dim).contiguous()


def _sliced(x: Tensor, group: Group, dim: int, sizes: Sequence[int]) -> Tensor:
    return x.split(list(sizes), dim)[group.rank].clone(memory_format=torch.contiguous_format)


def _exchanged(x: Tensor, group: Group, out_sizes: Sequence[int], sizes: Sequence[int]) -> Tensor:
    x = x.contiguous()
    out = x.new_empty(sum(out_sizes), *x.shape[1:])
    group.all_to_all(out, x, out_sizes=_elements(out_sizes, x), sizes=_elements(sizes, x))
    return out


def _elements(sizes: Sequence[int], x: Tensor) -> list[int]:
    """Lengths in dim 0 as numbers of elements of tensors that are shaped like ``x`` in the other dims."""
    row = x.shape[1:].numel()
    return [size * row for size in sizes]


def _lengths(sizes: Sizes, total: int, group: Group, what: str) -> Sequence[int]:
    """The pieces' lengths: those given, or equal ones, which must come out whole."""
    if sizes is not None:
        if len(sizes) != group.size:
            raise ShapeError(f"{what}: {len(sizes)} sizes for the {group.size} ranks of group {group.name}")
        return tuple(sizes)
    if total % group.size:
        raise ShapeError(f"{what}: a length of {total} does not cut into {group.size} equal pieces", "", "give sizes=")
    return (total // group.size,) * group.size
