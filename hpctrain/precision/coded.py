"""Coded: numbers that travel in 8 bits, a block of neighbours with one scale (ZeRO++, Wang 2023, section 3.1).

A message is the scales of its blocks in fp32, the last numbers in fp32 where these are to be exact, and a byte for each
other number, filled up to whole words: 1.016 bytes a number. In ``int8`` all steps of a block are equal, so an error is
at most 1/254 of the block's largest number; in ``fp8`` (e4m3) a step grows with its number, so an error is at most 1/16
of the number itself, save for the smallest. What is not finite comes out as NaN, with its whole block: an overflow
shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hpctrain.precision.fp8 import FORWARD, cast, powers

BLOCK = 256  # numbers with one scale
CHUNK = 1 << 18  # numbers worked on at once, whole blocks: few enough to stay in a core's cache
WORD = 4  # bytes of an fp32 number


@dataclass(frozen=True)
class Form:
    """A format of 8 bits: the scale of a block by its largest number (fp32), and codes of numbers by their scales."""

    dtype: torch.dtype
    scale: Callable[[Tensor], Tensor]
    code: Callable[[Tensor], Tensor]


def _even(largest: Tensor) -> Tensor:
    steps = (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)
    return torch.where(largest.isfinite(), steps, torch.nan)


FORMS = {
    "int8": Form(torch.int8, _even, lambda x: x.round_().to(torch.int8)),
    "fp8": Form(FORWARD, lambda largest: powers(largest, FORWARD), lambda x: cast(x, FORWARD)),
}


def coded_bytes(numel: int, exact: int = 0) -> int:
    """The length of the message of so many numbers, of which the last ``exact`` are not coded."""
    coded = numel - exact
    return WORD * (-(-coded // BLOCK) + exact + -(-coded // WORD))


@torch.no_grad()
def encode(x: Tensor, form: str, exact: int = 0) -> Tensor:
    """The message of a 1-D tensor: uint8, ``coded_bytes`` long. ``form`` is a key of FORMS."""
    kind, message = FORMS[form], torch.empty(coded_bytes(x.numel(), exact), dtype=torch.uint8, device=x.device)
    scale, last, code = _fields(message, x.numel() - exact, exact, kind)
    last.copy_(x[x.numel() - exact :])
    for scales, codes, numbers in _chunks(scale, code, x[: code.numel()]):
        blocks = _blocks(numbers.float())
        scales.copy_(kind.scale(blocks.abs().amax(1)))
        codes.copy_(kind.code(blocks / scales[:, None]).view(-1)[: codes.numel()])
    return message


@torch.no_grad()
def decode(out: Tensor, message: Tensor, form: str, exact: int = 0, add: bool = False) -> None:
    """Write the numbers of a message into ``out``, 1-D and as long as what was encoded, or add them to it."""
    scale, last, code = _fields(message, out.numel() - exact, exact, FORMS[form])
    _put(out[code.numel() :], last, add)
    for scales, codes, numbers in _chunks(scale, code, out[: code.numel()]):
        _put(numbers, _blocks(codes.float()).mul_(scales[:, None]).view(-1)[: codes.numel()], add)


def _put(out: Tensor, x: Tensor, add: bool) -> None:
    (out.add_ if add else out.copy_)(x)


def _fields(message: Tensor, coded: int, exact: int, kind: Form) -> tuple[Tensor, Tensor, Tensor]:
    """The scales of a message, its exact numbers, and its codes."""
    first = WORD * -(-coded // BLOCK)
    second = first + WORD * exact
    wide = (message[:first].view(torch.float32), message[first:second].view(torch.float32))
    return *wide, message[second : second + coded].view(kind.dtype)


def _chunks(scales: Tensor, codes: Tensor, x: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """A chunk of each at a time."""
    return zip(scales.split(CHUNK // BLOCK), codes.split(CHUNK), x.split(CHUNK), strict=True)


def _blocks(x: Tensor) -> Tensor:
    """Rows of a block each, the last one filled up with zeros."""
    return (F.pad(x, (0, -x.numel() % BLOCK)) if x.numel() % BLOCK else x).view(-1, BLOCK)
