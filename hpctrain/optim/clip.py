"""The norm of all gradients, each element counted once, and scaling them to a limit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hpctrain.comm.group import Group
from hpctrain.comm.reduce import WIDE

CHUNK = 1 << 16  # elements: a plain fp32 norm of 34 million elements was seen to be wrong in the third digit


def global_norm(gradients: Sequence[Tensor], group: Group | None = None) -> float:
    """The Euclidean norm of the gradients of the whole model; infinite or NaN when any of them is.

    Without a group the tensors here are the whole of it, as where every rank holds all reduced gradients. With one,
    each rank gives its own part and no other rank's, and all ranks call. Chunks are summed in the gradients' own
    dtype or, of 16-bit ones, in fp32; the chunks in fp64.
    """
    chunks = [chunk for gradient in gradients for chunk in gradient.view(-1).split(CHUNK) if chunk.numel()]
    squares = torch.zeros(1, dtype=torch.float64, device=gradients[0].device if gradients else None)
    if chunks:
        wide = WIDE.get(chunks[0].dtype, chunks[0].dtype)
        squares += torch.stack(torch._foreach_norm(chunks, 2, dtype=wide)).double().square().sum()
    if group is not None:
        group.all_reduce(squares)
    return math.sqrt(squares.item())


def scale_(gradients: Sequence[Tensor], norm: float, limit: float) -> None:
    """Scale the gradients down so that their norm, now ``norm``, is ``limit``; 0 for no limit.

    A norm that is not finite changes nothing: whether to skip such a step or to stop is for the caller to decide,
    from the same norm, which all ranks have.
    """
    if 0 < limit < norm < math.inf:
        torch._foreach_mul_(list(gradients), limit / norm)
