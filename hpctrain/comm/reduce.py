"""Reduce: several equal flat tensors into one, in their order, a block at a time so that sums stay in the cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from hpctrain.comm.group import Op

BLOCK_BYTES = 512 * 1024  # half of a usual second-level cache: the running sum stays there while sources stream by

COMBINE = {"sum": torch.add, "mean": torch.add, "max": torch.maximum, "min": torch.minimum}
WIDE = {torch.bfloat16: torch.float32, torch.float16: torch.float32}


class Reducer:
    """Reduces by ``op``; it keeps its scratch memory, which is why it is a class. Used by one thread at a time."""

    def __init__(self) -> None:
        self._scratch: dict[tuple[torch.dtype, int], Tensor] = {}

    def __call__(self, out: Tensor, sources: Sequence[Tensor], op: Op) -> None:
        """Reduce ``sources`` into ``out``, which may be one of them. bf16 and fp16 add up in fp32, rounded once.

        ``out`` may be of the wider dtype.
        """
        if out.numel() <= _step(out.dtype):
            return self.block(out, sources, op)
        for out_block, *blocks in self.blocks([out, *sources]):
            self.block(out_block, blocks, op)

    @staticmethod
    def blocks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """Equal tensors, a block of each at a time."""
        step = _step(tensors[0].dtype)
        return zip(*(tensor.split(step) for tensor in tensors), strict=True)

    def block(self, out: Tensor, sources: Sequence[Tensor], op: Op) -> None:
        """Reduce at most a block."""
        if len(sources) == 1:
            out.copy_(sources[0])
        elif sources[0].dtype in WIDE and op in ("sum", "mean"):
            self._wide(out, sources, op)
        else:
            self._plain(out, sources, op)

    def _plain(self, out: Tensor, sources: Sequence[Tensor], op: Op) -> None:
        combine = COMBINE[op]
        running, room = sources[0], out
        if out.data_ptr() in [source.data_ptr() for source in sources[2:]]:
            room = self._of(out.dtype, 0, out.numel())  # what is still to be read must not be written over
        for source in sources[1:-1]:
            running = combine(running, source, out=room)
        combine(running, sources[-1], out=out)
        if op == "mean":
            out.div_(len(sources))

    def _wide(self, out: Tensor, sources: Sequence[Tensor], op: Op) -> None:
        of = partial(self._of, WIDE[sources[0].dtype], numel=out.numel())
        running, next_one = of(0).copy_(sources[0]), of(1)
        for source in sources[1:]:
            running.add_(next_one.copy_(source))
        if op == "mean":
            running.div_(len(sources))
        out.copy_(running)

    def _of(self, dtype: torch.dtype, index: int, numel: int) -> Tensor:
        if (dtype, index) not in self._scratch:
            self._scratch[dtype, index] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=dtype)
        return self._scratch[dtype, index][:numel]


def _step(dtype: torch.dtype) -> int:
    return BLOCK_BYTES // WIDE.get(dtype, dtype).itemsize


def cut(total: int, pieces: int, align: int = 1) -> list[int]:
    """Sizes of ``pieces`` runs that make ``total``, equal up to ``align``; the last ones may be shorter or empty."""
    step = -(-total // pieces)
    step = -(-step // align) * align
    return [max(0, min(step, total - i * step)) for i in range(pieces)]


def starts(sizes: Sequence[int]) -> list[int]:
    """Where each of the runs begins."""
    found, position = [], 0
    for size in sizes:
        found.append(position)
        position += size
    return found
