"""Initial weights: each number is a pure function of (seed, name of the weight, index of the element).

So any rank can make any part of any weight, and all meshes start from the same model. The numbers come from Philox
(Salmon 2011, Parallel Random Numbers: As Easy as 1, 2, 3), whose counter can start anywhere, in blocks of BLOCK
elements; a block is always made whole and in one thread, so its bits do not depend on which part of it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy
import torch
from torch import Tensor, nn

from hpctrain.model.noise import number
from hpctrain.plan.layout import Box
from hpctrain.plan.weights import ModelShape, Weight, weights

BLOCK = 16384  # elements: below torch's grain for threads, and small enough to stay in a core's cache
WORDS = 4  # 64-bit numbers that Philox makes of one value of its counter


Fill = Callable[[str, int, Tensor], None]
"""Writes elements of a weight into a 1-D tensor: takes its name, the index of the first element, the tensor."""


def hollow(make: Callable[[], nn.Module], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The module that ``make`` gives, with parameters that have a shape and no memory; nothing can be written there.

    Whoever gives the parameters memory fills them too, so a rank never has more of a model than is its part.
    """
    with torch.device("meta"):
        module = make()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            nothing = torch.full((), torch.nan, dtype=dtype, device=device).expand(parameter.shape)
            setattr(part, name, nn.Parameter(nothing, parameter.requires_grad))
    return module


def filler(shape: ModelShape, seed: int) -> Fill:
    """What fills the parameters of a model, any interval of each, with what they are at the first step."""
    known = {weight.name: weight for weight in weights(shape)}
    return lambda name, first, out: fill(out, known[name], seed, first)


def initialise(model: nn.Module, shape: ModelShape, seed: int) -> None:
    """Fill every parameter of ``model`` in place."""
    with torch.no_grad():
        for weight in weights(shape):
            fill(model.get_parameter(weight.name).view(-1), weight, seed)


@torch.no_grad()
def fill(out: Tensor, weight: Weight, seed: int, start: int = 0) -> Tensor:
    """Write elements ``start`` and following of the flattened weight into all of ``out`` (1-D), and give it back."""
    if weight.std == 0:
        return out.fill_(weight.mean)
    first = start // BLOCK
    blocks = -(-(start + out.numel()) // BLOCK) - first
    source = numpy.random.Philox(key=number(seed, weight.name, bytes_wide=16), counter=first * BLOCK // WORDS)
    for block in range(first, first + blocks):
        normal = _normal(source.random_raw(BLOCK)).mul_(weight.std).add_(weight.mean)
        low, high = max(start, block * BLOCK), min(start + out.numel(), (block + 1) * BLOCK)
        out[low - start : high - start].copy_(normal[low - block * BLOCK : high - block * BLOCK])
    return out


def fill_box(out: Tensor, weight: Weight, seed: int, box: Box) -> Tensor:
    """Write one box of the weight into ``out``, which has as many elements, in the box's order; and give it back."""
    flat, done = out.view(-1), 0
    for offset, length in box.runs(weight.shape):
        fill(flat[done : done + length], weight, seed, offset)
        done += length
    return out


def _normal(words: numpy.ndarray) -> Tensor:
    """BLOCK standard normal numbers in fp64 from as many words of 64 random bits (Box and Muller 1958)."""
    words >>= numpy.uint64(11)  # 53 bits, as many as the numbers between 0 and 1 have
    uniform = torch.from_numpy(words.view(numpy.int64)).to(torch.float64).mul_(2.0**-53)
    radius, angle = uniform[: BLOCK // 2], uniform[BLOCK // 2 :]
    radius.neg_().log1p_().mul_(-2).sqrt_()  # the log of 1 - u, as u may be 0 and is never 1
    angle.mul_(2 * math.pi)
    return torch.cat([angle.cos().mul_(radius), angle.sin().mul_(radius)])
