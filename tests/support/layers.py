"""Parallel layers as functions of whole tensors that all ranks have, to whole tensors that all ranks have.

Each rank takes its part of what goes in, the layer does its work, and what comes out is joined. So the function's
gradients are those of the same function on one rank, and small steps that all ranks take together show them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hpctrain.comm import autograd
from hpctrain.comm.group import Group
from hpctrain.model.frame import Tokens
from hpctrain.model.loss import IGNORE
from hpctrain.model.parts import normalise
from hpctrain.parallel import vocabulary
from hpctrain.parallel.linear import ColumnLinear, Region, RowLinear, column
from hpctrain.parallel.tensor import SequenceNorm

ROWS, LENGTH, WIDTH, OUT, VOCABULARY = 2, 3, 4, 5, 7  # no number of ranks above one divides all of them
TOTAL = ROWS * LENGTH
TERMS = dict(smoothing=0.2, z_loss=0.1)
IDS = torch.tensor([[0, 6, 2], [3, 6, 5]])
TARGETS = torch.tensor([1, IGNORE, 6, 3, 2, 0])


class Layer(NamedTuple):
    """A layer on many ranks, what it is on one, and the shapes of what goes in."""

    shared: Callable[..., Tensor]
    alone: Callable[..., Tensor]
    shapes: Sequence[tuple[int, ...]]


def columns(group: Group, sequence: bool, x: Tensor, *tensors: Tensor) -> Tensor:
    """Two maps of one input, with their outputs side by side."""
    maps = [ColumnLinear(WIDTH, OUT, True, group, sequence) for _ in tensors[::2]]
    for one, weight, bias in zip(maps, tensors[::2], tensors[1::2], strict=True):
        _give(one, weight=_part(weight, group), bias=_part(bias, group))
    found = column(_tokens(x, group) if sequence else x, maps, TOTAL)
    return torch.cat([_joined(y, group, 1, OUT) for y in found], 1)


def one_column(group: Group, sequence: bool, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    layer = ColumnLinear(WIDTH, OUT, True, group, sequence)
    given = (_tokens(x, group), TOTAL) if sequence else (x.view(ROWS, LENGTH, WIDTH),)
    y = functional_call(layer, {"weight": _part(weight, group), "bias": _part(bias, group)}, given)
    return _joined(y.flatten(0, -2), group, 1, OUT)


def row(group: Group, sequence: bool, x: Tensor, weight: Tensor, bias: Tensor, product: Callable = F.linear) -> Tensor:
    layer = RowLinear(OUT, WIDTH, True, group, sequence)
    layer.product = product
    given = _part(x, group, 1).view(ROWS, LENGTH, -1)
    y = functional_call(layer, {"weight": _part(weight, group), "bias": bias}, (given,))
    return _joined(y, group, 0, TOTAL) if sequence else y.flatten(0, 1)


def mlp(group: Group, sequence: bool, x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    """A row-parallel layer behind a column-parallel one, with norms of the tokens on both sides."""
    first, last = (
        kind(*of, True, group, sequence) for kind, of in ((ColumnLinear, (WIDTH, OUT)), (RowLinear, (OUT, WIDTH)))
    )
    _give(first, weight=_part(up, group), bias=_part(up_bias, group))
    _give(last, weight=_part(down, group), bias=bias)
    x = _tokens(x, group) if sequence else x
    y = F.silu(last(torch.tanh(first(x, TOTAL) if sequence else first(x))) + x)
    return _joined(y, group, 0, TOTAL) if sequence else y


def norm(group: Group, sequence: bool, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = functional_call(SequenceNorm("layer", WIDTH, 1e-5, group), {"weight": weight, "bias": bias}, _tokens(x, group))
    return _joined(y, group, 0, TOTAL)


def embedding(group: Group, sequence: bool, weight: Tensor) -> Tensor:
    layer = vocabulary.VocabularyEmbedding(VOCABULARY, WIDTH, group, sequence)
    y = functional_call(layer, {"weight": _part(weight, group)}, (IDS,))
    return _joined(y, group, 0, TOTAL) if sequence else y.flatten(0, 1)


def positions(group: Group, sequence: bool, table: Tensor) -> Tensor:
    tokens = Region(group, sequence=True).tokens(ROWS, LENGTH)
    return _joined(vocabulary.places(table, tokens, group), group, 0, TOTAL)


def logits(group: Group, sequence: bool, hidden: Tensor, weight: Tensor) -> Tensor:
    layer = vocabulary.VocabularyOutput(WIDTH, VOCABULARY, group, sequence)
    given = _tokens(hidden, group) if sequence else hidden
    return functional_call(layer, {"weight": _part(weight, group)}, (given, TOTAL))


def loss(group: Group, sequence: bool, hidden: Tensor, weight: Tensor) -> Tensor:
    layer = vocabulary.VocabularyOutput(WIDTH, VOCABULARY, group, sequence)
    _give(layer, weight=_part(weight, group))
    return layer.loss(_tokens(hidden, group) if sequence else hidden, TARGETS, **TERMS)[0]


def loss_of_torch(hidden: Tensor, weight: Tensor) -> Tensor:
    levels = F.linear(hidden, weight).logsumexp(-1)[TARGETS != IGNORE]
    cross = F.cross_entropy(F.linear(hidden, weight), TARGETS, reduction="sum", label_smoothing=TERMS["smoothing"])
    return cross + TERMS["z_loss"] * levels.square().sum()


def both_columns(x: Tensor, *tensors: Tensor) -> Tensor:
    return torch.cat([F.linear(x, *pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)], 1)


def one_mlp(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, bias: Tensor) -> Tensor:
    return F.silu(torch.tanh(F.linear(x, up, up_bias)) @ down + bias + x)


MAP, BACK = [(OUT, WIDTH), (OUT,)], [(OUT, WIDTH), (WIDTH,)]
LAYERS = {
    "columns": Layer(columns, both_columns, [(TOTAL, WIDTH), *MAP, *MAP]),
    "a column": Layer(one_column, F.linear, [(TOTAL, WIDTH), *MAP]),
    "a row": Layer(row, lambda x, w, b: x @ w + b, [(TOTAL, OUT), *BACK]),
    "a row, its product another": Layer(
        partial(row, product=lambda x, w, b: F.linear(x, w, b)), lambda x, w, b: x @ w + b, [(TOTAL, OUT), *BACK]
    ),
    "an mlp": Layer(mlp, one_mlp, [(TOTAL, WIDTH), *MAP, *BACK]),
    "a norm": Layer(norm, partial(normalise, epsilon=1e-5), [(TOTAL, WIDTH), (WIDTH,), (WIDTH,)]),
    "an embedding": Layer(embedding, partial(F.embedding, IDS.flatten()), [(VOCABULARY, WIDTH)]),
    "positions": Layer(positions, lambda table: table.repeat(ROWS, 1), [(LENGTH, WIDTH)]),
    "logits": Layer(logits, F.linear, [(TOTAL, WIDTH), (VOCABULARY, WIDTH)]),
    "a loss": Layer(loss, loss_of_torch, [(TOTAL, WIDTH), (VOCABULARY, WIDTH)]),
}


def tensors(name: str) -> list[Tensor]:
    """What goes into a layer, the same on all ranks."""
    make = torch.Generator().manual_seed(3)
    shapes = LAYERS[name].shapes
    return [torch.randn(shape, generator=make, dtype=torch.float64).requires_grad_() for shape in shapes]


def check(name: str, sequence: bool, group: Group, fast: bool = False) -> None:
    """Compare a layer and its gradients with what they are on one rank, and these with small steps. Collective.

    ``fast`` takes steps in a few directions, which are the same on all ranks, and not along each element.
    """
    layer, given = LAYERS[name], tensors(name)
    act = partial(layer.shared, group, sequence)
    ours, theirs = act(*given), layer.alone(*given)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    way = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(4), dtype=theirs.dtype)
    for a, b in zip(*(torch.autograd.grad(y, given, way) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    if name != "a loss":  # whose graph can be followed once
        assert torch.autograd.gradcheck(act, given, fast_mode=fast)


def _give(module: nn.Module, **found: Tensor) -> None:
    """Let a module use tensors that have a graph behind them in the place of its parameters."""
    for name, tensor in found.items():
        delattr(module, name)
        setattr(module, name, tensor)


def _part(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    return autograd.split(x, group, dim, Region(group).sizes(x.shape[dim]))


def _tokens(x: Tensor, group: Group) -> Tensor:
    tokens = Region(group, sequence=True).tokens(ROWS, LENGTH)
    assert tokens.total == TOTAL == Tokens.whole(ROWS, LENGTH).stop
    return _part(x, group)


def _joined(x: Tensor, group: Group, dim: int, whole: int) -> Tensor:
    return autograd.join(x, group, dim, Region(group).sizes(whole))
