"""Linear maps that the ranks of a group share: each has some of the outputs, or some of the inputs.

A ``ColumnLinear`` gives each rank its own outputs of all tokens, and a ``RowLinear`` after it sums over the ranks what
each makes of its own: two products with one sum behind them (Shoeybi 2019, Megatron-LM, section 3). With ``sequence``
the ranks share the tokens before the first and after the second: what was a sum is a reduce-scatter over tokens, and
the first gathers them again (Korthikanti 2022, section 4.2). Tokens are cut as one list, all samples end to end, so
that every piece is one run of memory, whatever the length of a sample is.

The backward of column-parallel maps starts the sum of the input's gradient before it computes the weights' gradients,
and with ``sequence`` it gathers the input, of which a rank keeps only its own tokens, while it computes the input's
gradient. Maps of one input have one such backward. With a ``product`` of another format (fp8) nothing overlaps.

Dims: N tokens of all ranks, n of this one, D width, I and O of a map's input and output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hpctrain.comm import autograd
from hpctrain.comm.group import DONE, Group, Handle, SoloGroup
from hpctrain.model.frame import Tokens
from hpctrain.model.parts import Gather, Spread
from hpctrain.plan.layout import piece


class Room:
    """Memory for activations on their way between ranks, which those of a node see in each other's; live.

    What is gathered lies in memory that all of them map, so that each brings its own tokens and copies none. There are
    two such places, used in turn: who has gathered once more knows that all ranks have, and are done with what they
    gathered before. What is to be summed is made in a window. Where there is no such memory it is ordinary.
    """

    def __init__(self, group: Group) -> None:
        self._group, self._turn = group, 0
        self._common: dict[torch.dtype, Tensor | None] = {}
        self._own: dict[torch.dtype, Tensor] = {}

    def gathered(self, tokens: int, like_nD: Tensor) -> Tensor:
        """A place for all tokens of what each rank has a part of; until the next but one is asked for. Collective."""
        numel, dtype = tokens * like_nD.shape[1], like_nD.dtype
        if dtype not in self._common or _short(self._common[dtype], 2 * numel):
            self._common[dtype] = self._group.common(2 * numel, dtype) if like_nD.is_cpu else None
        memory, self._turn = self._common[dtype], 1 - self._turn
        if memory is None:
            return like_nD.new_empty(tokens, like_nD.shape[1])
        return memory.chunk(2)[self._turn][:numel].view(tokens, -1)

    def summed(self, a: Tensor, b: Tensor) -> Tensor:
        """A place for a product that the ranks' sum is made of; until the next is asked for. Collective."""
        numel, dtype = len(a) * b.shape[1], a.dtype
        if not a.is_cpu:
            return a.new_empty(len(a), b.shape[1])
        if dtype not in self._own or _short(self._own[dtype], numel):
            self._own[dtype] = self._group.buffer(numel, dtype)
        return self._own[dtype][:numel].view(len(a), -1)


def _short(memory: Tensor | None, numel: int) -> bool:
    return memory is not None and memory.numel() < numel


@dataclass(frozen=True)
class Region:
    """Ranks that share products and, with ``sequence``, the tokens between them."""

    group: Group
    sequence: bool = False
    room: Room = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "room", Room(self.group))

    def length(self, whole: int) -> int:
        """This rank's part of a dim."""
        start, stop = self.bounds(whole)
        return stop - start

    def bounds(self, whole: int) -> tuple[int, int]:
        """Start and stop of this rank's part of a dim."""
        return piece(whole, self.group.size, self.group.rank)

    def sizes(self, whole: int) -> list[int]:
        """Every rank's part of a dim."""
        bounds = (piece(whole, self.group.size, rank) for rank in range(self.group.size))
        return [stop - start for start, stop in bounds]

    def tokens(self, rows: int, length: int) -> Tokens:
        """The tokens that this rank has between products."""
        return Tokens(rows, length, *(self.bounds(rows * length) if self.sequence else (0, rows * length)))

    # ---- what a gradient flows through ---------------------------------------------------------------------------

    def enter(self, x: Tensor, total: int) -> Tensor:
        """All ``total`` tokens ``[N, D]``, to go on with differently on each rank. Collective, backwards at least."""
        x = x.flatten(0, -2)
        if self.sequence:
            return autograd.gather(x, self.group, sizes=self.sizes(total))
        return autograd.copy(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' ``x``; with ``sequence`` this rank's tokens of it, ``[n, D]``. Collective."""
        if not self.sequence:
            return autograd.reduce(x, self.group)
        x = x.flatten(0, -2)
        return autograd.reduce_scatter(x, self.group, sizes=self.sizes(len(x)))

    # ---- what does not wait --------------------------------------------------------------------------------------

    def gathered(self, x_nD: Tensor, total: int) -> tuple[Tensor, Handle]:
        """All tokens of what each rank has a part of: there when the handle is done, until the next but one are."""
        if not self.sequence:
            return x_nD, DONE
        whole = self.room.gathered(total, x_nD)
        return whole, self.group.all_gather(whole, x_nD, sizes=_elements(self.sizes(total), x_nD), later=True)

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """``a @ b``, to be summed next. Collective."""
        return torch.mm(a, b, out=self.room.summed(a, b) if self.sequence else None)

    def summed(self, x_ND: Tensor) -> tuple[Tensor, Handle]:
        """The ranks' sum of ``x``, which is used up, or this rank's tokens of it: there when the handle is done."""
        if not self.sequence:
            return x_ND, self.group.all_reduce(x_ND, later=True)
        sizes = self.sizes(len(x_ND))
        own = x_ND.new_empty(sizes[self.group.rank], x_ND.shape[1])
        return own, self.group.reduce_scatter(own, x_ND, sizes=_elements(sizes, x_ND), later=True)


class ColumnLinear(Spread):
    """``x @ weight.T + bias`` for this rank's part of the outputs; ``out`` is that of all ranks."""

    def __init__(self, width: int, out: int, bias: bool, group: Group, sequence: bool = False) -> None:
        region = Region(group, sequence)
        super().__init__(width, region.length(out), bias)
        self.region, self.copies = region, SoloGroup()

    def forward(self, x: Tensor, total: int | None = None) -> Tensor:
        """``[..., out]`` of an ``x`` that all ranks have; with ``sequence`` ``[N, out]`` of this rank's ``[n, D]``.

        ``total`` is N, where ranks have different numbers of tokens. Collective, backwards at least.
        """
        if self.region.sequence:
            return column(x, (self,), total or self.region.group.size * len(x))[0]
        return column(x, (self,), x.shape[:-1].numel())[0].unflatten(0, x.shape[:-1])


class RowLinear(Gather):
    """``x @ weight + bias``, summed over the ranks, each with its part of the inputs; ``into`` is that of all ranks."""

    def __init__(self, into: int, width: int, bias: bool, group: Group, sequence: bool = False) -> None:
        region = Region(group, sequence)
        super().__init__(region.length(into), width, bias)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """``[..., D]``; with ``sequence`` this rank's tokens of it, ``[n, D]``. Collective."""
        x_NI = x.flatten(0, -2)
        if self.product is F.linear:
            y = _Row.apply(self.region, x_NI, self.weight, self.bias)
        else:
            y = self._plainly(x_NI)
        return y if self.region.sequence else y.unflatten(0, x.shape[:-1])

    def _plainly(self, x_NI: Tensor) -> Tensor:
        y = self.region.leave(self.product(x_NI, self.weight.t(), None))
        if self.bias is None:
            return y
        return y + (autograd.copy(self.bias, self.region.group) if self.region.sequence else self.bias)


def fan(x: Tensor, maps: Sequence[ColumnLinear], tokens: Tokens) -> tuple[Tensor, ...]:
    """What each of the maps makes of one input, ``[B, T, out]``: what ``hpctrain.model.parts.fan`` is on one rank."""
    return tuple(y.unflatten(0, (tokens.rows, tokens.length)) for y in column(x, maps, tokens.total))


def column(x: Tensor, maps: Sequence[ColumnLinear], total: int) -> tuple[Tensor, ...]:
    """This rank's outputs of maps of one input, ``[N, out]`` each; ``x`` is brought together once. Collective."""
    region, tensors = maps[0].region, _tensors(maps)
    if all(one.product is F.linear for one in maps):
        return _Column.apply(region, total, x.flatten(0, -2), *tensors)
    whole = region.enter(x, total)
    rows = zip(maps, tensors[::2], tensors[1::2], strict=True)
    return tuple(one.product(whole, weight, bias) for one, weight, bias in rows)


def _tensors(maps: Sequence[ColumnLinear]) -> list[Tensor | None]:
    """Each map's weight and bias; the gradients of those that other ranks have too are summed over these, in one go."""
    tensors = [tensor for one in maps for tensor in (one.weight, one.bias)]
    groups = [one.copies for one in maps for _ in ("weight", "bias")]
    several = [i for i, one in enumerate(tensors) if one is not None and groups[i].size > 1]
    if several:
        summed = autograd.copies([tensors[i] for i in several], groups[several[0]])
        for i, one in zip(several, summed, strict=True):
            tensors[i] = one
    return tensors


class _Column(Function):
    """Products of one input, ``weight`` ``[O, I]`` each; ``tensors`` are weight, bias, weight, bias and so on."""

    @staticmethod
    def forward(ctx: Any, region: Region, total: int, x_nI: Tensor, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        ctx.region, ctx.total = region, total
        ctx.save_for_backward(x_nI, *tensors[::2])
        whole, coming = region.gathered(x_nI, total)
        coming.wait()
        return tuple(F.linear(whole, *pair) for pair in zip(tensors[::2], tensors[1::2], strict=True))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients_NO: Tensor) -> tuple[Any, ...]:
        x_nI, *weights = ctx.saved_tensors
        _, _, wants_x, *wanted = ctx.needs_input_grad
        whole, coming = ctx.region.gathered(x_nI, ctx.total) if any(wanted) else (None, DONE)
        x_grad, going = None, DONE
        if wants_x:
            x_grad, going = ctx.region.summed(input_gradient(gradients_NO, weights, ctx.region.product))
        coming.wait()
        found = []
        for gradient, weight, bias in zip(gradients_NO, wanted[::2], wanted[1::2], strict=True):
            found += [weight_gradient(gradient, whole) if weight else None, gradient.sum(0) if bias else None]
        going.wait()
        return None, None, x_grad, *found


class _Row(Function):
    """A product, ``weight`` ``[I, O]``, and its sum over ranks.

    Its backward has the gradient of all tokens on every rank, and so that of the bias, with nothing left to be summed.
    """

    @staticmethod
    def forward(ctx: Any, region: Region, x_NI: Tensor, weight_IO: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.region = region
        ctx.save_for_backward(x_NI, weight_IO)
        y, going = region.summed(region.product(x_NI, weight_IO))
        going.wait()
        return y if bias_O is None else y.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_nO: Tensor) -> tuple[Any, ...]:
        x_NI, weight_IO = ctx.saved_tensors
        _, wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        gradient_NO, coming = ctx.region.gathered(gradient_nO, len(x_NI))
        coming.wait()
        x_grad = input_gradient([gradient_NO], [weight_IO.t()]) if wants_x else None
        weight_grad = weight_gradient(x_NI, gradient_NO) if wants_weight else None
        return None, x_grad, weight_grad, gradient_NO.sum(0) if wants_bias else None


def input_gradient(
    gradients_NO: Sequence[Tensor], weights_OI: Sequence[Tensor], product: Callable[[Tensor, Tensor], Tensor] = torch.mm
) -> Tensor:
    """The gradient of the input that maps have in common, before any sum over ranks; ``product`` makes the first."""
    first, *others = zip(gradients_NO, weights_OI, strict=True)
    total = product(*first)
    for gradient, weight in others:
        total.addmm_(gradient, weight)
    return total


def weight_gradient(gradient_NO: Tensor, x_NI: Tensor) -> Tensor:
    """The gradient of a weight ``[O, I]``; with its arguments changed about, of one that is ``[I, O]``."""
    return gradient_NO.t() @ x_NI


def _elements(sizes: Sequence[int], x: Tensor) -> list[int]:
    return [size * x.shape[1] for size in sizes]
