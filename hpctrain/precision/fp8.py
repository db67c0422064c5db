"""fp8: products of linear maps whose operands have 8 bits, e4m3 forward and e5m2 for gradients.

Each operand is divided by a scale that brings its largest element just below the format's largest number (current
scaling: from the tensor itself, not from those of steps before; Micikevicius 2022, FP8 Formats for Deep Learning). A
scale is a power of two, so that only the format rounds and a 16-bit format holds every product of scale and number
exactly. A recipe says how much of a tensor shares a scale: all of it, or tiles of 1 x 128 along the dim that is summed
over (of weights 128 x 128), so that an outlier costs precision only near itself (DeepSeek-V3 2024, section 3.3).

Where the device multiplies fp8 (``torch._scaled_mm``), one scale a tensor goes there. Elsewhere, and for tiles, the
product is emulated: the same 8-bit numbers, times their scales, are multiplied in the format of the inputs. What is
kept for the backward are the 8-bit inputs and the weight itself, which is made 8-bit again there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FORWARD, GRADIENT = torch.float8_e4m3fn, torch.float8_e5m2
TILE = 128
WHOLE = 1 << 62  # a tile as large as any tensor


@dataclass(frozen=True)
class Recipe:
    """The rows and columns that share a scale: of what the sum runs along in columns, and of weights."""

    along: tuple[int, int]
    weight: tuple[int, int]


RECIPES = {
    "tensor": Recipe((WHOLE, WHOLE), (WHOLE, WHOLE)),
    "block": Recipe((1, TILE), (TILE, TILE)),
}


def in_fp8(blocks: nn.Module, recipe: str) -> None:
    """Let the linear maps inside take their products in fp8; ``recipe`` is a value of ``precision.fp8``."""
    if recipe != "none":
        for module in blocks.modules():
            if hasattr(module, "product"):
                module.product = partial(linear, recipe=RECIPES[recipe])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, recipe: Recipe) -> Tensor:
    """``x @ weight.T + bias`` in fp8, its gradients too; ``x`` is ``[..., in]``, ``weight`` is ``[out, in]``."""
    y = _Product.apply(x.flatten(0, -2), weight, recipe).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


@dataclass(frozen=True)
class Quantised:
    """A matrix in 8 bits, and the scale of each of its tiles."""

    values: Tensor
    scales: Tensor  # fp32, [row tiles, column tiles]
    tile: tuple[int, int]

    @classmethod
    def of(cls, x: Tensor, tile: tuple[int, int], form: torch.dtype) -> Quantised:
        """The numbers nearest to ``x`` that tiles of this many rows and columns have under their own scales."""
        tile = tuple(max(1, min(size, whole)) for size, whole in zip(tile, x.shape, strict=True))
        tiles = _tiles(x, tile)
        scales = powers(tiles.abs().amax((1, 3)).float(), form)
        return cls(_matrix(cast(tiles * scales[:, None, :, None].reciprocal(), form), x.shape), scales, tile)

    def wide(self, dtype: torch.dtype) -> Tensor:
        """The matrix that these numbers stand for."""
        tiles = _tiles(self.values.to(dtype), self.tile)
        return _matrix(tiles * self.scales[:, None, :, None].to(dtype), self.values.shape)

    def t(self) -> Quantised:
        return Quantised(self.values.t(), self.scales.t(), self.tile[::-1])


def cast(x: Tensor, form: torch.dtype) -> Tensor:
    """The nearest numbers of the format; what is too large becomes its largest, and NaN stays NaN."""
    largest = torch.finfo(form).max
    return x.clamp(-largest, largest).to(form)


def powers(largest: Tensor, form: torch.dtype) -> Tensor:
    """For each largest element (fp32) the least power of two that divides it into the format's range; 1 for zero.

    NaN where the element is not finite, so that an overflow shows in the product and is not hidden by a cast.
    """
    fraction, exponent = torch.frexp(largest / torch.finfo(form).max)
    exponent = (exponent - (fraction == 0.5).int()).clamp(-126, 127)
    scale = ((exponent + 127) << 23).view(torch.float32)  # put together from its bits: exact on any device
    return torch.where(largest == 0, 1.0, torch.where(largest.isfinite(), scale, torch.nan))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, recipe: Recipe) -> Tensor:
        kept = Quantised.of(x, recipe.along, FORWARD)
        ctx.save_for_backward(kept.values, kept.scales, weight)
        ctx.tile, ctx.recipe = kept.tile, recipe
        return multiply(kept, Quantised.of(weight, recipe.weight, FORWARD), x.dtype)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        values, scales, weight = ctx.saved_tensors
        dtype, recipe = gradient.dtype, ctx.recipe
        x, g = Quantised(values, scales, ctx.tile), Quantised.of(gradient, recipe.along, GRADIENT)
        x_grad = multiply(g, Quantised.of(weight.t(), recipe.weight, FORWARD), dtype)
        if recipe.along != (WHOLE, WHOLE):  # here the sum runs along tokens, and so have the tiles to
            g = Quantised.of(gradient, recipe.along[::-1], GRADIENT)
            x = Quantised.of(x.wide(emulated(dtype)), recipe.along[::-1], FORWARD)
        if weight.stride(0) < weight.stride(1):  # a transposed view: its gradient is to lie in memory as it does
            return x_grad, multiply(x.t(), g.t(), dtype).t(), None
        return x_grad, multiply(g.t(), x.t(), dtype), None


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """``a @ b.T``, by the device's own fp8 product where it has one."""
    return (scaled_product if _has_product(a, b, dtype) else emulated_product)(a, b, dtype)


def scaled_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """The product by torch; one scale a tensor, and rows of whole 16 numbers."""
    rows, columns = a.values.contiguous(), b.values.contiguous().t()
    return torch._scaled_mm(rows, columns, a.scales.view(()), b.scales.view(()), out_dtype=dtype)


def emulated_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """The same product of the same numbers, made wide first: which rounds nothing, as scales are powers of two."""
    wide = emulated(dtype)
    return F.linear(a.wide(wide), b.wide(wide)).to(dtype)


def emulated(dtype: torch.dtype) -> torch.dtype:
    """The format of an emulated product: fp16 has too few exponents to hold fp8 numbers times their scales."""
    return torch.float32 if dtype == torch.float16 else dtype


def _has_product(a: Quantised, b: Quantised, dtype: torch.dtype) -> bool:
    able = a.values.is_cuda and torch.cuda.get_device_capability(a.values.device) >= (8, 9)
    whole = a.scales.numel() == b.scales.numel() == 1
    return able and whole and dtype != torch.float64 and not any(n % 16 for n in b.values.shape)


def _tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """``[row tiles, rows, column tiles, columns]``, the last ones filled up with zeros."""
    below, right = (-whole % size for whole, size in zip(x.shape, tile, strict=True))
    x = F.pad(x, (0, right, 0, below)) if below or right else x
    return x.unflatten(1, (-1, tile[1])).unflatten(0, (-1, tile[0]))


def _matrix(tiles: Tensor, shape: torch.Size) -> Tensor:
    return tiles.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
