"""Codes of 8 bits for running means: blocks of a parameter, each with a scale, in steps that grow with the number.

Dynamic codes (Dettmers 2016, 8-Bit Approximations for Parallelism in Deep Learning; 2022, 8-bit Optimizers via
Block-wise Quantization) spend their bits on seven decades below the largest number of a block, twice as many codes in
each as in the one below. A block is ``BLOCK`` neighbours in the flattened parameter, whoever owns them.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from hpctrain.plan.states import BLOCK

DECADES = 7


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The numbers in fp32 of uint8 codes, each with its scale."""
    return table(signed, codes.device).index_select(0, codes.int()).mul_(scales)


def encode(x: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """The nearest uint8 code of each number, the one above where two are as near.

    Of unsigned numbers only zero gets the code of zero: a square that was lost would let its mean take a huge step.
    """
    below, middles = search(signed, x.device)
    parts = (x / scales.clamp(min=torch.finfo(torch.float32).tiny)).float()
    codes = below.index_select(0, parts.view(torch.int32).bitwise_right_shift(16).bitwise_and_(0xFFFF))
    codes += parts >= middles.index_select(0, codes.int())
    return codes if signed else codes.clamp_(min=1).mul_(x > 0)


@lru_cache
def search(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """For the 16 high bits of an fp32 number, the code of the least such number; and what begins the next code.

    Numbers that have them in common are so near each other that at most one middle of two codes lies between them.
    """
    numbers = table(signed, torch.device("cpu"))
    middles = (numbers[1:] + numbers[:-1]) / 2
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    least = torch.minimum(high.view(torch.float32), (high | 0xFFFF).view(torch.float32))
    codes = torch.bucketize(least.nan_to_num(), middles, right=True).to(torch.uint8)
    return codes.to(device), torch.cat([middles, torch.tensor([torch.inf])]).to(device)


@lru_cache
def table(signed: bool, device: torch.device) -> Tensor:
    """The 256 numbers between -1 (or 0) and 1 that codes stand for, in rising order, fp32."""
    numbers = [0.0, 1.0]
    for decade in range(DECADES):
        count = 2**decade if signed else 2 ** (decade + 1)
        step = 0.9 / count
        middles = [10.0 ** (decade - DECADES + 1) * (0.1 + (i + 0.5) * step) for i in range(count)]
        numbers += middles + ([-middle for middle in middles] if signed else [])
    return torch.tensor(sorted(numbers), dtype=torch.float32, device=device)


def largest(x: Tensor, first: int) -> Tensor:
    """The largest magnitude in each block that ``x`` touches; ``x`` begins at element ``first`` of its parameter."""
    before = first % BLOCK
    after = -(first + x.numel()) % BLOCK
    whole = torch.nn.functional.pad(x, (before, after)) if before or after else x
    return whole.view(-1, BLOCK).abs().amax(1)


def stretched(scales: Tensor, first: int, stop: int) -> Tensor:
    """Of the scales of a parameter's blocks, the one of each element from ``first`` to ``stop``."""
    start = first // BLOCK
    long = scales[start : -(-stop // BLOCK)].repeat_interleave(BLOCK)
    return long[first - start * BLOCK : stop - start * BLOCK]
