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
from hpctrain.model.frame import Frame, Tokens


@dataclass(frozen=True)
class Noise:
    """Where the dropout of one micro-batch comes from."""

    seed: int
    step: int
    samples: tuple[int, ...]  # the number of each row of the micro-batch among the samples of the step

    def drop(self, x: Tensor, rate: float, site: str, tokens: Tokens | None = None) -> Tensor:
        """``x`` with a part ``rate`` of its elements zero and the others divided by ``1 - rate``.

        ``x`` is ``[B, T, D]``, or ``[n, D]`` with ``tokens`` saying which these are. ``site`` names the place in the
        model, for each its own masks. Raises ShapeError when there are other numbers of rows and of samples.
        """
        tokens = tokens or Tokens.whole(*x.shape[:2])
        if len(self.samples) != tokens.rows:
            raise ShapeError(
                f"dropout at {site}: {tokens.rows} rows, but {len(self.samples)} sample numbers",
                "each row's mask comes from its sample's number",
                "give Noise the numbers of the samples in this micro-batch, in order",
            )
        keep = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        self._draw(keep.view(-1, x.shape[-1]), 1 - rate, site, tokens)
        return _Drop.apply(x, keep, 1 - rate)

    def _draw(self, keep_ND: Tensor, part: float, site: str, tokens: Tokens) -> None:
        """Each sample's mask; it is drawn whole, since a generator cannot be trusted to begin in the middle of it."""
        generator = torch.Generator(device=keep_ND.device)
        for row in range(tokens.start // tokens.length, -(-tokens.stop // tokens.length)):
            generator.manual_seed(number(self.seed, "dropout", self.step, site, self.samples[row]))
            first = row * tokens.length
            start, stop = max(first, tokens.start), min(first + tokens.length, tokens.stop)
            own_TD = keep_ND[start - tokens.start : stop - tokens.start]
            if stop - start == tokens.length:
                own_TD.bernoulli_(part, generator=generator)
            else:
                whole_TD = own_TD.new_empty(tokens.length, own_TD.shape[1]).bernoulli_(part, generator=generator)
                own_TD.copy_(whole_TD[start - first : stop - first])


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

    def forward(self, x: Tensor, frame: Frame) -> Tensor:
        return frame.noise.drop(x, self.rate, self.site, frame.tokens) if frame.noise and self.rate else x


def number(*key: int | str, bytes_wide: int = 8) -> int:
    """A number from a key: the same everywhere, and unrelated for keys that differ in any part."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=bytes_wide).digest(), "little")
