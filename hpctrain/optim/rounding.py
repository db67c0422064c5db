"""Stochastic rounding to bf16, with bits that are a function of what is rounded and when, not of who rounds.

A running mean moves by less than bf16 can tell: rounded to nearest, it would stand still. Rounded up with the
probability of what is cut off, it is right on average. The bits come from (seed, step, parameter, index of the
element) by an integer hash of 32 bits, so every cut of a parameter rounds each element alike.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

from hpctrain.optim.flat import Piece

BLOCK = 1 << 24  # elements that share a key: a multiple of what is worked on at once


def round_(out: Tensor, x: Tensor, bits: Tensor) -> None:
    """Write fp32 ``x`` into bf16 ``out``, up or down as the low 16 of its ``bits`` say. The memory of ``x`` is used."""
    whole = x.view(torch.int32).add_(bits.bitwise_and(0xFFFF)).bitwise_and_(-0x10000)
    out.copy_(whole.view(torch.float32))  # exact: what bf16 cannot hold is zero now


def random_bits(seed: int, step: int, piece: Piece, device: torch.device) -> Tensor:
    """32 random bits, as an int32, for each element of a piece that lies within one block of its parameter.

    The hash is Wellons' lowbias32 (2018, nullprogram.com/blog/2018/07/31) of the element's place in its block, with
    one half of the block's key at the beginning and the other half inside.
    """
    block, first = divmod(piece.first, BLOCK)
    key = _key(seed, step, piece.name, block)
    x = torch.arange(first, first + piece.stop - piece.start, dtype=torch.int32, device=device)
    _fold_(x.bitwise_xor_(_signed(key)), 16).mul_(0x7FEB352D)
    _fold_(x, 15).bitwise_xor_(_signed(key >> 32)).mul_(_signed(0x846CA68B))
    return _fold_(x, 16)


def _key(*what: int | str) -> int:
    """64 bits of what they are for."""
    return int.from_bytes(blake2b(repr(what).encode(), digest_size=8).digest(), "little")


def _fold_(x: Tensor, shift: int) -> Tensor:
    """``x ^= x >> shift``, zeros coming in from above; int32 shifts copies of its sign in."""
    return x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << (32 - shift)) - 1))


def _signed(word: int) -> int:
    """The low 32 bits as the int32 of the same bits."""
    return ((word & 0xFFFFFFFF) ^ 0x80000000) - 0x80000000
