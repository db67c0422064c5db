"""Noise: dropout whose masks are a pure function of what is dropped, not of who drops it or when.

A mask comes from the run's seed, the step, the place in the model and the sample's number in the step. So every cut
of a batch over ranks and micro-batches drops the same elements, and a recomputed or resumed step drops them again.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor, nn

from hpctrain.errors import ShapeError


@dataclass(frozen=True)
class Noise:
    """Where the dropout of one micro-batch comes from."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the number of each row of the micro-batch among the samples of the step

    def drop(self, x_BTD: Tensor, rate: float, site: str) -> Tensor:
        """``x`` with a part ``rate`` of its elements zero and the others divided by ``1 - rate``.

        ``site`` names the place in the model, for each its own masks. Raises ShapeError when ``x`` has another
        number of rows than there are samples.
        """
        if len(self.samples) != x_BTD.shape[0]:
            raise ShapeError(
                f"dropout at {site}: {x_BTD.shape[0]} rows, but {len(self.samples)} sample numbers",
                "each row's mask comes from its sample's number",
                "give Noise the numbers of the samples in this micro-batch, in order",
            )
        keep_BTD = torch.empty(x_BTD.shape, dtype=torch.bool, device=x_BTD.device)
        generator = torch.Generator(device=x_BTD.device)
        for keep_TD, sample in zip(keep_BTD, self.samples, strict=True):
            generator.manual_seed(number(self.seed, "dropout", self.step, site, sample))
            keep_TD.bernoulli_(1 - rate, generator=generator)
        return _Drop.apply(x_BTD, keep_BTD, 1 - rate)


class _Drop(torch.autograd.Function):
    """The product with a mask; keeps a byte an element, where autograd would keep the mask as it multiplies."""

    @staticmethod
    def forward(ctx, x: Tensor, keep: Tensor, part: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.part = part
        return x * keep.to(x.dtype).div_(part)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (keep,) = ctx.saved_tensors
        return gradient * keep.to(gradient.dtype).div_(ctx.part), None, None


class Dropout(nn.Module):
    """Dropout at one place of the model; without noise (validation) or with a rate of 0 it does nothing."""

    def __init__(self, rate: float, site: str) -> None:
        super().__init__()
        self.rate, self.site = rate, site

    def forward(self, x_BTD: Tensor, noise: Noise | None) -> Tensor:
        return noise.drop(x_BTD, self.rate, self.site) if noise and self.rate else x_BTD


def number(*key: int | str, bytes_wide: int = 8) -> int:
    """A number from a key: the same everywhere, and unrelated for keys that differ in any part."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=bytes_wide).digest(), "little")
